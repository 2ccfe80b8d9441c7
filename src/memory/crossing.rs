//! Plain float tensors in other memory: from the host to a device, and back.

use burn::backend::ops::FloatTensorOps;
use burn::backend::{Dispatch, DispatchTensor, TensorMetadata};
use burn::tensor::Device;

#[cfg(feature = "cube")]
use super::reading::Reading;
use super::{assigned, host};

/// The bytes of a tensor's elements.
pub(crate) fn bytes(tensor: &DispatchTensor) -> u64 {
    (tensor.shape().num_elements() * tensor.dtype().size()) as u64
}

/// The tensor in new memory of `device`, be it the one where it is. Nobody waits for the device.
pub(crate) fn copied_to(tensor: DispatchTensor, device: &Device) -> DispatchTensor {
    if tensor.shape().num_elements() == 0 {
        return Dispatch::float_empty(tensor.shape(), device.as_dispatch(), tensor.dtype().into());
    }
    if tensor.device() == *device.as_dispatch() {
        return copied(tensor);
    }
    Dispatch::float_to_device(tensor, device.as_dispatch())
}

fn copied(tensor: DispatchTensor) -> DispatchTensor {
    #[cfg(feature = "flex")]
    if let Some(flex) = super::flex::primitive(&tensor) {
        return super::flex::wrap(super::flex::copied(flex));
    }
    assigned(tensor)
}

/// Tensors that a device copies to the host, meanwhile.
pub(crate) struct ToHost {
    #[cfg(feature = "cube")]
    reading: Option<Reading>,
    tensors: Vec<DispatchTensor>,
}

impl ToHost {
    /// Has the device copy them after all that the calling thread has asked of it so far.
    pub(crate) fn begin(tensors: Vec<DispatchTensor>) -> Self {
        Self {
            #[cfg(feature = "cube")]
            reading: Reading::begin(&tensors),
            tensors,
        }
    }

    /// The copies, once they are there.
    ///
    /// # Panics
    /// As burn's `into_data`, if the device fails.
    pub(crate) fn wait(self) -> Vec<DispatchTensor> {
        #[cfg(feature = "cube")]
        if let Some(reading) = self.reading {
            // Out of the memory that the device copies to, which is scarce: optimizers compute in place.
            let own = |data| copied(Dispatch::float_from_data(data, host().as_dispatch()));
            return reading.wait().into_iter().map(own).collect();
        }
        self.tensors.into_iter().map(|tensor| copied_to(tensor, &host())).collect()
    }
}

impl std::fmt::Debug for ToHost {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ToHost").field("tensors", &self.tensors.len()).finish()
    }
}
