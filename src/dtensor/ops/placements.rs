//! Placements as the tables of rules write them.

use smallvec::SmallVec;

pub(super) use crate::placement::Placement::{Replicate as R, Shard as S};
use crate::placement::{Layout, PartialOp, Placement, PlacementError, Placements};

pub(super) const SUM: Placement = Placement::Partial(PartialOp::Sum);
pub(super) const AVG: Placement = Placement::Partial(PartialOp::Avg);
pub(super) const MAX: Placement = Placement::Partial(PartialOp::Max);
pub(super) const MIN: Placement = Placement::Partial(PartialOp::Min);
pub(super) const PRODUCT: Placement = Placement::Partial(PartialOp::Product);

/// `layout` with its placements changed by `by`, which leaves shards alone; the cuts keep their order.
pub(super) fn replaced(layout: &Layout, by: impl Fn(Placement) -> Placement) -> Result<Layout, PlacementError> {
    let placements: Placements = layout.placements().iter().map(|&own| by(own)).collect();
    let orders: SmallVec<[(usize, &[usize]); 2]> = layout.orders().collect();
    Layout::with_order(layout.mesh_shape(), &placements, &orders)
}
