//! [`Slot`]: memory of gathered weights that is taken back under its views, on backends that let it.

use std::fmt::Debug;
use std::sync::Arc;

use burn::backend::{AutodiffBackend, Dispatch, DispatchTensor, DispatchTensorKind, TensorMetadata};

#[cfg(feature = "cube")]
use super::cube;
#[cfg(feature = "flex")]
use super::flex;
use super::gathered::{InSlot, Weight};
use crate::dtensor::own;
use crate::memory::is_lasting;

/// Memory of gathered weights, there or not.
pub(super) trait Slot: Debug + Send + Sync {
    /// Takes back what forward gathered, under every view.
    fn release(&self);

    /// Gives memory back, with the same values: that of `whole`, which nobody else uses. A slot that was filled
    /// again stays as it is.
    fn fill(&self, whole: DispatchTensor);

    #[cfg(feature = "testing")]
    fn is_full(&self) -> bool;
}

/// Fills slots that are read while empty.
pub(super) trait Refill: Send + Sync {
    /// Fills every slot of the unit.
    fn refill(&self);
}

/// Moves the weights of one unit into slots.
pub(super) struct Placing {
    source: Arc<dyn Refill>,
    #[cfg(feature = "cube")]
    blocks: cube::Blocks,
}

impl Placing {
    /// Into slots that `source` fills.
    pub(super) fn new(source: Arc<dyn Refill>) -> Self {
        Self {
            source,
            #[cfg(feature = "cube")]
            blocks: cube::Blocks::default(),
        }
    }

    /// Moves `tensor` into a slot; one without memory, or of a backend that has no slots, stays as it is.
    pub(super) fn place(&mut self, tensor: DispatchTensor) -> Weight<dyn Slot, DispatchTensor> {
        if tensor.shape().num_elements() == 0 {
            return Weight::Own(tensor);
        }
        match &tensor.kind {
            #[cfg(feature = "flex")]
            DispatchTensorKind::Flex(_) => {
                let slot = flex::Slot::place(tensor, self.source.clone());
                Weight::InSlot(InSlot { view: slot.view(), slot })
            }
            #[cfg(feature = "cube")]
            DispatchTensorKind::Cube(_) => match self.blocks.slot(&tensor) {
                Some(slot) => Weight::InSlot(InSlot { view: tensor, slot }),
                None => Weight::Own(tensor),
            },
            _ => Weight::Own(tensor),
        }
    }
}

/// An untracked tensor in memory that lasts: a copy, if it is a slot's.
pub(super) fn lasting(tensor: DispatchTensor) -> DispatchTensor {
    match &tensor.kind {
        DispatchTensorKind::Autodiff(_) if !Dispatch::is_tracked(&tensor) => {
            let autodiff = tensor.autodiff;
            DispatchTensor { autodiff, ..Dispatch::from_inner(lasting(Dispatch::inner(tensor))) }
        }
        _ if !is_lasting(&tensor) => own(tensor),
        _ => tensor,
    }
}
