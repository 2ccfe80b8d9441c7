//! Memory of unsharded parameters: its state, the copies that a unit holds, and evictable storage.
//!
//! | file | contents |
//! |---|---|
//! | `unshard_state` | the states of one copy, and the table of their transitions |
//! | `copies` | the copies of a unit: what the next forward finds, and what passes keep for backward |
//! | `source` | gathers the weights of a pass from their shards |
//! | `evictable`, `placing` | storage that is freed while views of it exist; moving weights there |
//! | `slot`, `flex`, `cube` | the storage of Flex and of Cube tensors |
//!
//! Another memory layout (such as one block per unit that kernels copy shards into) would change only
//! these files. [`UnshardedParams`](super::unsharded) uses them for one forward and its backward.
//!
//! # Evictable storage
//!
//! Evictable storage replaces saved-tensor hooks, which burn lacks. The autodiff graph may hold a
//! view of a weight, because an operation saved it for backward. The program may hold one too, as a
//! weight that it keeps.
//!
//! If the graph saved a view of a gathered weight, dropping the other handles does not free the
//! memory: burn's `linear` reshapes its weight, and `nn::Embedding` keeps its own. Without gradient
//! checkpointing, either holds the complete allocation until backward. So on Flex, a gathered
//! weight is a view of a [`Storage`](slot::EvictableStorage). Evicting the storage frees the bytes
//! under every view at once, and restoring it makes them available to all views. If ranks of one
//! process share the bytes, these are freed once all of the ranks have evicted theirs. Reading a
//! view of evicted storage restores the storage first.
//!
//! ```text
//!   weight ── reshape ── saved by matmul        forward: full     after: empty     backward: full
//!      \________/            |
//!         Storage  <────────────┘
//! ```
//!
//! Memory is evicted once, when forward leaves the unit. What is gathered for backward is freed
//! with its last view. An extension that borrows the bytes of a Flex tensor itself
//! (`FlexTensor::bytes`) must end the borrow before the weight's unit ends. No operation on a
//! `Tensor` borrows longer.
//!
//! On Cube backends, evictable storage is an allocation that contains gathered weights, usually all
//! weights of a unit. Views keep their handle, and the device's server thread removes and restores
//! the memory behind it ([`memory::cube`](crate::memory::cube)). That thread cannot gather, so
//! reading a view of evicted storage is an error there. Two kinds of weights are not in evictable
//! storage on these backends: those of a unit that a read opened, and those of a unit of several
//! modules. There, backward may reach an operation that saved a view before it reaches the unit.

mod copies;
#[cfg(feature = "cube")]
mod cube;
mod evictable;
#[cfg(feature = "flex")]
mod flex;
mod placing;
#[cfg(feature = "flex")]
mod slot;
mod source;
mod unshard_state;

pub(crate) use copies::UnshardedCopies;
pub(super) use copies::{KeptId, UnshardedCopy, Weights};
#[cfg(feature = "flex")]
use evictable::Refill;
pub(super) use evictable::Storage;
pub(super) use placing::{StoragePlacer, persistent_copy};
pub(super) use source::ShardGatherer;
pub(super) use unshard_state::{After, GatherOrigin, StoredWeight};

/// Blocking primitives of this module, in one place so that a model checker can replace them.
mod sync {
    pub(super) use parking_lot::Mutex;
    #[cfg(feature = "flex")]
    pub(super) use parking_lot::{RwLock, RwLockReadGuard};
    #[cfg(feature = "flex")]
    pub(super) use std::sync::OnceLock;
    #[cfg(feature = "flex")]
    pub(super) use std::thread::{self, ThreadId};
}
