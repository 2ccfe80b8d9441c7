//! Memory that a unit can take back while views of it live on in the autodiff graph.
//!
//! Slots stand in for saved-tensor hooks, which burn lacks. A view may be held by the graph, as what
//! an operation saved for backward, and by the program, as a weight that it keeps.
//!
//! Dropping the handles of a gathered weight does not free it where the graph saved a view: burn's
//! `linear` reshapes its weight, `nn::Embedding` keeps its own, and without gradient checkpointing
//! either holds the whole buffer until backward. So on Flex a gathered weight is a view of a
//! [`Slot`]: freeing the slot frees the bytes under every view at once, filling it again gives them
//! back. A view that is read while its slot is empty has the slot filled first.
//!
//! ```text
//!   weight ── reshape ── saved by matmul        forward: full     after: empty     backward: full
//!      \________/            |
//!         Slot  <────────────┘
//! ```
//!
//! Memory is taken back once, when forward leaves the unit; what backward gathers again goes with its
//! last view. An extension that borrows the bytes of a Flex tensor itself (`FlexTensor::bytes`) must
//! end the borrow before the weight's unit ends: no operation on a `Tensor` borrows longer.
//!
//! Other backends have no slots: such views keep their memory there.

mod ahead;
#[cfg(feature = "flex")]
mod flex;
#[cfg(not(feature = "flex"))]
mod none;
#[cfg(feature = "flex")]
mod slot;
mod sync;

pub(super) use ahead::Ahead;
#[cfg(feature = "flex")]
pub(super) use flex::{Slot, leave, same_memory};
#[cfg(not(feature = "flex"))]
pub(super) use none::{Slot, leave, same_memory};

/// Fills slots that are read while empty.
#[cfg_attr(not(feature = "flex"), expect(dead_code, reason = "only Flex has slots"))]
pub(super) trait Refill: Send + Sync {
    /// Fills every slot of the unit.
    fn refill(&self);
}
