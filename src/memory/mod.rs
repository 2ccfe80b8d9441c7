//! Memory of tensors: allocation, lifetime, and copies between host and device.
//!
//! ```text
//!   tensor on the CPU (Flex) ─┬─ small: heap
//!                             ├─ large: `HostMemoryPool` of the rank (`uninit`, `host_pool`)
//!                             └─ gathered weight: evictable storage (`param/storage`)
//!
//!   tensor on a GPU (Cube) ───┬─ pools of the device
//!                             └─ gathered weight: `EvictableAllocation` in such a pool (`cube`)
//! ```
//!
//! 1. The memory of a tensor stays valid as long as a handle to it lives, except that of a gathered
//!    parameter. The parameter's unit evicts and restores that memory ([`is_persistent`]).
//! 2. A tensor that outlives the current operation, or that other ranks read, is in persistent
//!    memory.
//! 3. No tensor writes to memory that another handle reads. A view of shared or evictable memory
//!    writes to a copy.
//! 4. Pooled memory still has its previous contents. Its user writes all bytes before any are read
//!    ([`UninitBytes`]).
//! 5. A pool keeps no more free bytes than were ever in use at once.

#[cfg(feature = "testing")]
pub(crate) mod counted;
mod crossing;
#[cfg(feature = "cube")]
pub(crate) mod cube;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;
#[cfg(feature = "flex")]
mod digest;
#[cfg(feature = "flex")]
pub(crate) mod flex;
#[cfg(all(feature = "cube", any(test, feature = "testing")))]
pub(crate) mod gpu;
mod host_pool;
mod host_tuning;
#[cfg(feature = "cube")]
mod reading;
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
pub(crate) use host_tuning::HostTuning;
pub(crate) use uninit::UninitBytes;

/// Returns a digest of each tensor's elements. Without a CPU backend all are `None`.
#[cfg(not(feature = "flex"))]
pub(crate) fn digests<'a>(tensors: impl Iterator<Item = &'a DispatchTensor>) -> Vec<Option<u64>> {
    tensors.map(|_| None).collect()
}

/// Returns the CPU device if a backend for it is available, otherwise the default device.
pub(crate) fn host() -> Device {
    #[cfg(feature = "flex")]
    return Device::flex();
    #[cfg(not(feature = "flex"))]
    return Device::default().inner();
}

/// True if a backend for the CPU is available.
pub(crate) const HAS_HOST: bool = cfg!(feature = "flex");

/// Returns true if tensors of `device` are in host memory, which any thread can read and write
/// directly.
pub(crate) fn is_host(device: &Device) -> bool {
    HAS_HOST && device.as_dispatch() == host().as_dispatch()
}

/// Returns zeros in the shape and on the device of `tensor`, without memory of their own and without
/// autodiff.
pub(crate) fn placeholder(tensor: &DispatchTensor) -> DispatchTensor {
    let shape = tensor.shape();
    let device = Device::new(tensor.device()).inner();
    let zeros = |shape| Dispatch::float_zeros(shape, device.as_dispatch(), tensor.dtype().into());
    match shape.num_elements() {
        0 => zeros(shape),
        _ => Dispatch::float_expand(zeros(vec![1; shape.num_dims()].into()), shape),
    }
}

/// Returns true if the memory of a plain tensor stays valid as long as a handle to it lives.
pub(crate) fn is_persistent(tensor: &DispatchTensor) -> bool {
    match &tensor.kind {
        #[cfg(feature = "flex")]
        DispatchTensorKind::Flex(BackendTensor::Float(tensor)) => flex::is_lasting(tensor),
        #[cfg(feature = "cube")]
        DispatchTensorKind::Cube(_) => cube::primitive(tensor).is_none_or(cube::is_persistent),
        // Units gather float tensors only.
        _ => true,
    }
}

/// Returns true if two plain float tensors use the same memory.
pub(crate) fn is_same(a: &DispatchTensor, b: &DispatchTensor) -> bool {
    match (&a.kind, &b.kind) {
        #[cfg(feature = "flex")]
        (
            DispatchTensorKind::Flex(BackendTensor::Float(a)),
            DispatchTensorKind::Flex(BackendTensor::Float(b)),
        ) => flex::is_same(a, b),
        #[cfg(feature = "cube")]
        (DispatchTensorKind::Cube(_), DispatchTensorKind::Cube(_)) => cube::primitive(a)
            .zip(cube::primitive(b))
            .is_some_and(|(a, b)| cube::is_same(a, b)),
        _ => false,
    }
}

/// Copies a tensor on any backend. A slice would not do, because Cube slices without copying if the
/// offset is aligned.
pub(crate) fn assigned(view: DispatchTensor) -> DispatchTensor {
    let shape = view.shape();
    let device = view.device();
    let dtype = view.dtype();
    let everything: Vec<Slice> = shape.iter().map(|&len| Slice::from(0..len)).collect();
    let empty = shape.num_elements() == 0;
    if dtype.is_float() {
        let memory = Dispatch::float_empty(shape, &device, dtype.into());
        if empty {
            memory
        } else {
            Dispatch::float_slice_assign(memory, &everything, view)
        }
    } else if dtype.is_bool() {
        let memory = Dispatch::bool_empty(shape, &device, dtype.into());
        if empty {
            memory
        } else {
            Dispatch::bool_slice_assign(memory, &everything, view)
        }
    } else {
        let memory = Dispatch::int_empty(shape, &device, dtype.into());
        if empty {
            memory
        } else {
            Dispatch::int_slice_assign(memory, &everything, view)
        }
    }
}
