//! Collectives that move elements: all-gather, all-to-all, broadcast and scatter.

use burn::backend::DispatchTensor;
use burn::backend::flex::{FlexTensor, Layout};
use burn::tensor::{DType, Shape};
use itertools::Itertools;

use super::{primitive, wrap};
use crate::comm::engine::ranges::{Ranges, full};
use crate::kernels::flex::run;
use crate::kernels::{Convert, Copies, CutTensor, FlatLayout};
use crate::placement::Cut;

/// The wholes of tensors whose parts are `parts`, by rank and tensor: one copy for all of a dtype.
pub(crate) fn gather(parts: &[Vec<&FlexTensor>], cuts: &[(usize, Cut)]) -> Vec<DispatchTensor> {
    let dtypes = || parts[0].iter().map(|part| part.dtype());
    match dtypes().all_equal_value() {
        Ok(dtype) => join_parts(parts, cuts, dtype).map(wrap).collect(),
        Err(_) => {
            let of = |dtype| dtypes().positions(move |other| other == dtype);
            let joined = dtypes().unique().flat_map(|dtype| {
                let parts = parts.iter().map(|parts| of(dtype).map(|index| parts[index]).collect()).collect_vec();
                let cuts = of(dtype).map(|index| cuts[index].clone()).collect_vec();
                of(dtype).zip(join_parts(&parts, &cuts, dtype).collect_vec())
            });
            joined.sorted_by_key(|(index, _)| *index).map(|(_, whole)| wrap(whole)).collect()
        }
    }
}

/// The same of tensors of `dtype`.
fn join_parts(
    parts: &[Vec<&FlexTensor>],
    cuts: &[(usize, Cut)],
    dtype: DType,
) -> impl Iterator<Item = FlexTensor> + use<> {
    let whole = |(part, (dim, cut)): (&&FlexTensor, &(usize, Cut))| {
        let mut shape = part.layout().shape().clone();
        shape[*dim] = cut.total();
        CutTensor { shape, dim: *dim, cut: cut.clone() }
    };
    let tensors = parts[0].iter().zip(cuts).map(whole).collect();
    let copies = FlatLayout::new(parts.len(), tensors, 1).join_parts();
    run(&copies, &parts.concat(), Convert::to(dtype)).into_iter()
}

/// The blocks of `sources` one after another along `dim`.
///
/// All sources have one dtype, and one shape but for `dim`; there is at least one.
pub(crate) fn concat(sources: &[(&FlexTensor, Ranges)], dim: usize) -> DispatchTensor {
    let blocks = sources.iter().map(|(tensor, ranges)| (tensor.layout().shape().clone(), &ranges[..])).collect_vec();
    let tensors = sources.iter().map(|(tensor, _)| *tensor).collect_vec();
    let mut copy = run(&Copies::concat(&blocks, dim), &tensors, Convert::to(tensors[0].dtype()));
    wrap(copy.pop().expect("one target"))
}

/// The elements of `slices` one after another, as a tensor of `shape`.
pub(crate) fn join(slices: &[&FlexTensor], shape: Shape) -> DispatchTensor {
    let flat: Vec<_> = slices.iter().map(|slice| (*slice, full(&slice.layout().shape()[..]))).collect();
    let joined = concat(&flat, 0);
    let (tensor, dtype) = (primitive(&joined).expect("made here"), slices[0].dtype());
    wrap(FlexTensor::from_arc(tensor.data_arc(), Layout::contiguous(shape), dtype))
}
