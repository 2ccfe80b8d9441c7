//! [`Storage`]: memory of gathered weights that can be freed while views of it exist. [`StoragePlacer`] moves weights there.

use std::fmt::Debug;
use std::sync::Arc;

use burn::backend::{
    AutodiffBackend, Dispatch, DispatchTensor, DispatchTensorKind, TensorMetadata,
};

#[cfg(feature = "cube")]
use super::cube;
#[cfg(feature = "flex")]
use super::flex;
use super::unshard_state::{InSlot, StoredWeight};
use crate::dtensor::own;
use crate::memory::is_persistent;

/// Moves the weights of one unit into evictable storage.
pub(super) struct StoragePlacer {
    source: Arc<dyn Refill>,
    #[cfg(feature = "cube")]
    blocks: cube::UnitAllocations,
}

impl StoragePlacer {
    /// Creates a placer whose storage is restored by `source`.
    pub(super) fn new(source: Arc<dyn Refill>) -> Self {
        Self {
            source,
            #[cfg(feature = "cube")]
            blocks: cube::UnitAllocations::default(),
        }
    }

    /// Moves `tensor` into evictable storage. An empty tensor stays as it is, and so does one of a
    /// backend without evictable storage.
    pub(super) fn place(
        &mut self,
        tensor: DispatchTensor,
    ) -> StoredWeight<dyn Storage, DispatchTensor> {
        if tensor.shape().num_elements() == 0 {
            return StoredWeight::Own(tensor);
        }
        match &tensor.kind {
            #[cfg(feature = "flex")]
            DispatchTensorKind::Flex(_) => {
                let slot = flex::FlexStorage::place(tensor, self.source.clone());
                StoredWeight::InSlot(InSlot {
                    view: slot.view(),
                    slot,
                })
            }
            #[cfg(feature = "cube")]
            DispatchTensorKind::Cube(_) => match self.blocks.slot(&tensor) {
                Some(slot) => StoredWeight::InSlot(InSlot { view: tensor, slot }),
                None => StoredWeight::Own(tensor),
            },
            _ => StoredWeight::Own(tensor),
        }
    }
}

/// Returns an untracked tensor that outlives its unit: a copy if its memory is evictable.
pub(crate) fn persistent_copy(tensor: DispatchTensor) -> DispatchTensor {
    match &tensor.kind {
        DispatchTensorKind::Autodiff(_) if !Dispatch::is_tracked(&tensor) => {
            let autodiff = tensor.autodiff;
            DispatchTensor {
                autodiff,
                ..Dispatch::from_inner(persistent_copy(Dispatch::inner(tensor)))
            }
        }
        _ if !is_persistent(&tensor) => own(tensor),
        _ => tensor,
    }
}

/// Memory of gathered weights, present or evicted.
pub(super) trait Storage: Debug + Send + Sync {
    /// Frees the memory that forward gathered, under every view.
    fn release(&self);

    /// Restores the memory from `full`, which has the same values and to which no other handle
    /// writes. Does nothing if it was restored before.
    fn fill(&self, full: DispatchTensor);

    #[cfg(feature = "testing")]
    fn is_full(&self) -> bool;
}

/// Restores evicted storage when a view of it is read.
pub(super) trait Refill: Send + Sync {
    /// Restores all evicted storage of the unit.
    fn refill(&self);
}
