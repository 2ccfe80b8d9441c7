//! [`Sources`]: the elements that are read.

use std::sync::Arc;

use burn::backend::flex::FlexTensor;
use burn::tensor::{Bytes, DType};
use bytemuck::Pod;
use smallvec::SmallVec;

use crate::memory::flex::{elements, is_lasting};

/// The elements of row-major tensors of one dtype.
#[derive(Debug)]
pub(crate) struct Sources<'a> {
    bytes: List<'a>,
    /// `None` if there are none.
    dtype: Option<DType>,
}

/// Where each lies.
#[derive(Debug)]
enum List<'a> {
    Own(Vec<&'a [u8]>),
    Kept(&'a [&'a [u8]]),
}

impl<'a> Sources<'a> {
    /// Of `tensors`, anywhere in their memory.
    ///
    /// # Panics
    /// If one is not row-major, or two have not one dtype.
    pub fn of(tensors: impl IntoIterator<Item = &'a FlexTensor>) -> Self {
        let mut dtype = None;
        let bytes = tensors.into_iter().map(|tensor| of_one_dtype(tensor, &mut dtype)).collect();
        Self { bytes: List::Own(bytes), dtype }
    }

    /// The elements of each.
    pub fn bytes(&self) -> &[&'a [u8]] {
        match &self.bytes {
            List::Own(bytes) => bytes,
            List::Kept(bytes) => bytes,
        }
    }

    pub fn len(&self) -> usize {
        self.bytes().len()
    }

    pub fn dtype(&self) -> Option<DType> {
        self.dtype
    }

    /// The elements of each, as `E`, which is as large as those of the dtype.
    pub fn elements<E: Pod>(&self) -> impl Iterator<Item = &'a [E]> {
        // Where nothing lies need not be aligned.
        self.bytes().iter().map(|bytes| if bytes.is_empty() { &[] } else { bytemuck::cast_slice(bytes) })
    }
}

fn of_one_dtype<'a>(tensor: &'a FlexTensor, dtype: &mut Option<DType>) -> &'a [u8] {
    assert_eq!(tensor.dtype(), *dtype.get_or_insert(tensor.dtype()), "sources have one dtype");
    elements(tensor).expect("sources are row-major")
}

/// [`Sources`] with handles to their memory.
///
/// From a tensor to its elements it is several steps through memory. Where many threads read the same tensors, they
/// are made once for all.
#[derive(Debug)]
pub(crate) struct PinnedSources {
    bytes: Few<&'static [u8]>,
    dtype: Option<DType>,
    /// What `bytes` are borrowed from.
    _memory: Few<Arc<Bytes>>,
}

/// One for each source: of a reduction over a few ranks, no memory of its own.
type Few<T> = SmallVec<[T; 8]>;

impl PinnedSources {
    /// Of `tensors`, anywhere in their memory.
    ///
    /// # Panics
    /// As [`Sources::of`], and if the memory of one is not [lasting](is_lasting).
    pub fn of(tensors: &[&FlexTensor]) -> Self {
        assert!(tensors.iter().all(|tensor| is_lasting(tensor)), "kept memory is lasting");
        // SAFETY: `_memory` has a handle to the memory that each is borrowed from, which stays where it is and as it
        // is while there is a handle; it lives as long as the slices, which nobody gets but for a borrow of `self`.
        let keep = |bytes: &[u8]| unsafe { std::slice::from_raw_parts(bytes.as_ptr(), bytes.len()) };
        let mut dtype = None;
        let bytes = tensors.iter().map(|tensor| keep(of_one_dtype(tensor, &mut dtype))).collect();
        Self { bytes, dtype, _memory: tensors.iter().map(|tensor| tensor.data_arc()).collect() }
    }

    pub fn get(&self) -> Sources<'_> {
        Sources { bytes: List::Kept(&self.bytes), dtype: self.dtype }
    }
}
