//! Reductions: reduce-scatter and all-reduce.

use std::mem::MaybeUninit;
use std::ops::Range;
use std::slice;

use burn::backend::flex::FlexTensor;
use burn::tensor::{DType, Shape};
use half::{bf16, f16};
use smallvec::SmallVec;

use super::block::RunBlock;
use super::element::{Element, ReduceElement};
use crate::comm::ReduceOp;
use crate::comm::backend::ranges::Ranges;
use crate::kernels::flex::{LINE, OutputBuffers, Sources, prefetch, stream};

/// Elements reduced at a time, so that partial results stay in the first-level cache.
const STRIP: usize = 1024;

/// Shorter runs are brought together before they are reduced.
const SHORT_RUN: usize = 64;

/// The block `ranges` of every source, reduced over the sources in a fixed binary tree.
///
/// All sources are of `shape`; there are at least two.
pub(super) fn reduce(sources: &Sources, shape: &Shape, ranges: &Ranges, op: ReduceOp) -> FlexTensor {
    let block = RunBlock::new(&shape[..], ranges);
    let mut sizes = shape.clone();
    ranges.iter().enumerate().for_each(|(dim, range)| sizes[dim] = range.len());
    let (dtype, bytes) = (dtype_of(sources), block.len() * dtype_of(sources).size());
    let mut targets = OutputBuffers::new(None, [&sizes], dtype.size());
    let out = targets.ends().start(0);
    // SAFETY: the memory is for as many elements as the block has.
    unsafe {
        by_dtype(sources, op, &block, out, stream::pays(bytes));
        targets.finish([&sizes], dtype).next().expect("one target")
    }
}

/// Elements `range` of every source, taken as flat, reduced the same way, in their place of what begins at `whole`; past the
/// caches if it `streams`.
///
/// # Safety
/// Nobody reads or writes them there.
pub(super) unsafe fn reduce_flat(sources: &Sources, range: Range<usize>, op: ReduceOp, full: *mut u8, streams: bool) {
    // SAFETY: inside the whole, and as the caller says.
    unsafe {
        let out = full.add(range.start * dtype_of(sources).size());
        by_dtype(sources, op, &RunBlock::new(&[range.end], &[range]), out, streams);
    }
}

pub(super) fn dtype_of(sources: &Sources) -> DType {
    sources.dtype().expect("there are sources")
}

/// # Safety
/// There is room for as many elements as `block` has at `out`, where they are aligned, and nobody reads or writes.
unsafe fn by_dtype(sources: &Sources, op: ReduceOp, block: &RunBlock, out: *mut u8, streams: bool) {
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
        DType::QFloat(_) => unreachable!("quantized tensors are refused when a collective is issued"),
    };
    // SAFETY: the caller's.
    unsafe { typed(sources, op, block, out, streams) }
}

/// # Safety
/// As of [`by_dtype`].
unsafe fn by_op<E: Element>(sources: &Sources, op: ReduceOp, block: &RunBlock, out: *mut u8, streams: bool) {
    /// The same, compiled for registers twice as long as those that every x86-64 has.
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2")]
    fn by_avx2<E: Element>(
        sources: &Sources,
        op: ReduceOp,
        block: &RunBlock,
        out: &mut [MaybeUninit<E>],
        streams: bool,
    ) {
        reduced(sources, op, block, out, streams);
    }
    // SAFETY: the caller's.
    let out = unsafe { slice::from_raw_parts_mut(out.cast(), block.len()) };
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has what it is asked for.
        return unsafe { by_avx2::<E>(sources, op, block, out, streams) };
    }
    reduced::<E>(sources, op, block, out, streams);
}

/// All of `out` is written.
#[inline(always)]
fn reduced<E: Element>(sources: &Sources, op: ReduceOp, block: &RunBlock, out: &mut [MaybeUninit<E>], streams: bool) {
    let slices: SmallVec<[&[E]; 8]> = sources.elements().collect();
    let count = slices.len();
    let strips = Strips { sources: &slices, block, streams };
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

/// A block that the tree reduces strip by strip.
struct Strips<'a, E> {
    sources: &'a [&'a [E]],
    block: &'a RunBlock,
    streams: bool,
}

impl<E: Element> Strips<'_, E> {
    /// Writes all of `out`, which is as long as the block.
    #[inline(always)]
    fn reduce(
        &self,
        out: &mut [MaybeUninit<E>],
        combine: impl Fn(E::Sum, E::Sum) -> E::Sum + Copy,
        finish: impl Fn(E::Sum) -> E::Sum + Copy,
    ) {
        let Self { sources, block, streams } = *self;
        let mut tree = Tree::new(sources.len(), combine, finish);
        if block.run < SHORT_RUN && block.offsets().len() > 1 {
            let together = |source: &&[E]| -> Vec<E> {
                block.offsets().flat_map(|offset| &source[offset..offset + block.run]).copied().collect()
            };
            let together: Vec<Vec<E>> = sources.iter().map(together).collect();
            let sources: Vec<&[E]> = together.iter().map(Vec::as_slice).collect();
            tree.reduce(&sources, 0..out.len(), out);
        } else if !out.is_empty() {
            // The runs are as many as the chunks, and the tree writes all of what it is given.
            let runs = block.offsets().map(|offset| offset..offset + block.run).zip(out.chunks_exact_mut(block.run));
            if streams {
                tree.stream(sources, runs);
            } else {
                for (run, out) in runs {
                    tree.reduce(sources, run, out);
                }
            }
        }
    }
}

/// The reduction over all ranks: neighbours first, then neighbouring pairs.
///
/// ```text
/// 0   1   2   3   4
///  \ /     \ /    |
///   +---+---+     |
///       +----+----+
/// ```
///
/// On four ranks this is what two groups of two, and then a pair, compute, to the bit. The root
/// writes straight into the result.
///
/// It is walked as a binary counter counts: pairs come from the left, and two partial results over as many ranks become one.
/// What is left is of fewer ranks the further to the right it is, and is combined from there.
struct Tree<S, C, F> {
    combine: C,
    finish: F,
    /// Partial results of one strip, from the left.
    partial: Vec<Box<[S]>>,
}

impl<S: ReduceElement, C: Fn(S, S) -> S + Copy, F: Fn(S) -> S + Copy> Tree<S, C, F> {
    /// A tree over `ranks` sources, at least two.
    fn new(ranks: usize, combine: C, finish: F) -> Self {
        // Two sources are combined into the result. Of more, as many partial results wait as the number of pairs has digits,
        // and the last pair's.
        let most = if ranks > 2 { ranks.div_ceil(2).ilog2() as usize + 2 } else { 0 };
        Self { combine, finish, partial: (0..most).map(|_| vec![S::default(); STRIP].into()).collect() }
    }

    /// Writes the reduction of the elements `range`, which are as many as `out`.
    #[inline(always)]
    fn reduce<E: Element<Sum = S>>(&mut self, sources: &[&[E]], range: Range<usize>, out: &mut [MaybeUninit<E>]) {
        let Self { combine, finish, partial } = self;
        if let [left, right] = sources {
            return E::write_pair(&left[range.clone()], &right[range], |a, b| finish(combine(a, b)), out);
        }
        let (pairs, single) = sources.as_chunks::<2>();
        for (start, out) in range.clone().step_by(STRIP).zip(out.chunks_mut(STRIP)) {
            let (strip, len) = (start..start + out.len(), out.len());
            let mut count = 0;
            for (index, [left, right]) in pairs.iter().enumerate() {
                E::pair(&left[strip.clone()], &right[strip.clone()], *combine, &mut partial[count]);
                count += 1;
                let next = &sources[2 * (index + 1)..];
                next.iter().take(2).for_each(|source| prefetch_all(&source[strip.clone()]));
                // Pairs, fours, eights that are complete, but for the root's own.
                for _ in 0..if next.is_empty() { 0 } else { index.trailing_ones() } {
                    let [.., left, right] = &mut partial[..count] else { unreachable!("one each, from both sides") };
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
                _ => E::widen(&single[0][strip], &mut spare[0]).unwrap_or(&spare[0][..len]),
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

    /// Writes the reductions of `runs`, each as long as its place in the result, past the caches.
    #[inline(always)]
    fn stream<'a, E: Element<Sum = S>>(
        &mut self,
        sources: &[&[E]],
        runs: impl Iterator<Item = (Range<usize>, &'a mut [MaybeUninit<E>])>,
    ) {
        let mut strip = [MaybeUninit::uninit(); STRIP];
        for (run, out) in runs {
            for (start, out) in run.step_by(STRIP).zip(out.chunks_mut(STRIP)) {
                let strip = &mut strip[..out.len()];
                self.reduce(sources, start..start + out.len(), strip);
                // SAFETY: the strip is written, as long as its place, and elsewhere.
                unsafe { stream::copy(strip.as_ptr().cast(), out.as_mut_ptr().cast(), size_of_val(out)) };
            }
        }
        stream::done();
    }
}

/// `left` becomes what it is combined with `right`.
#[inline(always)]
fn onto<S: ReduceElement>(left: &mut [S], right: &[S], combine: impl Fn(S, S) -> S) {
    for (left, right) in left.iter_mut().zip(right) {
        *left = combine(*left, *right);
    }
}

/// Prefetches what is read next: every rank's elements are elsewhere, and a strip is over before the processor sees where it leads.
#[inline(always)]
fn prefetch_all<E>(elements: &[E]) {
    elements.chunks(LINE / size_of::<E>()).for_each(|line| prefetch(line.as_ptr().cast()));
}
