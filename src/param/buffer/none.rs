//! Without Flex no tensor lives in a slot.

use std::convert::Infallible;
use std::sync::Arc;

use burn::backend::DispatchTensor;

use super::Refill;
use super::gathered::Weight;

/// A slot that cannot exist.
#[derive(Debug)]
pub(super) struct Slot(Infallible);

impl Slot {
    pub(super) fn place(tensor: DispatchTensor, _: Arc<dyn Refill>) -> Weight<Self, DispatchTensor> {
        Weight::Own(tensor)
    }

    #[cfg(feature = "testing")]
    pub(super) fn is_full(&self) -> bool {
        match self.0 {}
    }

    pub(super) fn release(&self) {
        match self.0 {}
    }

    pub(super) fn fill(&self, _: DispatchTensor) {
        match self.0 {}
    }
}

/// A tensor in memory that lasts.
pub(super) fn lasting(tensor: DispatchTensor) -> DispatchTensor {
    tensor
}
