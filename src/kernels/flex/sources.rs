//! [`Sources`]: elements that are read.

use std::sync::Arc;

use burn::backend::flex::FlexTensor;
use burn::tensor::{Bytes, DType};
use bytemuck::Pod;
use smallvec::SmallVec;

use crate::memory::flex::{elements, is_lasting};

/// Elements of row-major tensors of one dtype.
#[derive(Debug)]
pub(crate) struct Sources<'a> {
    bytes: List<'a>,
    /// `None` if there are no sources.
    dtype: Option<DType>,
}

/// The bytes of each source.
#[derive(Debug)]
enum List<'a> {
    Own(Vec<&'a [u8]>),
    Kept(&'a [&'a [u8]]),
}

impl<'a> Sources<'a> {
    /// Borrows the elements of `tensors`, which may be views.
    ///
    /// # Panics
    /// If a tensor is not row-major, or two tensors have different dtypes.
    pub fn of(tensors: impl IntoIterator<Item = &'a FlexTensor>) -> Self {
        let mut dtype = None;
        let bytes = tensors.into_iter().map(|tensor| of_one_dtype(tensor, &mut dtype)).collect();
        Self { bytes: List::Own(bytes), dtype }
    }

    /// Returns the bytes of each source.
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

    /// Returns the elements of each source as `E`, which must have the size of the dtype.
    pub fn elements<E: Pod>(&self) -> impl Iterator<Item = &'a [E]> {
        // An empty slice need not be aligned.
        self.bytes().iter().map(|bytes| if bytes.is_empty() { &[] } else { bytemuck::cast_slice(bytes) })
    }
}

fn of_one_dtype<'a>(tensor: &'a FlexTensor, dtype: &mut Option<DType>) -> &'a [u8] {
    assert_eq!(tensor.dtype(), *dtype.get_or_insert(tensor.dtype()), "sources have one dtype");
    elements(tensor).expect("sources are row-major")
}

/// [`Sources`] that own handles to their memory.
///
/// Finding the elements of a tensor takes several memory accesses. If many threads read the same tensors, this is
/// done once for all of them.
#[derive(Debug)]
pub(crate) struct PinnedSources {
    bytes: Few<&'static [u8]>,
    dtype: Option<DType>,
    /// Keeps the memory of `bytes` alive.
    _memory: Few<Arc<Bytes>>,
}

/// One item per source. A reduction over a few ranks needs no heap memory.
type Few<T> = SmallVec<[T; 8]>;

impl PinnedSources {
    /// Pins the elements of `tensors`, which may be views.
    ///
    /// # Panics
    /// Like [`Sources::of`], and if the memory of a tensor is not [persistent](is_lasting).
    pub fn of(tensors: &[&FlexTensor]) -> Self {
        assert!(tensors.iter().all(|tensor| is_lasting(tensor)), "pinned memory is persistent");
        // SAFETY: `_memory` has a handle to the memory of each slice. That memory does not move or change while a
        // handle exists. The handles live as long as the slices, which are only returned as borrows of `self`.
        let keep = |bytes: &[u8]| unsafe { std::slice::from_raw_parts(bytes.as_ptr(), bytes.len()) };
        let mut dtype = None;
        let bytes = tensors.iter().map(|tensor| keep(of_one_dtype(tensor, &mut dtype))).collect();
        Self { bytes, dtype, _memory: tensors.iter().map(|tensor| tensor.data_arc()).collect() }
    }

    pub fn get(&self) -> Sources<'_> {
        Sources { bytes: List::Kept(&self.bytes), dtype: self.dtype }
    }
}
