//! Whose a tensor's memory is.
//!
//! A tensor is a handle to memory that lasts as long as a handle does, but for a gathered parameter's: that is
//! memory which its unit takes back and fills again. What outlives the operation at hand, or is read by other
//! ranks, is in memory that lasts.

#[cfg(feature = "testing")]
pub(crate) mod counted;
mod crossing;
#[cfg(feature = "cube")]
pub(crate) mod cube;
#[cfg(feature = "flex")]
mod digest;
#[cfg(feature = "flex")]
pub(crate) mod flex;
mod host_pool;
#[cfg(feature = "cube")]
mod reading;
pub(crate) mod shared_memory;
mod uninit;

#[cfg(feature = "flex")]
use burn::backend::BackendTensor;
use burn::backend::ops::{BoolTensorOps, FloatTensorOps, IntTensorOps};
use burn::backend::{Dispatch, DispatchTensor, DispatchTensorKind, TensorMetadata};
use burn::tensor::{Device, Slice};

pub(crate) use crossing::{ToHost, bytes, copied_to};
#[cfg(feature = "flex")]
pub(crate) use digest::digests;
pub(crate) use host_pool::HostMemoryPool;
pub(crate) use uninit::UninitBytes;

/// A digest of each tensor's elements: none are on the CPU.
#[cfg(not(feature = "flex"))]
pub(crate) fn digests<'a>(tensors: impl Iterator<Item = &'a DispatchTensor>) -> Vec<Option<u64>> {
    tensors.map(|_| None).collect()
}

/// The CPU, if there is a backend for it.
pub(crate) fn host() -> Device {
    #[cfg(feature = "flex")]
    return Device::flex();
    #[cfg(not(feature = "flex"))]
    return Device::default().inner();
}

/// Whether there is a backend for the CPU.
pub(crate) const HAS_HOST: bool = cfg!(feature = "flex");

/// Whether tensors of `device` are memory of the host's, which any thread reads and writes at once.
pub(crate) fn is_host(device: &Device) -> bool {
    HAS_HOST && device.as_dispatch() == host().as_dispatch()
}

/// Whether the memory of a plain tensor stays as it is for as long as a handle to it lives.
pub(crate) fn is_persistent(tensor: &DispatchTensor) -> bool {
    match &tensor.kind {
        #[cfg(feature = "flex")]
        DispatchTensorKind::Flex(BackendTensor::Float(tensor)) => flex::is_lasting(tensor),
        #[cfg(feature = "cube")]
        DispatchTensorKind::Cube(_) => cube::primitive(tensor).is_none_or(cube::is_persistent),
        // A unit gathers floats.
        _ => true,
    }
}

/// Whether two plain float tensors are one piece of memory.
pub(crate) fn is_same(a: &DispatchTensor, b: &DispatchTensor) -> bool {
    match (&a.kind, &b.kind) {
        #[cfg(feature = "flex")]
        (DispatchTensorKind::Flex(BackendTensor::Float(a)), DispatchTensorKind::Flex(BackendTensor::Float(b))) => {
            flex::is_same(a, b)
        }
        #[cfg(feature = "cube")]
        (DispatchTensorKind::Cube(_), DispatchTensorKind::Cube(_)) => {
            cube::primitive(a).zip(cube::primitive(b)).is_some_and(|(a, b)| cube::is_same(a, b))
        }
        _ => false,
    }
}

/// Any backend's copy. Cube, too, slices without copying where the offset is aligned.
pub(crate) fn assigned(view: DispatchTensor) -> DispatchTensor {
    let (shape, device, dtype) = (view.shape(), view.device(), view.dtype());
    let everything: Vec<Slice> = shape.iter().map(|&len| Slice::from(0..len)).collect();
    let empty = shape.num_elements() == 0;
    if dtype.is_float() {
        let memory = Dispatch::float_empty(shape, &device, dtype.into());
        if empty { memory } else { Dispatch::float_slice_assign(memory, &everything, view) }
    } else if dtype.is_bool() {
        let memory = Dispatch::bool_empty(shape, &device, dtype.into());
        if empty { memory } else { Dispatch::bool_slice_assign(memory, &everything, view) }
    } else {
        let memory = Dispatch::int_empty(shape, &device, dtype.into());
        if empty { memory } else { Dispatch::int_slice_assign(memory, &everything, view) }
    }
}
