//! [`fused_steps`]: the steps of a plan, those together that are one collective.

use smallvec::SmallVec;

use super::{Layout, Step};

/// Steps that follow each other and are one, over the ranks of all their mesh dimensions.
#[derive(Debug)]
pub(crate) struct FusedStep<'a> {
    /// The last of them; the others are of its kind.
    pub step: Step,
    /// The outermost cut first.
    pub mesh_dims: SmallVec<[usize; 3]>,
    /// The layout before the first.
    pub before: &'a Layout,
    /// The layout after the last.
    pub after: &'a Layout,
    /// Whether ranks along its mesh dimensions compute different things with what it ends with.
    pub varies: bool,
}

impl FusedStep<'_> {
    /// How many ranks take part.
    pub(super) fn ranks(&self) -> u64 {
        self.mesh_dims.iter().map(|&mesh_dim| self.before.mesh_shape()[mesh_dim] as u64).product()
    }
}

/// The steps of a plan from `from`, those together that [join](Step::can_fuse_with), and whose mesh dimensions are all
/// among `varying` or none is. One by one on a mesh that does not join its dimensions.
pub(crate) fn fused_steps<'a>(
    from: &'a Layout,
    steps: &'a [(Step, Layout)],
    varying: &'a [usize],
    can_fuse_with: bool,
) -> impl Iterator<Item = FusedStep<'a>> + 'a {
    let varies = |step: &Step| varying.contains(&step.mesh_dim());
    let one = move |(a, _): &(Step, Layout), (b, _): &(Step, Layout)| {
        can_fuse_with && a.can_fuse_with(*b) && varies(a) == varies(b)
    };
    steps.chunk_by(one).scan(from, move |before, steps| {
        let (step, after) = steps.last()?;
        let mut mesh_dims: SmallVec<[usize; 3]> = steps.iter().map(|(step, _)| step.mesh_dim()).collect();
        match step {
            Step::AllReduce { .. } => mesh_dims.sort_unstable(),
            // Cuts are undone from the innermost on.
            Step::AllGather { .. } => mesh_dims.reverse(),
            _ => {}
        }
        let before = std::mem::replace(before, after);
        Some(FusedStep { step: *step, mesh_dims, before, after, varies: varies(step) })
    })
}
