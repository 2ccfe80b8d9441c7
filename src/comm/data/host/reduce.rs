//! Kernels of the reductions: reduce-scatter and all-reduce.

use std::mem::MaybeUninit;
use std::ops::Range;
use std::slice;
use std::sync::Arc;

use burn::backend::DispatchTensor;
use burn::backend::flex::FlexTensor;
use burn::tensor::{DType, Shape};
use half::{bf16, f16};
use smallvec::SmallVec;

use super::block::RunBlock;
use super::cooperative::{CooperativeResult, Owner, PartitionedJob};
use super::element::{Element, ReduceElement};
use super::wrap;
use crate::comm::ReduceOp;
use crate::comm::backend::ranges::{Ranges, full};
use crate::kernels::flex::{OutputBuffers, OutputPtrs, Sources};
use crate::memory::{HostMemoryPool, HostTuning};
use crate::placement::chunk;

/// Operands of a reduction: tensors of one shape and dtype, one per rank.
#[derive(Debug)]
pub(in crate::comm) struct ReduceOperands {
    terms: Sources,
    shape: Shape,
    full: CooperativeResult<ReduceSlices>,
}

impl ReduceOperands {
    pub fn new(terms: &[&FlexTensor]) -> Self {
        let shape = terms[0].layout().shape().clone();
        Self {
            terms: Sources::of(terms.iter().copied()),
            shape,
            full: CooperativeResult::default(),
        }
    }

    /// Returns the reduction of the block `ranges`.
    pub fn reduce(&self, ranges: &Ranges, op: ReduceOp) -> DispatchTensor {
        wrap(reduce(&self.terms, &self.shape, ranges, op))
    }

    /// Returns the reduction of all elements. A large one is computed by all local ranks together
    /// and shared, if it has an `owner`.
    pub fn reduce_full(&self, op: ReduceOp, owner: Option<Owner>) -> DispatchTensor {
        let terms = &self.terms;
        let elements = self.shape.num_elements();
        match owner.filter(|_| {
            elements * dtype_of(terms).size() * terms.len() >= HostTuning::get().shared_bytes
        }) {
            Some(owner) => {
                // SAFETY: all ranks have the operands of the same collective, and agree on the
                // operation.
                let mut complete = unsafe {
                    self.full.get(
                        &ReduceJob {
                            terms,
                            shape: &self.shape,
                            op,
                        },
                        owner,
                    )
                };
                wrap(complete.pop().expect("a reduction has one result"))
            }
            None => self.reduce(&full(&self.shape[..]), op),
        }
    }
}

/// Number of slices of nearly equal length into which a reduction is divided.
#[derive(Debug)]
struct ReduceSlices(usize);

/// Reduction of all elements of the operands.
struct ReduceJob<'a> {
    terms: &'a Sources,
    shape: &'a Shape,
    op: ReduceOp,
}

// SAFETY: the slices are disjoint and cover all elements.
unsafe impl PartitionedJob for ReduceJob<'_> {
    type Partition = ReduceSlices;

    fn begin(&self, home: &Arc<HostMemoryPool>) -> (OutputBuffers, ReduceSlices, usize) {
        let size = dtype_of(self.terms).size();
        let bytes = self.shape.num_elements() * size;
        let HostTuning {
            task_bytes,
            task_output_bytes,
            tasks_per_worker,
            ..
        } = *HostTuning::get();
        let worth = (bytes * self.terms.len() / task_bytes).min(bytes / task_output_bytes);
        let count = worth.clamp(1, self.terms.len() * tasks_per_worker);
        (
            OutputBuffers::new(Some(home), [self.shape], size),
            ReduceSlices(count),
            count,
        )
    }

    unsafe fn make(&self, slices: &ReduceSlices, index: usize, to: &OutputPtrs) {
        let range = chunk(self.shape.num_elements(), slices.0, index);
        // SAFETY: the caller guarantees it; the operands have as many elements as the result.
        unsafe { reduce_flat(self.terms, range, self.op, to.start(0)) }
    }

    unsafe fn finish(&self, targets: OutputBuffers) -> Vec<FlexTensor> {
        // SAFETY: the caller guarantees it.
        unsafe { targets.finish([self.shape], dtype_of(self.terms)).collect() }
    }
}

/// Reduces the block `ranges` of every source over the sources, in a fixed binary tree.
///
/// All sources have the shape `shape`; there are at least two.
fn reduce(sources: &Sources, shape: &Shape, ranges: &Ranges, op: ReduceOp) -> FlexTensor {
    let block = RunBlock::new(&shape[..], ranges);
    let mut sizes = shape.clone();
    ranges
        .iter()
        .enumerate()
        .for_each(|(dim, range)| sizes[dim] = range.len());
    let dtype = dtype_of(sources);
    let mut targets = OutputBuffers::new(None, [&sizes], dtype.size());
    let out = targets.ptrs().start(0);
    // SAFETY: the memory is for as many elements as the block has.
    unsafe {
        by_dtype(sources, op, &block, out);
        targets.finish([&sizes], dtype).next().expect("one target")
    }
}

/// Reduces elements `range` of every source, taken as flat, and writes them to the same range of
/// the buffer at `full`.
///
/// # Safety
/// No other thread reads or writes this range.
unsafe fn reduce_flat(sources: &Sources, range: Range<usize>, op: ReduceOp, full: *mut u8) {
    // SAFETY: the range is inside the buffer, and the caller guarantees the rest.
    unsafe {
        let out = full.add(range.start * dtype_of(sources).size());
        by_dtype(sources, op, &RunBlock::new(&[range.end], &[range]), out);
    }
}

fn dtype_of(sources: &Sources) -> DType {
    sources.dtype().expect("a reduction has sources")
}

/// Calls the kernel of the sources' element type.
///
/// # Safety
/// `out` points to aligned memory for as many elements as `block` has, which no other thread reads
/// or writes.
unsafe fn by_dtype(sources: &Sources, op: ReduceOp, block: &RunBlock, out: *mut u8) {
    let typed = match dtype_of(sources) {
        DType::F32 | DType::Flex32 => by_op::<f32>,
        DType::F64 => by_op::<f64>,
        DType::F16 => by_op::<f16>,
        DType::BF16 => by_op::<bf16>,
        DType::I64 => by_op::<i64>,
        DType::I32 => by_op::<i32>,
        DType::I16 => by_op::<i16>,
        DType::I8 => by_op::<i8>,
        DType::U64 => by_op::<u64>,
        DType::U32 => by_op::<u32>,
        DType::U16 => by_op::<u16>,
        // Bool is stored as 0 and 1: its minimum and product are `and`, its maximum is `or`.
        DType::U8 | DType::Bool(_) => by_op::<u8>,
        DType::QFloat(_) => {
            unreachable!("quantized tensors are rejected when a collective is posted")
        }
    };
    // SAFETY: the caller guarantees it.
    unsafe { typed(sources, op, block, out) }
}

/// Calls the kernel of the operation, compiled for the processor.
///
/// # Safety
/// Same requirements as [`by_dtype`].
unsafe fn by_op<E: Element>(sources: &Sources, op: ReduceOp, block: &RunBlock, out: *mut u8) {
    /// Like [`reduced`], but compiled for AVX2, whose registers are twice as long as those of the
    /// x86-64 baseline.
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2")]
    fn by_avx2<E: Element>(
        sources: &Sources,
        op: ReduceOp,
        block: &RunBlock,
        out: &mut [MaybeUninit<E>],
    ) {
        reduced(sources, op, block, out);
    }
    // SAFETY: the caller guarantees it.
    let out = unsafe { slice::from_raw_parts_mut(out.cast(), block.len()) };
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") {
        // SAFETY: the processor supports AVX2.
        return unsafe { by_avx2::<E>(sources, op, block, out) };
    }
    reduced::<E>(sources, op, block, out);
}

/// Reduces the block with the operation `op`. Writes all of `out`.
#[inline(always)]
fn reduced<E: Element>(
    sources: &Sources,
    op: ReduceOp,
    block: &RunBlock,
    out: &mut [MaybeUninit<E>],
) {
    let slices: SmallVec<[&[E]; 8]> = sources.elements().collect();
    let count = slices.len();
    let strips = Strips {
        sources: &slices,
        block,
    };
    match op {
        ReduceOp::Sum => strips.reduce(out, ReduceElement::plus, |sum| sum),
        ReduceOp::Avg => strips.reduce(out, ReduceElement::plus, |sum: E::Sum| sum.over(count)),
        ReduceOp::Min => strips.reduce(out, ReduceElement::least, |least| least),
        ReduceOp::Max => strips.reduce(out, ReduceElement::greatest, |greatest| greatest),
        ReduceOp::Product => strips.reduce(out, ReduceElement::times, |product| product),
        ReduceOp::BitAnd | ReduceOp::BitOr | ReduceOp::BitXor | ReduceOp::PremulSum(_) => {
            unreachable!("{op:?} has no kernel")
        }
    }
}

/// A block that is reduced strip by strip.
struct Strips<'a, E> {
    sources: &'a [&'a [E]],
    block: &'a RunBlock,
}

impl<E: Element> Strips<'_, E> {
    /// Writes all of `out`, which has the length of the block.
    #[inline(always)]
    fn reduce(
        &self,
        out: &mut [MaybeUninit<E>],
        combine: impl Fn(E::Sum, E::Sum) -> E::Sum + Copy,
        finish: impl Fn(E::Sum) -> E::Sum + Copy,
    ) {
        let Self { sources, block } = *self;
        let mut tree = Tree::new(sources.len(), combine, finish);
        if block.run < HostTuning::get().reduced_run && block.offsets().len() > 1 {
            let together = |source: &&[E]| -> Vec<E> {
                block
                    .offsets()
                    .flat_map(|offset| &source[offset..offset + block.run])
                    .copied()
                    .collect()
            };
            let together: Vec<Vec<E>> = sources.iter().map(together).collect();
            let sources: Vec<&[E]> = together.iter().map(Vec::as_slice).collect();
            tree.reduce(&sources, 0..out.len(), out);
        } else if !out.is_empty() {
            // There are as many runs as chunks, and the tree writes all of each chunk.
            let runs = block
                .offsets()
                .map(|offset| offset..offset + block.run)
                .zip(out.chunks_exact_mut(block.run));
            for (run, out) in runs {
                tree.reduce(sources, run, out);
            }
        }
    }
}

/// Reduction over all ranks: neighbours first, then neighbouring pairs.
///
/// ```text
/// 0   1   2   3   4
///  \ /     \ /    |
///   +---+---+     |
///       +----+----+
/// ```
///
/// On four ranks this equals, to the bit, two groups of two and then a pair. The root writes
/// directly into the result.
///
/// The tree is traversed like a binary counter: pairs are combined from the left, and two partial
/// results over the same number of ranks are merged. The remaining partial results are over fewer
/// ranks the further to the right they are, and are combined from the right.
struct Tree<S, C, F> {
    combine: C,
    finish: F,
    /// Number of elements of a strip.
    strip: usize,
    /// Partial results of one strip, from the left.
    partial: Vec<Box<[S]>>,
}

impl<S: ReduceElement, C: Fn(S, S) -> S + Copy, F: Fn(S) -> S + Copy> Tree<S, C, F> {
    /// Creates a tree over `ranks` sources, at least two.
    fn new(ranks: usize, combine: C, finish: F) -> Self {
        // Two sources are combined directly into the result. With more sources, the number of
        // stored partial results is at most the number of binary digits of the number of pairs,
        // plus one for the last pair.
        let most = if ranks > 2 {
            ranks.div_ceil(2).ilog2() as usize + 2
        } else {
            0
        };
        let strip = HostTuning::get().strip;
        Self {
            combine,
            finish,
            strip,
            partial: (0..most)
                .map(|_| vec![S::default(); strip].into())
                .collect(),
        }
    }

    /// Writes the reduction of the elements `range`, which has the length of `out`.
    #[inline(always)]
    fn reduce<E: Element<Sum = S>>(
        &mut self,
        sources: &[&[E]],
        range: Range<usize>,
        out: &mut [MaybeUninit<E>],
    ) {
        let Self {
            combine,
            finish,
            strip,
            partial,
        } = self;
        if let [left, right] = sources {
            return E::write_pair(
                &left[range.clone()],
                &right[range],
                |a, b| finish(combine(a, b)),
                out,
            );
        }
        let (pairs, single) = sources.as_chunks::<2>();
        for (start, out) in range.clone().step_by(*strip).zip(out.chunks_mut(*strip)) {
            let strip = start..start + out.len();
            let len = out.len();
            let mut count = 0;
            for (index, [left, right]) in pairs.iter().enumerate() {
                E::pair(
                    &left[strip.clone()],
                    &right[strip.clone()],
                    *combine,
                    &mut partial[count],
                );
                count += 1;
                // Merge complete groups of 4, 8, .. ranks, except at the root.
                let is_last = 2 * (index + 1) == sources.len();
                for _ in 0..if is_last { 0 } else { index.trailing_ones() } {
                    let [.., left, right] = &mut partial[..count] else {
                        unreachable!("two partial results")
                    };
                    onto(&mut left[..len], &right[..len], *combine);
                    count -= 1;
                }
            }
            let (mut rest, spare) = match single {
                [] => partial.split_at_mut(count - 1),
                _ => partial.split_at_mut(count),
            };
            let mut right = match single {
                [] => &spare[0][..len],
                _ => E::widen_all(&single[0][strip], &mut spare[0]).unwrap_or(&spare[0][..len]),
            };
            while let [before @ .., left] = rest {
                let left = &mut left[..len];
                if before.is_empty() {
                    E::write(left, right, |a, b| finish(combine(a, b)), out);
                } else {
                    onto(left, right, *combine);
                }
                (rest, right) = (before, left);
            }
        }
    }
}

/// Combines `right` into `left`.
#[inline(always)]
fn onto<S: ReduceElement>(left: &mut [S], right: &[S], combine: impl Fn(S, S) -> S) {
    for (left, right) in left.iter_mut().zip(right) {
        *left = combine(*left, *right);
    }
}
