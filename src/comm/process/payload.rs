//! Tensors on their way from process to process: as [`Payload`]s that are sent, as [`UninitBytes`] memory that they
//! land in.
//!
//! Of Flex tensors the elements are sent from where they are, and land where a tensor has them. Those of other backends
//! go through memory of the host on both sides.

use std::any::Any;
use std::mem::MaybeUninit;
use std::sync::Arc;

use burn::backend::DispatchTensor;
#[cfg(feature = "flex")]
use burn::backend::flex::FlexTensor;
use burn::tensor::TensorData;

use crate::comm::transport::{Payload, RecvBuffer};
use crate::comm::{TensorMeta, backend};
#[cfg(feature = "flex")]
use crate::memory::flex;
use crate::memory::{self, HostMemoryPool, UninitBytes};

/// The elements of a row-major tensor.
pub(in crate::comm) fn payload(tensor: &DispatchTensor) -> Payload {
    #[cfg(feature = "flex")]
    if let Some(flex) = flex::primitive(tensor) {
        return Arc::new(Elements(flex.clone()));
    }
    Arc::new(Host(backend::into_data(tensor.clone())))
}

/// Those of a Flex tensor, where they are.
#[cfg(feature = "flex")]
struct Elements(FlexTensor);

#[cfg(feature = "flex")]
impl AsRef<[u8]> for Elements {
    fn as_ref(&self) -> &[u8] {
        flex::elements(&self.0).expect("it is row-major")
    }
}

/// Those of a tensor on another device, on the host.
struct Host(TensorData);

impl AsRef<[u8]> for Host {
    fn as_ref(&self) -> &[u8] {
        self.0.as_bytes()
    }
}

impl RecvBuffer for UninitBytes {
    fn space(&mut self) -> &mut [MaybeUninit<u8>] {
        self.bytes()
    }
}

/// Bytes of a tensor; `None` if no tensor has so many.
fn bytes(meta: &TensorMeta) -> Option<usize> {
    meta.shape.iter().try_fold(meta.dtype.size(), |bytes, len| bytes.checked_mul(*len))
}

/// Whether payloads of these `lengths` can be those of `tensors`.
pub(in crate::comm) fn are_of(lengths: &[usize], tensors: &[TensorMeta]) -> bool {
    let sizes: Option<Vec<_>> = tensors.iter().map(bytes).filter(|bytes| *bytes != Some(0)).collect();
    sizes.is_some_and(|sizes| sizes == lengths)
}

/// Space for the payloads of `tensors`, of the memory of `home`.
pub(in crate::comm) fn spaces(tensors: &[TensorMeta], home: &Arc<HostMemoryPool>) -> Vec<Box<dyn RecvBuffer>> {
    let full = tensors.iter().filter(|meta| meta.shape.num_elements() > 0);
    let space = |meta: &TensorMeta| UninitBytes::at(Some(home), meta.dtype.size(), meta.shape.num_elements());
    full.map(|meta| -> Box<dyn RecvBuffer> { Box::new(space(meta)) }).collect()
}

/// Space for payloads that are of no use.
pub(in crate::comm) fn waste(lengths: &[usize]) -> Vec<Box<dyn RecvBuffer>> {
    lengths.iter().map(|len| -> Box<dyn RecvBuffer> { Box::new(UninitBytes::at(None, 1, *len)) }).collect()
}

/// The tensors whose elements have landed in their [`spaces`], on the host.
///
/// # Safety
/// All bytes of the landings are written.
pub(in crate::comm) unsafe fn landed(
    tensors: Vec<TensorMeta>,
    landings: Vec<Box<dyn RecvBuffer>>,
) -> Vec<DispatchTensor> {
    let (host, mut landings) = (memory::host(), landings.into_iter());
    let tensor = |meta: TensorMeta| {
        let space = match meta.shape.num_elements() {
            0 => UninitBytes::at(None, meta.dtype.size(), 0),
            _ => {
                let landing: Box<dyn Any> = landings.next().expect("a payload for each tensor with elements");
                *landing.downcast().expect("landings come back as they were given")
            }
        };
        // SAFETY: the caller has written it.
        let bytes = unsafe { space.filled() };
        backend::from_data(TensorData::from_bytes(bytes, meta.shape, meta.dtype), &host)
    };
    tensors.into_iter().map(tensor).collect()
}
