//! The memory of targets.

use std::mem::MaybeUninit;
use std::sync::Arc;

use burn::backend::flex::{FlexTensor, Layout};
use burn::tensor::{DType, Element, Shape};
use bytemuck::Pod;
use smallvec::SmallVec;

use crate::kernels::CopyPlan;
use crate::memory::flex::copied;
use crate::memory::{HostMemoryPool, UninitBytes};

/// A new tensor of what is in `memory`.
///
/// # Safety
/// All of it is written, as elements of `dtype`.
unsafe fn build(memory: UninitBytes, shape: &Shape, dtype: DType) -> FlexTensor {
    // SAFETY: the caller says so.
    let bytes = unsafe { memory.filled() };
    debug_assert_eq!(bytes.len(), shape.num_elements() * dtype.size());
    FlexTensor::new(bytes, Layout::contiguous(same(shape)), dtype)
}

/// `shape` again. Its own `clone` takes as long as an allocation.
fn same(shape: &Shape) -> Shape {
    Shape::new_raw(SmallVec::from_slice(shape))
}

/// New memory for tensors, written by whoever has its [`ends`](Self::ends).
pub(crate) struct OutputBuffers(SmallVec<[UninitBytes; 1]>);

impl OutputBuffers {
    /// For tensors of these shapes, whose elements have so many bytes; `home`'s, or the thread's.
    pub fn new<'a>(
        home: Option<&Arc<HostMemoryPool>>,
        shapes: impl IntoIterator<Item = &'a Shape>,
        size: usize,
    ) -> Self {
        Self(shapes.into_iter().map(|shape| UninitBytes::at(home, size, shape.num_elements())).collect())
    }

    /// For those of `copies`, with zeros in their gaps.
    pub fn of(home: Option<&Arc<HostMemoryPool>>, copies: &CopyPlan, size: usize) -> Self {
        let mut targets = Self::new(home, &copies.targets, size);
        for gap in &copies.gaps {
            targets.0[gap.target].bytes()[gap.at * size..(gap.at + gap.len) * size].fill(MaybeUninit::zeroed());
        }
        targets
    }

    /// Where each begins. No use of `self` but [`finish`](Self::finish) may follow until all is written, nor may it move.
    pub fn ends<E>(&mut self) -> Ends<E> {
        Ends(self.0.iter_mut().map(|memory| memory.bytes().as_mut_ptr().cast()).collect())
    }

    /// As tensors.
    ///
    /// # Safety
    /// All of them is written, as elements of `dtype`; `shapes` are those that the memory is for.
    pub unsafe fn finish<'a>(
        self,
        shapes: impl IntoIterator<Item = &'a Shape>,
        dtype: DType,
    ) -> impl Iterator<Item = FlexTensor> {
        // SAFETY: the caller wrote them.
        self.0.into_iter().zip(shapes).map(move |(memory, shape)| unsafe { build(memory, shape, dtype) })
    }
}

/// Where targets begin that several threads write to.
pub(crate) struct Ends<E>(SmallVec<[*mut E; 1]>);

// SAFETY: addresses alone; whoever writes there says why it may.
unsafe impl<E: Send> Send for Ends<E> {}
// SAFETY: as above.
unsafe impl<E: Send> Sync for Ends<E> {}

impl<E> Ends<E> {
    /// Of `tensors`, which are written in place, in memory that is theirs alone.
    ///
    /// # Panics
    /// If they have not the shapes of the targets, or another dtype.
    pub(super) fn of(copies: &CopyPlan, tensors: &mut [FlexTensor], dtype: DType) -> Self
    where
        E: Pod + Element,
    {
        assert_eq!(tensors.len(), copies.targets.len(), "one tensor for each target");
        let start = |(tensor, shape): (&mut FlexTensor, &Shape)| {
            assert_eq!((tensor.dtype(), tensor.layout().shape()), (dtype, shape), "what is added to");
            own::<E>(tensor)
        };
        Self(tensors.iter_mut().zip(&copies.targets).map(start).collect())
    }

    /// The first element of a target.
    pub fn start(&self, target: usize) -> *mut E {
        self.0[target]
    }
}

/// The first element of a row-major tensor, from where all are in memory that is its alone.
fn own<E: Pod + Element>(tensor: &mut FlexTensor) -> *mut E {
    if !tensor.is_contiguous() || tensor.layout().start_offset() > 0 {
        *tensor = copied(tensor);
    }
    tensor.storage_mut::<E>().as_mut_ptr()
}
