//! Reductions: reduce-scatter and all-reduce.

use std::ops::Range;

use burn::backend::DispatchTensor;
use burn::backend::flex::FlexTensor;
use burn::tensor::{DType, Shape};
use half::{bf16, f16};

use super::element::{Element, Number};
use super::{build, elements};
use crate::comm::ReduceOp;
use crate::comm::local::block::{Block, Ranges};

/// Elements reduced at a time, so that partial results stay in the first-level cache.
const STRIP: usize = 512;

/// Shorter runs are brought together before they are reduced.
const SHORT_RUN: usize = 64;

/// The block `ranges` of every source, reduced over the sources in a fixed binary tree.
///
/// All sources have one shape and dtype; there are at least two.
pub(crate) fn reduce(sources: &[&FlexTensor], ranges: &Ranges, op: ReduceOp) -> DispatchTensor {
    let shape = sources[0].layout().shape();
    let block = Block::new(&shape[..], ranges, 0);
    let cut = Shape::from(ranges.iter().map(|range| range.len()).collect::<Vec<_>>());
    by_dtype(sources, op, block, cut)
}

/// Elements `range` of every source, taken as flat, reduced the same way.
pub(crate) fn reduce_flat(sources: &[&FlexTensor], range: Range<usize>, op: ReduceOp) -> DispatchTensor {
    let cut = Shape::from([range.len()]);
    let count = sources[0].layout().num_elements();
    by_dtype(sources, op, Block::new(&[count], &[range], 0), cut)
}

fn by_dtype(sources: &[&FlexTensor], op: ReduceOp, block: Block, shape: Shape) -> DispatchTensor {
    let dtype = sources[0].dtype();
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

fn by_op<E: Element>(sources: &[&FlexTensor], op: ReduceOp, block: Block, shape: Shape, dtype: DType) -> DispatchTensor {
    let slices: Vec<&[E]> = sources.iter().map(|tensor| elements(tensor)).collect();
    let count = slices.len();
    let out = match op {
        ReduceOp::Sum => strips(&slices, &block, Number::plus, |sum| sum),
        ReduceOp::Avg => strips(&slices, &block, Number::plus, |sum: E::Sum| sum.over(count)),
        ReduceOp::Min => strips(&slices, &block, Number::least, |least| least),
        ReduceOp::Max => strips(&slices, &block, Number::greatest, |greatest| greatest),
        ReduceOp::Product => strips(&slices, &block, Number::times, |product| product),
    };
    build(out, shape, dtype)
}

/// Walks the block in strips that the tree reduces one by one.
fn strips<E: Element>(
    sources: &[&[E]],
    block: &Block,
    combine: impl Fn(E::Sum, E::Sum) -> E::Sum + Copy,
    finish: impl Fn(E::Sum) -> E::Sum + Copy,
) -> Vec<E> {
    let count = block.inner().len() * block.run;
    let mut out = Vec::with_capacity(count);
    let mut tree = Tree::new(combine, finish);
    if count == 0 {
        return out;
    }
    if block.run < SHORT_RUN {
        let together = |source: &&[E]| -> Vec<E> {
            block.inner().flat_map(|offset| &source[offset..offset + block.run]).copied().collect()
        };
        let together: Vec<Vec<E>> = sources.iter().map(together).collect();
        let sources: Vec<&[E]> = together.iter().map(Vec::as_slice).collect();
        tree.reduce(&sources, 0..count, &mut out);
        return out;
    }
    for offset in block.inner() {
        tree.reduce(sources, offset..offset + block.run, &mut out);
    }
    out
}

/// The reduction of one strip over all ranks: neighbours first, then neighbouring pairs.
///
/// ```text
/// 0   1   2   3   4        partial results on the stack:
///  \ /     \ /    |        (01)  ->  (01) (23)  ->  (0123)  ->  (0123) 4
///   +---+---+     |
///       +----+----+
/// ```
///
/// On four ranks this is what two groups of two followed by a pair compute, to the bit.
struct Tree<S, C, F> {
    combine: C,
    finish: F,
    /// Partial results, and how many ranks each covers; the counts fall strictly.
    stack: Vec<(usize, Box<[S]>)>,
    spare: Vec<Box<[S]>>,
}

impl<S: Number, C: Fn(S, S) -> S + Copy, F: Fn(S) -> S + Copy> Tree<S, C, F> {
    fn new(combine: C, finish: F) -> Self {
        Self { combine, finish, stack: Vec::new(), spare: Vec::new() }
    }

    fn reduce<E: Element<Sum = S>>(&mut self, sources: &[&[E]], range: Range<usize>, out: &mut Vec<E>) {
        for start in range.clone().step_by(STRIP) {
            let strip = start..(start + STRIP).min(range.end);
            self.strip(sources, strip, out);
        }
    }

    fn strip<E: Element<Sum = S>>(&mut self, sources: &[&[E]], strip: Range<usize>, out: &mut Vec<E>) {
        let len = strip.len();
        for pair in sources.chunks(2) {
            let mut sum = self.buffer();
            let mut scratch = self.buffer();
            match pair {
                [a, b] => {
                    let mut second = self.buffer();
                    let a = E::widen(&a[strip.clone()], &mut scratch);
                    let b = E::widen(&b[strip.clone()], &mut second);
                    for ((sum, a), b) in sum[..len].iter_mut().zip(a).zip(b) {
                        *sum = (self.combine)(*a, *b);
                    }
                    self.spare.push(second);
                }
                single => {
                    sum[..len].copy_from_slice(E::widen(&single[0][strip.clone()], &mut scratch));
                }
            }
            self.spare.push(scratch);
            self.stack.push((pair.len(), sum));
            self.merge(len, |below, top| below == top);
        }
        self.merge(len, |_, _| true);
        let (_, mut result) = self.stack.pop().expect("there is at least one source");
        for value in &mut result[..len] {
            *value = (self.finish)(*value);
        }
        E::append(&result[..len], out);
        self.spare.push(result);
    }

    /// Combines the two topmost partial results while `wanted` says so of their counts.
    fn merge(&mut self, len: usize, wanted: impl Fn(usize, usize) -> bool) {
        while let [.., (below, left), (top, right)] = &mut self.stack[..]
            && wanted(*below, *top)
        {
            for (left, right) in left[..len].iter_mut().zip(&right[..len]) {
                *left = (self.combine)(*left, *right);
            }
            *below += *top;
            let (_, right) = self.stack.pop().expect("two are there");
            self.spare.push(right);
        }
    }

    fn buffer(&mut self) -> Box<[S]> {
        self.spare.pop().unwrap_or_else(|| vec![S::default(); STRIP].into())
    }
}
