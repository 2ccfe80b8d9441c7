//! [`fused_steps`]: fuses the steps of a plan that can be executed as one collective.

use smallvec::SmallVec;

use super::{Layout, Step};

/// Consecutive steps executed as one, over the ranks of all their mesh dimensions.
#[derive(Debug)]
pub(crate) struct FusedStep<'a> {
    /// The last of the steps; the others are of the same kind.
    pub step: Step,
    /// Mesh dimensions of the steps, in shard order, outermost first.
    pub mesh_dims: SmallVec<[usize; 3]>,
    /// Layout before the first step.
    pub before: &'a Layout,
    /// Layout after the last step.
    pub after: &'a Layout,
    /// True if the ranks along these mesh dimensions compute different things with the result.
    pub varies: bool,
}

impl FusedStep<'_> {
    /// Returns the number of ranks that participate.
    pub(super) fn ranks(&self) -> u64 {
        self.mesh_dims
            .iter()
            .map(|&mesh_dim| self.before.mesh_shape()[mesh_dim] as u64)
            .product()
    }
}

/// Returns the steps of a plan that starts at `from`, with consecutive steps fused where they [can
/// be](Step::can_fuse_with). Only steps whose mesh dimensions are all `varying`, or all not, are
/// fused. Without `can_fuse_with`, for a mesh whose dimensions have separate communicators, no
/// steps are fused.
pub(crate) fn fused_steps<'a>(
    from: &'a Layout,
    steps: &'a [(Step, Layout)],
    varying: &'a [usize],
    can_fuse_with: bool,
) -> impl Iterator<Item = FusedStep<'a>> + 'a {
    let varies = |step: &Step| varying.contains(&step.mesh_dim());
    steps
        .chunk_by(move |(a, _), (b, _)| {
            can_fuse_with && a.can_fuse_with(*b) && varies(a) == varies(b)
        })
        .scan(from, move |before, steps| {
            let (step, after) = steps.last()?;
            let mut mesh_dims: SmallVec<[usize; 3]> =
                steps.iter().map(|(step, _)| step.mesh_dim()).collect();
            match step {
                Step::AllReduce { .. } => mesh_dims.sort_unstable(),
                // Gathers go from the innermost mesh dimension outwards.
                Step::AllGather { .. } => mesh_dims.reverse(),
                _ => {}
            }
            let before = std::mem::replace(before, after);
            Some(FusedStep {
                step: *step,
                mesh_dims,
                before,
                after,
                varies: varies(step),
            })
        })
}
