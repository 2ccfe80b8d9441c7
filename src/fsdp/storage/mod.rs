//! Memory that a unit can take back while views of it live on in the autodiff graph.
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
//! Other backends have no slots: such views keep their memory there.

#[cfg(feature = "flex")]
mod flex;
#[cfg(not(feature = "flex"))]
mod none;

#[cfg(feature = "flex")]
pub(super) use flex::{Slot, leave, same_memory};
#[cfg(not(feature = "flex"))]
pub(super) use none::{Slot, leave, same_memory};

/// Fills slots that are read while empty.
#[cfg_attr(not(feature = "flex"), expect(dead_code, reason = "only Flex has slots"))]
pub(super) trait Refill: Send + Sync {
    /// Fills every slot of the unit.
    fn refill(self: std::sync::Arc<Self>);
}
