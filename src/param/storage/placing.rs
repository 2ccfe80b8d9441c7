//! [`StoragePlacer`]: moves weights into evictable [`Storage`].

use std::sync::Arc;

use burn::backend::{
    AutodiffBackend, Dispatch, DispatchTensor, DispatchTensorKind, TensorMetadata,
};

#[cfg(feature = "cube")]
use super::cube;
use super::evictable::{Refill, Storage};
#[cfg(feature = "flex")]
use super::flex;
use super::unshard_state::{InSlot, StoredWeight};
use crate::dtensor::own;
use crate::memory::is_persistent;

/// Moves the weights of one unit into evictable storage.
pub(crate) struct StoragePlacer {
    source: Arc<dyn Refill>,
    #[cfg(feature = "cube")]
    blocks: cube::UnitAllocations,
}

impl StoragePlacer {
    /// Creates a placer whose storage is restored by `source`.
    pub(crate) fn new(source: Arc<dyn Refill>) -> Self {
        Self {
            source,
            #[cfg(feature = "cube")]
            blocks: cube::UnitAllocations::default(),
        }
    }

    /// Moves `tensor` into evictable storage. An empty tensor stays as it is, and so does one of a
    /// backend without evictable storage.
    pub(crate) fn place(
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
