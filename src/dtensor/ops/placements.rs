//! Placements as the tables of rules write them.

use crate::placement::PartialOp;
use crate::placement::Placement;
pub(super) use crate::placement::Placement::{Replicate as R, Shard as S};

pub(super) const SUM: Placement = Placement::Partial(PartialOp::Sum);
pub(super) const AVG: Placement = Placement::Partial(PartialOp::Avg);
pub(super) const MAX: Placement = Placement::Partial(PartialOp::Max);
pub(super) const MIN: Placement = Placement::Partial(PartialOp::Min);
pub(super) const PRODUCT: Placement = Placement::Partial(PartialOp::Product);
