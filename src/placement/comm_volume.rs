//! [`CommVolume`]: what the ranks send along a plan, and for the gradient on its way back.

use smallvec::SmallVec;

use super::fused_step::fused_steps;
use super::{Layout, Step};

/// A collective, and what a rank sends in it, whatever the size of the tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct CommVolume {
    /// Those whose ranks take part.
    pub mesh_dims: SmallVec<[usize; 3]>,
    /// Its name, such as `all-gather`.
    pub collective: &'static str,
    /// In units of [`FULL_TENSOR`](Self::FULL_TENSOR) per tensor.
    pub share: u64,
}

impl CommVolume {
    /// The unit: a whole tensor.
    pub(crate) const FULL_TENSOR: u64 = Step::FULL_TENSOR;

    /// The bytes that a rank sends of a tensor of `bytes`.
    pub(crate) fn bytes(&self, bytes: u64) -> u64 {
        let sent = u128::from(self.share) * u128::from(bytes);
        ((sent + u128::from(Self::FULL_TENSOR / 2)) / u128::from(Self::FULL_TENSOR)) as u64
    }
}

/// The collectives of a plan from `from`, on a mesh that joins its dimensions or not. Mesh dimensions `varying`,
/// on which ranks compute different things with what the plan ends with, are joined with no others.
pub(crate) fn sent_forward<'a>(
    from: &'a Layout,
    steps: &'a [(Step, Layout)],
    varying: &'a [usize],
    joins: bool,
) -> impl Iterator<Item = CommVolume> + 'a {
    fused_steps(from, steps, varying, joins).filter_map(|joined| {
        let (collective, share) = (joined.step.collective()?, joined.step.traffic_over(joined.before, joined.ranks()));
        Some(CommVolume { mesh_dims: joined.mesh_dims, collective, share })
    })
}

/// The collectives that take a gradient back along a plan, and that sum it over the mesh dimensions
/// `varying`: where their step is pulled back, and over all others at once.
pub(crate) fn sent_backward<'a>(
    from: &'a Layout,
    steps: &'a [(Step, Layout)],
    varying: &'a [usize],
    joins: bool,
) -> impl Iterator<Item = CommVolume> + 'a {
    let walked = fused_steps(from, steps, varying, joins).flat_map(|joined| {
        let ranks = joined.ranks();
        let sum = joined.varies.then(|| match joined.step {
            // The sum's own slice is all that is needed.
            Step::AllGather { .. } => ("reduce-scatter", scattered(joined.after, ranks)),
            _ => ("all-reduce", 2 * scattered(joined.after, ranks)),
        });
        let undone = joined.step.undone_by(joined.before, ranks);
        let sent = move |(collective, share)| CommVolume { mesh_dims: joined.mesh_dims.clone(), collective, share };
        sum.into_iter().chain(undone).map(sent)
    });
    let stays = |dim: &usize| from.mesh_shape()[*dim] > 1 && steps.iter().all(|(step, _)| step.mesh_dim() != *dim);
    let mesh_dims: SmallVec<[usize; 3]> = varying.iter().copied().filter(stays).collect();
    let ranks = mesh_dims.iter().map(|&dim| from.mesh_shape()[dim] as u64).product();
    let sum = (!mesh_dims.is_empty()).then(|| {
        let share = 2 * scattered(from, ranks);
        CommVolume { mesh_dims, collective: "all-reduce", share }
    });
    walked.chain(sum)
}

/// What a rank sends to reduce a tensor over so many ranks that have the same part of it, and to scatter it.
fn scattered(layout: &Layout, ranks: u64) -> u64 {
    layout.local_share() / ranks * (ranks - 1)
}
