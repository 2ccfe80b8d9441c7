//! [`CommVolume`]: the amounts that ranks send in the collectives of a plan, and in those of its gradient.

use smallvec::SmallVec;

use super::fused_step::fused_steps;
use super::{Layout, Step};

/// A collective and the amount that a rank sends in it, relative to the size of the tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct CommVolume {
    /// Mesh dimensions whose ranks participate.
    pub mesh_dims: SmallVec<[usize; 3]>,
    /// Name of the collective, such as `all-gather`.
    pub collective: &'static str,
    /// Amount per tensor, in units of [`FULL_TENSOR`](Self::FULL_TENSOR).
    pub share: u64,
}

impl CommVolume {
    /// Unit of the amount: one full tensor.
    pub(crate) const FULL_TENSOR: u64 = Step::FULL_TENSOR;

    /// Returns the bytes that a rank sends, for a tensor of `bytes`.
    pub(crate) fn bytes(&self, bytes: u64) -> u64 {
        let sent = u128::from(self.share) * u128::from(bytes);
        ((sent + u128::from(Self::FULL_TENSOR / 2)) / u128::from(Self::FULL_TENSOR)) as u64
    }
}

/// Returns the collectives of a plan that starts at `from`. `joins` is true if the mesh allows
/// fused steps. Mesh dimensions `varying`, on which ranks compute different things with the result,
/// are not fused with others.
pub(crate) fn sent_forward<'a>(
    from: &'a Layout,
    steps: &'a [(Step, Layout)],
    varying: &'a [usize],
    joins: bool,
) -> impl Iterator<Item = CommVolume> + 'a {
    fused_steps(from, steps, varying, joins).filter_map(|joined| {
        let collective = joined.step.collective()?;
        let share = joined.step.traffic_over(joined.before, joined.ranks());
        Some(CommVolume {
            mesh_dims: joined.mesh_dims,
            collective,
            share,
        })
    })
}

/// Returns the collectives that compute the gradient of a plan's input and sum it over the mesh
/// dimensions `varying`. Dimensions that have a step are summed in its VJP, and all others together
/// afterwards.
pub(crate) fn sent_backward<'a>(
    from: &'a Layout,
    steps: &'a [(Step, Layout)],
    varying: &'a [usize],
    joins: bool,
) -> impl Iterator<Item = CommVolume> + 'a {
    let walked = fused_steps(from, steps, varying, joins).flat_map(|joined| {
        let ranks = joined.ranks();
        let sum = joined.varies.then(|| match joined.step {
            // Only this rank's slice of the sum is needed.
            Step::AllGather { .. } => ("reduce-scatter", scattered(joined.after, ranks)),
            _ => ("all-reduce", 2 * scattered(joined.after, ranks)),
        });
        let undone = joined.step.undone_by(joined.before, ranks);
        sum.into_iter()
            .chain(undone)
            .map(move |(collective, share)| CommVolume {
                mesh_dims: joined.mesh_dims.clone(),
                collective,
                share,
            })
    });
    let mesh_dims: SmallVec<[usize; 3]> = varying
        .iter()
        .copied()
        .filter(|dim| {
            from.mesh_shape()[*dim] > 1 && steps.iter().all(|(step, _)| step.mesh_dim() != *dim)
        })
        .collect();
    let ranks = mesh_dims
        .iter()
        .map(|&dim| from.mesh_shape()[dim] as u64)
        .product();
    let sum = (!mesh_dims.is_empty()).then(|| {
        let share = 2 * scattered(from, ranks);
        CommVolume {
            mesh_dims,
            collective: "all-reduce",
            share,
        }
    });
    walked.chain(sum)
}

/// Returns the amount that a rank sends in a reduce-scatter of a tensor over `ranks` ranks that
/// hold the same shard of it.
fn scattered(layout: &Layout, ranks: u64) -> u64 {
    layout.local_share() / ranks * (ranks - 1)
}
