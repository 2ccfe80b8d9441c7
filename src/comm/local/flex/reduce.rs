//! Reductions: reduce-scatter and all-reduce.

use std::mem::MaybeUninit;
use std::ops::Range;

use burn::backend::flex::FlexTensor;
use burn::tensor::{DType, Shape};
use half::{bf16, f16};
use smallvec::SmallVec;

use super::block::Block;
use super::element::{Element, Number};
use crate::comm::ReduceOp;
use crate::comm::engine::ranges::Ranges;
use crate::kernels::flex::{Sources, build, stream};
use crate::memory::Space;

/// Elements reduced at a time, so that partial results stay in the first-level cache.
const STRIP: usize = 1024;

/// Shorter runs are brought together before they are reduced.
const SHORT_RUN: usize = 64;

/// The block `ranges` of every source, reduced over the sources in a fixed binary tree.
///
/// All sources are of `shape`; there are at least two.
pub(super) fn reduce(sources: &Sources, shape: &Shape, ranges: &Ranges, op: ReduceOp) -> FlexTensor {
    let block = Block::new(&shape[..], ranges);
    let mut cut = shape.clone();
    ranges.iter().enumerate().for_each(|(dim, range)| cut[dim] = range.len());
    by_dtype(sources, op, block, cut)
}

/// Elements `range` of every source, taken as flat, reduced the same way.
pub(super) fn reduce_flat(sources: &Sources, range: Range<usize>, op: ReduceOp) -> FlexTensor {
    let cut = Shape::from([range.len()]);
    by_dtype(sources, op, Block::new(&[range.end], &[range]), cut)
}

fn by_dtype(sources: &Sources, op: ReduceOp, block: Block, shape: Shape) -> FlexTensor {
    let dtype = sources.dtype().expect("there are sources");
    let typed = match dtype {
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
    typed(sources, op, block, shape, dtype)
}

fn by_op<E: Element>(sources: &Sources, op: ReduceOp, block: Block, shape: Shape, dtype: DType) -> FlexTensor {
    /// The same, compiled for registers twice as long as those that every x86-64 has.
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2")]
    fn by_avx2<E: Element>(sources: &Sources, op: ReduceOp, block: &Block) -> Space<E> {
        reduced(sources, op, block)
    }
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has what it is asked for, and all is written.
        return unsafe { build(by_avx2::<E>(sources, op, &block), shape, dtype) };
    }
    // SAFETY: all is written.
    unsafe { build(reduced::<E>(sources, op, &block), shape, dtype) }
}

/// Space in which all is written.
#[inline(always)]
fn reduced<E: Element>(sources: &Sources, op: ReduceOp, block: &Block) -> Space<E> {
    let slices: SmallVec<[&[E]; 8]> = sources.elements().collect();
    let count = slices.len();
    match op {
        ReduceOp::Sum => strips(&slices, block, Number::plus, |sum| sum),
        ReduceOp::Avg => strips(&slices, block, Number::plus, |sum: E::Sum| sum.over(count)),
        ReduceOp::Min => strips(&slices, block, Number::least, |least| least),
        ReduceOp::Max => strips(&slices, block, Number::greatest, |greatest| greatest),
        ReduceOp::Product => strips(&slices, block, Number::times, |product| product),
        ReduceOp::BitAnd | ReduceOp::BitOr | ReduceOp::BitXor | ReduceOp::PremulSum(_) => {
            unreachable!("{op:?} has no kernel")
        }
    }
}

/// Walks the block in strips that the tree reduces one by one. All of the space is written.
#[inline(always)]
fn strips<E: Element>(
    sources: &[&[E]],
    block: &Block,
    combine: impl Fn(E::Sum, E::Sum) -> E::Sum + Copy,
    finish: impl Fn(E::Sum) -> E::Sum + Copy,
) -> Space<E> {
    let count = block.offsets().len() * block.run;
    let mut space = Space::new(count);
    let out = space.elements();
    let mut tree = Tree::new(sources.len(), combine, finish);
    if block.run < SHORT_RUN && block.offsets().len() > 1 {
        let together = |source: &&[E]| -> Vec<E> {
            block.offsets().flat_map(|offset| &source[offset..offset + block.run]).copied().collect()
        };
        let together: Vec<Vec<E>> = sources.iter().map(together).collect();
        let sources: Vec<&[E]> = together.iter().map(Vec::as_slice).collect();
        tree.reduce(&sources, 0..count, out);
    } else if count > 0 {
        let runs = block.offsets().map(|offset| offset..offset + block.run).zip(out.chunks_exact_mut(block.run));
        if stream::pays(count * size_of::<E>()) {
            tree.stream(sources, runs);
        } else {
            for (run, out) in runs {
                tree.reduce(sources, run, out);
            }
        }
    }
    // All of it is written: the runs are as many as the chunks, and the tree writes all of what it is given.
    space
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
struct Tree<S, C, F> {
    combine: C,
    finish: F,
    /// One for each level, for partial results of one strip.
    buffers: Vec<Box<[S]>>,
}

impl<S: Number, C: Fn(S, S) -> S + Copy, F: Fn(S) -> S + Copy> Tree<S, C, F> {
    /// A tree over `ranks` sources, at least two.
    fn new(ranks: usize, combine: C, finish: F) -> Self {
        // Two sources are combined into the result.
        let levels = if ranks > 2 { ranks.next_power_of_two().ilog2() as usize + 1 } else { 0 };
        Self { combine, finish, buffers: (0..levels).map(|_| vec![S::default(); STRIP].into()).collect() }
    }

    /// Writes the reduction of the elements `range`, which are as many as `out`.
    #[inline(always)]
    fn reduce<E: Element<Sum = S>>(&mut self, sources: &[&[E]], range: Range<usize>, out: &mut [MaybeUninit<E>]) {
        let Self { combine, finish, buffers } = self;
        if let [left, right] = sources {
            return E::write_pair(&left[range.clone()], &right[range], |a, b| finish(combine(a, b)), out);
        }
        let (left, right) = sources.split_at(sources.len().next_power_of_two() / 2);
        let [first, rest @ ..] = &mut buffers[..] else { unreachable!("two sources have a level") };
        for (start, out) in range.clone().step_by(STRIP).zip(out.chunks_mut(STRIP)) {
            let strip = start..start + out.len();
            let left = node(left, &strip, *combine, first, rest);
            let [second, rest @ ..] = &mut *rest else { unreachable!("two sources have two buffers") };
            let right = node(right, &strip, *combine, second, rest);
            let left = left.unwrap_or(&first[..strip.len()]);
            let right = right.unwrap_or(&second[..strip.len()]);
            E::write(left, right, |a, b| finish(combine(a, b)), out);
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

/// One strip of `sources` combined: a source itself, or `None` if the result is in `target`.
fn node<'a, E: Element>(
    sources: &[&'a [E]],
    strip: &Range<usize>,
    combine: impl Fn(E::Sum, E::Sum) -> E::Sum + Copy,
    target: &mut [E::Sum],
    spare: &mut [Box<[E::Sum]>],
) -> Option<&'a [E::Sum]> {
    match sources {
        [source] => return E::widen(&source[strip.clone()], target),
        [left, right] => E::pair(&left[strip.clone()], &right[strip.clone()], combine, target),
        _ => {
            let (left, right) = sources.split_at(sources.len().next_power_of_two() / 2);
            // Of two sources or more.
            node(left, strip, combine, target, spare);
            let [second, rest @ ..] = spare else { unreachable!("every level has a buffer") };
            let right = node(right, strip, combine, second, rest).unwrap_or(&second[..strip.len()]);
            for (sum, right) in target.iter_mut().zip(right) {
                *sum = combine(*sum, *right);
            }
        }
    }
    None
}
