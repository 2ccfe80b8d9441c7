//! Memory of targets.

use std::mem::MaybeUninit;
use std::sync::Arc;

use burn::backend::flex::{FlexTensor, Layout};
use burn::tensor::{DType, Shape};
use smallvec::SmallVec;

use crate::kernels::CopyPlan;
use crate::memory::{HostMemoryPool, UninitBytes};

/// Uninitialized memory for tensors. It is written through its [`ptrs`](Self::ptrs).
pub(crate) struct OutputBuffers(SmallVec<[UninitBytes; 1]>);

impl OutputBuffers {
    /// Allocates memory for tensors of these shapes, whose elements have `size` bytes. Large memory
    /// is taken from the pool `home`, or from the thread's pool if that is `None`.
    pub fn new<'a>(
        home: Option<&Arc<HostMemoryPool>>,
        shapes: impl IntoIterator<Item = &'a Shape>,
        size: usize,
    ) -> Self {
        Self(
            shapes
                .into_iter()
                .map(|shape| UninitBytes::at(home, size, shape.num_elements()))
                .collect(),
        )
    }

    /// Allocates memory for the targets of `copies`, and sets their gaps to zero.
    pub fn of(home: Option<&Arc<HostMemoryPool>>, copies: &CopyPlan, size: usize) -> Self {
        let mut targets = Self::new(home, &copies.targets, size);
        for gap in &copies.gaps {
            targets.0[gap.target].bytes()[gap.at * size..(gap.at + gap.len) * size]
                .fill(MaybeUninit::zeroed());
        }
        targets
    }

    /// Returns the start of each tensor. Until everything is written, `self` must not move, and
    /// only [`finish`](Self::finish) may be called on it afterwards.
    pub fn ptrs(&mut self) -> OutputPtrs {
        OutputPtrs(
            self.0
                .iter_mut()
                .map(|memory| memory.bytes().as_mut_ptr().cast())
                .collect(),
        )
    }

    /// Returns the tensors.
    ///
    /// # Safety
    /// All of them are written, as elements of `dtype`. `shapes` are those for which the memory was
    /// allocated.
    pub unsafe fn finish<'a>(
        self,
        shapes: impl IntoIterator<Item = &'a Shape>,
        dtype: DType,
    ) -> impl Iterator<Item = FlexTensor> {
        self.0.into_iter().zip(shapes).map(move |(memory, shape)| {
            // SAFETY: guaranteed by the caller.
            let bytes = unsafe { memory.filled() };
            debug_assert_eq!(bytes.len(), shape.num_elements() * dtype.size());
            FlexTensor::new(bytes, Layout::contiguous(shape.clone()), dtype)
        })
    }
}

/// Starts of targets to which several threads write.
pub(crate) struct OutputPtrs(SmallVec<[*mut u8; 1]>);

// SAFETY: these are only addresses; code that writes to them must justify the access.
unsafe impl Send for OutputPtrs {}
// SAFETY: as above.
unsafe impl Sync for OutputPtrs {}

impl OutputPtrs {
    /// Returns the start of a target.
    pub fn start(&self, target: usize) -> *mut u8 {
        self.0[target]
    }
}
