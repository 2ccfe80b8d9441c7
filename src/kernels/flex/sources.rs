//! [`Sources`]: the elements that are read.

use std::sync::Arc;

use burn::backend::flex::FlexTensor;
use burn::tensor::{Bytes, DType};
use bytemuck::Pod;

use crate::memory::flex::{elements, is_lasting};

/// The elements of row-major tensors of one dtype.
#[derive(Debug)]
pub(crate) struct Sources<'a> {
    bytes: Vec<&'a [u8]>,
    /// `None` if there are none.
    dtype: Option<DType>,
}

impl<'a> Sources<'a> {
    /// Of `tensors`, anywhere in their memory.
    ///
    /// # Panics
    /// If one is not row-major, or two have not one dtype.
    pub fn of(tensors: impl IntoIterator<Item = &'a FlexTensor>) -> Self {
        let mut dtype = None;
        let bytes = |tensor: &'a FlexTensor| {
            assert_eq!(tensor.dtype(), *dtype.get_or_insert(tensor.dtype()), "sources have one dtype");
            assert!(tensor.is_contiguous(), "sources are row-major");
            elements(tensor)
        };
        Self { bytes: tensors.into_iter().map(bytes).collect(), dtype }
    }

    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    pub fn dtype(&self) -> Option<DType> {
        self.dtype
    }

    /// The elements of each, as `E`, which is as large as those of the dtype.
    pub fn elements<E: Pod>(&self) -> impl Iterator<Item = &'a [E]> {
        // Where nothing lies need not be aligned.
        self.bytes.iter().map(|bytes| if bytes.is_empty() { &[] } else { bytemuck::cast_slice(bytes) })
    }
}

/// [`Sources`] with handles to their memory.
///
/// From a tensor to its elements it is several steps through memory. Where many threads read the same tensors, they
/// are made once for all.
#[derive(Debug)]
pub(crate) struct Kept {
    sources: Sources<'static>,
    /// What `sources` are borrowed from.
    _memory: Vec<Arc<Bytes>>,
}

impl Kept {
    /// Of `tensors`, anywhere in their memory.
    ///
    /// # Panics
    /// As [`Sources::of`], and if the memory of one is not [lasting](is_lasting).
    pub fn of(tensors: &[&FlexTensor]) -> Self {
        assert!(tensors.iter().all(|tensor| is_lasting(tensor)), "kept memory is lasting");
        let Sources { bytes, dtype } = Sources::of(tensors.iter().copied());
        // SAFETY: `_memory` has a handle to the memory that each is borrowed from, which stays where it is and as it
        // is while there is a handle; it lives as long as the slices, which nobody gets but for a borrow of `self`.
        let keep = |bytes: &[u8]| unsafe { std::slice::from_raw_parts(bytes.as_ptr(), bytes.len()) };
        let sources = Sources { bytes: bytes.into_iter().map(keep).collect(), dtype };
        Self { sources, _memory: tensors.iter().map(|tensor| tensor.data_arc()).collect() }
    }

    pub fn get(&self) -> &Sources<'_> {
        &self.sources
    }
}
