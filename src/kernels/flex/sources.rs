//! [`Sources`]: elements that are read.

use std::slice;
use std::sync::Arc;

use burn::backend::flex::FlexTensor;
use burn::tensor::{Bytes, DType};
use bytemuck::Pod;
use smallvec::SmallVec;

use crate::memory::flex::{elements, is_lasting};

/// Elements of row-major tensors of one dtype, and handles that keep their memory alive.
///
/// Finding the elements of a tensor takes several memory accesses. If several threads read the same
/// tensors, they share these sources.
#[derive(Debug)]
pub(crate) struct Sources {
    bytes: Few<&'static [u8]>,
    /// `None` if there are no sources.
    dtype: Option<DType>,
    /// Keeps the memory of `bytes` alive.
    _memory: Few<Arc<Bytes>>,
}

/// One item per source. A reduction over a few ranks needs no heap memory.
type Few<T> = SmallVec<[T; 8]>;

impl Sources {
    /// Finds the elements of `tensors`, which may be views.
    ///
    /// # Panics
    /// If a tensor is not row-major, two tensors have different dtypes, or the memory of a tensor
    /// is not [persistent](is_lasting).
    pub fn of<'a>(tensors: impl IntoIterator<Item = &'a FlexTensor>) -> Self {
        let mut sources = Self {
            bytes: Few::new(),
            dtype: None,
            _memory: Few::new(),
        };
        for tensor in tensors {
            assert!(is_lasting(tensor), "sources are in persistent memory");
            assert_eq!(
                tensor.dtype(),
                *sources.dtype.get_or_insert(tensor.dtype()),
                "sources have one dtype"
            );
            let elements = elements(tensor).expect("sources are row-major");
            // SAFETY: `_memory` has a handle to the memory of each slice. That memory does not move
            // or change while a handle exists. The handles live as long as the slices, which are
            // only returned as borrows of `self`.
            sources
                .bytes
                .push(unsafe { slice::from_raw_parts(elements.as_ptr(), elements.len()) });
            sources._memory.push(tensor.data_arc());
        }
        sources
    }

    /// Returns the bytes of each source.
    pub fn bytes(&self) -> &[&[u8]] {
        &self.bytes
    }

    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    pub fn dtype(&self) -> Option<DType> {
        self.dtype
    }

    /// Returns the elements of each source as `E`, which must have the size of the dtype.
    pub fn elements<E: Pod>(&self) -> impl Iterator<Item = &[E]> {
        // An empty slice need not be aligned.
        self.bytes().iter().map(|bytes| {
            if bytes.is_empty() {
                &[]
            } else {
                bytemuck::cast_slice(bytes)
            }
        })
    }
}
