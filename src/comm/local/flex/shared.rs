//! [`Shared`]: what every rank needs of a collective alike, made by whichever comes first.
//!
//! That is where the elements of every rank's tensors are, and which go where. Were each rank to find it out by
//! itself, that would be work that grows with the square of their number, whatever the size of the tensors.

use std::sync::OnceLock;

use burn::backend::DispatchTensor;
use burn::backend::flex::FlexTensor;
use burn::tensor::Shape;
use smallvec::SmallVec;

use super::copy::{Gathered, Joints};
use super::reduce::{reduce, reduce_flat};
use super::wrap;
use crate::comm::ReduceOp;
use crate::comm::engine::ranges::Ranges;
use crate::kernels::flex::{Kept, run};
use crate::kernels::{Convert, Copies, Segment};
use crate::placement::chunk;

/// A part of the first member's deposit.
#[derive(Debug, Default)]
pub(in crate::comm::local) struct Shared {
    parts: OnceLock<Option<Gathered>>,
    /// Of each tensor.
    terms: OnceLock<Box<[OnceLock<Option<Terms>>]>>,
}

impl Shared {
    /// The parts that an all-gather joins, by rank and tensor; `None` if they are not all Flex tensors.
    pub fn gathered<'a>(
        &self,
        joints: &Joints,
        parts: impl FnOnce() -> Option<Vec<Vec<&'a FlexTensor>>>,
    ) -> Option<&Gathered> {
        offered(&self.parts, || Some(joints.sources(&parts()?))).as_ref()
    }

    /// The terms of the reduction of tensor `index` of `count`; `None` if they are not all Flex tensors.
    pub fn terms<'a>(
        &self,
        (index, count): (usize, usize),
        terms: impl FnOnce() -> Option<SmallVec<[&'a FlexTensor; 8]>>,
    ) -> Option<&Terms> {
        let all = offered(&self.terms, || (0..count).map(|_| OnceLock::new()).collect());
        offered(&all[index], || Some(Terms::new(&terms()?))).as_ref()
    }
}

/// What is in `cell`. Ranks that find nothing there make it, and who is first to have it puts it in: to wait for
/// another to do so would take longer.
fn offered<T>(cell: &OnceLock<T>, make: impl FnOnce() -> T) -> &T {
    if let Some(value) = cell.get() {
        return value;
    }
    let value = make();
    cell.get_or_init(|| value)
}

/// Tensors of one shape and dtype, one of each rank, which are reduced.
#[derive(Debug)]
pub(in crate::comm::local) struct Terms {
    terms: Kept,
    shape: Shape,
    /// Slices of the reduction, one for each rank to make.
    slices: OnceLock<Box<[OnceLock<FlexTensor>]>>,
    /// How they are joined.
    whole: OnceLock<(Copies, Kept)>,
}

impl Terms {
    pub fn new(terms: &[&FlexTensor]) -> Self {
        let shape = terms[0].layout().shape().clone();
        Self { terms: Kept::of(terms), shape, slices: OnceLock::new(), whole: OnceLock::new() }
    }

    /// The block `ranges` of every term, reduced.
    pub fn reduce(&self, ranges: &Ranges, op: ReduceOp) -> DispatchTensor {
        wrap(reduce(&self.terms.get(), &self.shape, ranges, op))
    }

    /// The reduction, whole: each rank makes a slice of it, then copies all slices.
    ///
    /// A rank that does not wait for its result makes no slice; whoever finds one missing makes
    /// it, so no rank ever waits for another here but for a slice already in the making.
    pub fn reduce_shared(&self, member: usize, op: ReduceOp) -> DispatchTensor {
        let ranks = self.terms.get().len();
        let slices = self.slices.get_or_init(|| (0..ranks).map(|_| OnceLock::new()).collect());
        let range = |index: usize| chunk(self.shape.num_elements(), ranks, index);
        if self.whole.get().is_none() {
            for index in (member..ranks).chain(0..member) {
                slices[index].get_or_init(|| reduce_flat(&self.terms.get(), range(index), op));
            }
        }
        let (copies, slices) = self.whole.get_or_init(|| {
            let slices: Vec<_> = slices.iter().map(|slice| slice.get().expect("all are made")).collect();
            let segment = |index| Segment::run(index, 0, 0, range(index).start, range(index).len());
            let shapes = slices.iter().map(|slice| slice.layout().shape().clone()).collect();
            let copies = Copies::new(shapes, vec![self.shape.clone()], (0..ranks).map(segment).collect());
            (copies, Kept::of(&slices))
        });
        let dtype = slices.get().dtype().expect("every rank has a slice");
        wrap(run(copies, &slices.get(), Convert::to(dtype)).pop().expect("one target"))
    }
}
