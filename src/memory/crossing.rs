//! Copies of plain float tensors between host and device.

use burn::backend::ops::FloatTensorOps;
use burn::backend::{Dispatch, DispatchTensor, TensorMetadata};
use burn::tensor::Device;

#[cfg(feature = "cube")]
use super::reading::Reading;
use super::{assigned, host};

/// Returns the number of bytes of a tensor's elements.
pub(crate) fn bytes(tensor: &DispatchTensor) -> u64 {
    (tensor.shape().num_elements() * tensor.dtype().size()) as u64
}

/// Copies the tensor to new memory of `device`, even if it is there already. Does not wait for the
/// device.
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

/// Tensors that a device copies to the host while the caller continues.
pub(crate) struct ToHost {
    #[cfg(feature = "cube")]
    reading: Option<Reading>,
    tensors: Vec<DispatchTensor>,
}

impl ToHost {
    /// Requests the copies, which run after all work that the calling thread has submitted to the
    /// device so far.
    pub(crate) fn begin(tensors: Vec<DispatchTensor>) -> Self {
        Self {
            #[cfg(feature = "cube")]
            reading: Reading::begin(&tensors),
            tensors,
        }
    }

    /// Waits for the copies and returns them.
    ///
    /// # Panics
    /// Like burn's `into_data`, if the device fails.
    pub(crate) fn wait(self) -> Vec<DispatchTensor> {
        #[cfg(feature = "cube")]
        if let Some(reading) = self.reading {
            // Moves the data out of the memory to which the device copies, because that is scarce
            // and optimizers compute in place.
            return reading
                .wait()
                .into_iter()
                .map(|data| copied(Dispatch::float_from_data(data, host().as_dispatch())))
                .collect();
        }
        self.tensors
            .into_iter()
            .map(|tensor| copied_to(tensor, &host()))
            .collect()
    }
}

impl std::fmt::Debug for ToHost {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ToHost")
            .field("tensors", &self.tensors.len())
            .finish()
    }
}
