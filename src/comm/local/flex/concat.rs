//! Concatenation of blocks: all-gather, all-to-all, broadcast and scatter.

use burn::backend::DispatchTensor;
use burn::backend::flex::{FlexTensor, Layout};
use burn::tensor::{DType, Shape};
use bytemuck::Pod;
use smallvec::SmallVec;

use super::block::{Block, Offsets};
use super::{build, elements, primitive, wrap};
use crate::comm::local::ranges::{Ranges, full};

/// The blocks of `sources` one after another along `dim`, in one pass over memory.
///
/// ```text
/// sources      r0: a a a    r1: b b        dim 1:  a a a b b
///                  a a a        b b                a a a b b
/// ```
///
/// All sources have one dtype, and one shape but for `dim`; there is at least one.
pub(crate) fn concat(sources: &[(&FlexTensor, Ranges)], dim: usize) -> DispatchTensor {
    let (first, ranges) = &sources[0];
    let mut shape: Vec<usize> = ranges.iter().map(|range| range.len()).collect();
    shape[dim] = sources.iter().map(|(_, ranges)| ranges[dim].len()).sum();
    let dtype = first.dtype();
    match dtype.size() {
        1 => copy::<u8>(sources, dim, shape, dtype),
        2 => copy::<u16>(sources, dim, shape, dtype),
        4 => copy::<u32>(sources, dim, shape, dtype),
        8 => copy::<u64>(sources, dim, shape, dtype),
        size => unreachable!("Flex has no dtype of {size} bytes"),
    }
}

/// Elements are moved by size alone. The vector grows into its capacity and is never zeroed first.
fn copy<E: Pod + Send + Sync>(
    sources: &[(&FlexTensor, Ranges)],
    dim: usize,
    shape: Vec<usize>,
    dtype: DType,
) -> DispatchTensor {
    let mut out: Vec<E> = Vec::with_capacity(shape.iter().product());
    let blocks: Vec<_> =
        sources.iter().map(|(tensor, ranges)| Block::new(&tensor.layout().shape()[..], ranges, dim)).collect();
    let sources: Vec<&[E]> = sources.iter().map(|(tensor, _)| elements(tensor)).collect();
    let mut walks: Vec<Walk<E>> = blocks.iter().zip(sources).map(|(block, source)| Walk::new(block, source)).collect();
    for _ in 0..shape[..dim].iter().product() {
        walks.iter_mut().for_each(|walk| walk.step(&mut out));
    }
    build(out, Shape::from(shape), dtype)
}

/// One source's share of the result, one outer index at a time.
struct Walk<'a, E> {
    source: &'a [E],
    bases: Offsets,
    /// Usually one: a source costs no allocation then.
    offsets: SmallVec<[usize; 4]>,
    run: usize,
}

impl<'a, E: Pod> Walk<'a, E> {
    fn new(block: &Block, source: &'a [E]) -> Self {
        // An empty block still has outer indices where other sources have elements.
        let offsets = if block.run == 0 { SmallVec::new() } else { block.inner().collect() };
        Self { source, bases: block.outer(), offsets, run: block.run }
    }

    #[inline]
    fn step(&mut self, out: &mut Vec<E>) {
        let base = self.bases.next().expect("sources agree before `dim`");
        for offset in &self.offsets {
            out.extend_from_slice(&self.source[base + offset..][..self.run]);
        }
    }
}

/// The elements of `slices` one after another, as a tensor of `shape`.
pub(crate) fn join(slices: &[&FlexTensor], shape: Shape) -> DispatchTensor {
    let flat: Vec<_> = slices.iter().map(|slice| (*slice, full(&slice.layout().shape()[..]))).collect();
    let joined = concat(&flat, 0);
    let (tensor, dtype) = (primitive(&joined).expect("made here"), slices[0].dtype());
    wrap(FlexTensor::from_arc(tensor.data_arc(), Layout::contiguous(shape), dtype))
}
