//! The memory of targets.

use std::mem::MaybeUninit;

use burn::backend::flex::{FlexTensor, Layout};
use burn::tensor::{DType, Element, Shape};
use bytemuck::Pod;
use smallvec::SmallVec;

use crate::kernels::Copies;
use crate::memory::Space;
use crate::memory::flex::copied;

/// A new tensor of what is in `space`.
///
/// # Safety
/// All of it is written.
pub(crate) unsafe fn build<E: Pod + Send + Sync>(mut space: Space<E>, shape: Shape, dtype: DType) -> FlexTensor {
    debug_assert_eq!(space.elements().len(), shape.num_elements());
    // SAFETY: the caller says so.
    FlexTensor::new(unsafe { space.filled() }, Layout::contiguous(shape), dtype)
}

/// `shape` again. Its own `clone` takes as long as an allocation.
fn same(shape: &Shape) -> Shape {
    Shape::new_raw(SmallVec::from_slice(shape))
}

/// New memory for the targets of a copy, written but for the gaps by whoever has its [`ends`](Self::ends).
pub(super) struct Targets<E>(Vec<Space<E>>);

impl<E: Pod + Send + Sync> Targets<E> {
    /// Of `copies`, with zeros in their gaps.
    pub fn new(copies: &Copies) -> Self {
        let mut memory: Vec<_> = copies.targets.iter().map(|shape| Space::new(shape.num_elements())).collect();
        for gap in &copies.gaps {
            memory[gap.target].elements()[gap.at..gap.at + gap.len].fill(MaybeUninit::zeroed());
        }
        Self(memory)
    }

    /// Where each begins. No use of `self` but [`finish`](Self::finish) may follow until all is written.
    pub fn ends(&mut self) -> Ends<E> {
        Ends(self.0.iter_mut().map(|memory| memory.elements().as_mut_ptr().cast()).collect())
    }

    /// As tensors.
    ///
    /// # Safety
    /// All elements of `copies`, whose targets these are, are written.
    pub unsafe fn finish(self, copies: &Copies, dtype: DType) -> Vec<FlexTensor> {
        // SAFETY: the caller wrote them.
        let build = |(space, shape): (_, &Shape)| unsafe { build(space, same(shape), dtype) };
        self.0.into_iter().zip(&copies.targets).map(build).collect()
    }
}

/// Where targets begin that several threads write to.
pub(super) struct Ends<E>(Vec<*mut E>);

// SAFETY: addresses alone; whoever writes there says why it may.
unsafe impl<E: Send> Sync for Ends<E> {}

impl<E> Ends<E> {
    /// Of `tensors`, which are written in place, in memory that is theirs alone.
    ///
    /// # Panics
    /// If they have not the shapes of the targets, or another dtype.
    pub fn of(copies: &Copies, tensors: &mut [FlexTensor], dtype: DType) -> Self
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
