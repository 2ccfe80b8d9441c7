//! Short names of placements for the tables of rules.

pub(super) use crate::placement::Placement::{Replicate as R, Shard as S};
use crate::placement::{PartialOp, Placement};

pub(super) const SUM: Placement = Placement::Partial(PartialOp::Sum);
pub(super) const AVG: Placement = Placement::Partial(PartialOp::Avg);
pub(super) const MAX: Placement = Placement::Partial(PartialOp::Max);
pub(super) const MIN: Placement = Placement::Partial(PartialOp::Min);
pub(super) const PRODUCT: Placement = Placement::Partial(PartialOp::Product);
