//! Collectives that move elements: all-gather, all-to-all, broadcast and scatter.

use burn::backend::DispatchTensor;
use burn::backend::flex::FlexTensor;
use burn::tensor::DType;
use itertools::Itertools;

use super::wrap;
use crate::comm::Plan;
use crate::comm::engine::ranges::Ranges;
use crate::kernels::flex::{Kept, Sources, run};
use crate::kernels::{Convert, Copies, FlatLayout};

/// Where an all-gather's elements go: one copy for all tensors of a dtype. Kept with its [`Plan`].
#[derive(Debug)]
pub(in crate::comm::local) struct Joints(Box<[Joint]>);

/// The part of an all-gather that is about the tensors of one dtype.
#[derive(Debug)]
struct Joint {
    dtype: DType,
    /// Which tensors these are.
    indices: Box<[usize]>,
    copies: Copies,
}

impl Joints {
    /// Of what is planned, over `ranks` ranks: in one order, whoever makes it.
    pub fn new(plan: &Plan, ranks: usize) -> Self {
        let joint = |dtype: DType| {
            let tensors = plan.cut_tensors().enumerate().filter(|(_, (of, _))| *of == dtype);
            let (indices, tensors): (Vec<_>, _) = tensors.map(|(index, (_, tensor))| (index, tensor)).unzip();
            Joint { dtype, indices: indices.into(), copies: FlatLayout::new(ranks, tensors, 1).join_parts() }
        };
        Self(plan.dtypes().unique().map(joint).collect())
    }

    /// Where the parts are that are joined: `parts` by rank and tensor.
    pub fn sources(&self, parts: &[Vec<&FlexTensor>]) -> Gathered {
        let of_joint = |joint: &Joint| {
            let of_dtype = parts.iter().flat_map(|parts| joint.indices.iter().map(|index| parts[*index]));
            Kept::of(&of_dtype.collect_vec())
        };
        Gathered(self.0.iter().map(of_joint).collect())
    }

    /// The wholes.
    pub fn wholes(&self, Gathered(parts): &Gathered) -> Vec<DispatchTensor> {
        let mut wholes = Vec::with_capacity(self.0.iter().map(|joint| joint.indices.len()).sum());
        for (Joint { dtype, indices, copies }, parts) in self.0.iter().zip(parts) {
            wholes.extend(indices.iter().zip(run(copies, &parts.get(), Convert::to(*dtype))));
        }
        wholes.sort_unstable_by_key(|(index, _)| **index);
        wholes.into_iter().map(|(_, whole)| wrap(whole)).collect()
    }
}

/// The parts of all ranks: for each of the [`Joints`].
#[derive(Debug)]
pub(in crate::comm::local) struct Gathered(Box<[Kept]>);

/// The blocks of `sources` one after another along `dim`.
///
/// All sources have one dtype, and one shape but for `dim`; there is at least one.
pub(crate) fn concat(sources: &[(&FlexTensor, Ranges)], dim: usize) -> DispatchTensor {
    let blocks = sources.iter().map(|(tensor, ranges)| (tensor.layout().shape().clone(), &ranges[..])).collect_vec();
    let tensors = Sources::of(sources.iter().map(|(tensor, _)| *tensor));
    let mut copy = run(&Copies::concat(&blocks, dim), &tensors, Convert::to(sources[0].0.dtype()));
    wrap(copy.pop().expect("one target"))
}
