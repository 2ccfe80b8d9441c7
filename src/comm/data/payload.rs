//! Conversion of tensors to [`Payload`]s for sending, and of received [`UninitBytes`] to tensors.
//!
//! The elements of a Flex tensor are sent from its own memory and received into memory that a
//! tensor then uses: zero-copy on both sides. Tensors of other backends are copied through host
//! memory on both sides, by the sender when the elements are first needed.

use std::any::Any;
use std::mem::MaybeUninit;
use std::sync::{Arc, LazyLock};

use burn::backend::DispatchTensor;
use burn::tensor::{DType, TensorData};

use super::{in_place, reader};
use crate::comm::transport::{Payload, RecvBuffer};
use crate::comm::{TensorMeta, backend};
use crate::memory::{self, HostMemoryPool, UninitBytes};

/// Returns the elements of a row-major tensor as a payload.
pub(in crate::comm) fn payload(tensor: &DispatchTensor) -> Payload {
    in_place(tensor)
        .unwrap_or_else(|| Arc::new(CopiedToHost(LazyLock::new(reader(tensor.clone())))))
}

/// Elements of a tensor on a device, which the first use copies to the host.
struct CopiedToHost(LazyLock<TensorData, Box<dyn FnOnce() -> TensorData + Send>>);

impl AsRef<[u8]> for CopiedToHost {
    fn as_ref(&self) -> &[u8] {
        self.0.as_bytes()
    }
}

impl RecvBuffer for UninitBytes {
    fn space(&mut self) -> &mut [MaybeUninit<u8>] {
        self.bytes()
    }
}

/// Returns the number of bytes of a tensor, or `None` if it overflows or if the tensor is
/// quantized.
fn bytes(meta: &TensorMeta) -> Option<usize> {
    if matches!(meta.dtype, DType::QFloat(_)) {
        return None;
    }
    meta.shape
        .iter()
        .try_fold(meta.dtype.size(), |bytes, len| bytes.checked_mul(*len))
}

/// Returns true if the payload sizes `lengths` match `tensors`. Tensors without elements have no
/// payload.
pub(in crate::comm) fn are_of(lengths: &[usize], tensors: &[TensorMeta]) -> bool {
    let sizes: Option<Vec<_>> = tensors
        .iter()
        .map(bytes)
        .filter(|bytes| *bytes != Some(0))
        .collect();
    sizes.is_some_and(|sizes| sizes == lengths)
}

/// Allocates receive buffers for the payloads of `tensors` from the pool `home`.
pub(in crate::comm) fn spaces(
    tensors: &[TensorMeta],
    home: &Arc<HostMemoryPool>,
) -> Vec<Box<dyn RecvBuffer>> {
    let full = tensors.iter().filter(|meta| meta.shape.num_elements() > 0);
    let space = |meta: &TensorMeta| {
        UninitBytes::at(Some(home), meta.dtype.size(), meta.shape.num_elements())
    };
    full.map(|meta| -> Box<dyn RecvBuffer> { Box::new(space(meta)) })
        .collect()
}

/// Allocates receive buffers for payloads that will be discarded.
pub(in crate::comm) fn waste(lengths: &[usize]) -> Vec<Box<dyn RecvBuffer>> {
    lengths
        .iter()
        .map(|len| -> Box<dyn RecvBuffer> { Box::new(UninitBytes::at(None, 1, *len)) })
        .collect()
}

/// Makes host tensors of the payloads received into their [`spaces`].
///
/// # Safety
/// All bytes of the buffers must be written.
pub(in crate::comm) unsafe fn received(
    tensors: Vec<TensorMeta>,
    buffers: Vec<Box<dyn RecvBuffer>>,
) -> Vec<DispatchTensor> {
    let host = memory::host();
    let mut buffers = buffers.into_iter();
    let tensor = |meta: TensorMeta| {
        let space = match meta.shape.num_elements() {
            0 => UninitBytes::at(None, meta.dtype.size(), 0),
            _ => {
                let buffer: Box<dyn Any> = buffers
                    .next()
                    .expect("each tensor with elements has a payload");
                *buffer
                    .downcast()
                    .expect("the buffers are those that `spaces` allocated")
            }
        };
        // SAFETY: the caller guarantees that all bytes are written.
        let bytes = unsafe { space.filled() };
        backend::from_data(TensorData::from_bytes(bytes, meta.shape, meta.dtype), &host)
    };
    tensors.into_iter().map(tensor).collect()
}
