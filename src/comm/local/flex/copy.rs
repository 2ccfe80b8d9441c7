//! Collectives that move elements: all-gather, all-to-all, broadcast and scatter.

use burn::backend::DispatchTensor;
use burn::backend::flex::FlexTensor;
use burn::tensor::DType;
use itertools::Itertools;

use super::wrap;
use crate::comm::engine::ranges::Ranges;
use crate::kernels::flex::{Kept, Sources, run};
use crate::kernels::{Convert, Copies, CutTensor, FlatLayout};
use crate::placement::Cut;

/// An all-gather, which every rank can carry out: one copy for all tensors of a dtype.
#[derive(Debug)]
pub(in crate::comm::local) struct Gather(Vec<Joint>);

/// The part of an all-gather that is about the tensors of one dtype.
#[derive(Debug)]
struct Joint {
    dtype: DType,
    /// Which tensors these are.
    indices: Vec<usize>,
    copies: Copies,
    parts: Kept,
}

impl Gather {
    /// Of tensors whose parts are `parts`, by rank and tensor.
    pub fn new(parts: &[Vec<&FlexTensor>], cuts: &[(usize, Cut)]) -> Self {
        let dtypes = || parts[0].iter().map(|part| part.dtype());
        Self(
            dtypes()
                .unique()
                .map(|dtype| Joint::new(dtype, dtypes().positions(|of| of == dtype), parts, cuts))
                .collect(),
        )
    }

    /// The wholes.
    pub fn wholes(&self) -> Vec<DispatchTensor> {
        let wholes = self.0.iter().flat_map(|Joint { dtype, indices, copies, parts }| {
            indices.iter().zip(run(copies, parts.get(), Convert::to(*dtype)))
        });
        wholes.sorted_by_key(|(index, _)| **index).map(|(_, whole)| wrap(whole)).collect()
    }
}

impl Joint {
    fn new(
        dtype: DType,
        indices: impl Iterator<Item = usize>,
        parts: &[Vec<&FlexTensor>],
        cuts: &[(usize, Cut)],
    ) -> Self {
        let indices = indices.collect_vec();
        let whole = |index: &usize| {
            let (dim, cut) = &cuts[*index];
            let mut shape = parts[0][*index].layout().shape().clone();
            shape[*dim] = cut.total();
            CutTensor { shape, dim: *dim, cut: cut.clone() }
        };
        let tensors = indices.iter().map(whole).collect();
        let of_dtype = parts.iter().flat_map(|parts| indices.iter().map(|index| parts[*index])).collect_vec();
        let copies = FlatLayout::new(parts.len(), tensors, 1).join_parts();
        Self { dtype, indices, copies, parts: Kept::of(&of_dtype) }
    }
}

/// The blocks of `sources` one after another along `dim`.
///
/// All sources have one dtype, and one shape but for `dim`; there is at least one.
pub(crate) fn concat(sources: &[(&FlexTensor, Ranges)], dim: usize) -> DispatchTensor {
    let blocks = sources.iter().map(|(tensor, ranges)| (tensor.layout().shape().clone(), &ranges[..])).collect_vec();
    let tensors = Sources::of(sources.iter().map(|(tensor, _)| *tensor));
    let mut copy = run(&Copies::concat(&blocks, dim), &tensors, Convert::to(sources[0].0.dtype()));
    wrap(copy.pop().expect("one target"))
}
