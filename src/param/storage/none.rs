//! Without Flex no tensor lives in a slot.

use std::convert::Infallible;
use std::sync::Arc;

use burn::backend::DispatchTensor;

use super::Refill;

/// A slot that cannot exist.
#[derive(Debug)]
pub(in crate::param) struct Slot(Infallible);

impl Slot {
    pub(in crate::param) fn place(tensor: DispatchTensor, _: Arc<dyn Refill>) -> (DispatchTensor, Option<Arc<Self>>) {
        (tensor, None)
    }

    pub(in crate::param) fn release(&self) {
        match self.0 {}
    }

    pub(in crate::param) fn fill(&self, _: DispatchTensor) {
        match self.0 {}
    }
}

/// A tensor that outlives its unit's scope.
pub(in crate::param) fn leave(tensor: DispatchTensor) -> DispatchTensor {
    tensor
}

/// Whether both tensors are one piece of memory: these backends cannot tell, so they never are.
pub(in crate::param) fn same_memory(_: &DispatchTensor, _: &DispatchTensor) -> bool {
    false
}
