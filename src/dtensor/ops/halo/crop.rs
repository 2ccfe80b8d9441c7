//! [`crop`]: reduces a local result to this rank's shard, as one node of the graph on every rank.

use std::ops::Range;
use std::sync::Arc;

use burn::backend::{DispatchTensor, TensorMetadata};
use burn::tensor::{Shape, Slice, Tensor};

use crate::autodiff::{self, BackwardStep, GraphOp};
use crate::dtensor::local::{associate, is_tracked, slice, zeros};

/// Returns the block `ranges` of `local`, with a range for each dimension. The node is recorded
/// even if the block is all of `local`, so that all ranks record the same, and if it is empty,
/// because burn would compute that outside the graph.
pub(super) fn crop<const D: usize>(local: Tensor<D>, ranges: [Range<usize>; D]) -> Tensor<D> {
    if !is_tracked(&local) {
        let strategy = local.gradient_checkpointing_strategy();
        return associate(slice(local.inner(), &ranges), strategy);
    }
    let op = Crop {
        full: local.shape(),
        ranges,
    };
    Tensor::from_dispatch(autodiff::unary(local.into_dispatch(), Arc::new(op)))
}

#[derive(Debug)]
struct Crop<const D: usize> {
    full: Shape,
    ranges: [Range<usize>; D],
}

impl<const D: usize> GraphOp for Crop<D> {
    fn forward(&self, parents: &[DispatchTensor]) -> DispatchTensor {
        let [full] = parents else {
            unreachable!("a crop has one parent")
        };
        debug_assert_eq!(full.shape(), self.full);
        slice(Tensor::<D>::from_dispatch(full.clone()), &self.ranges).into_dispatch()
    }

    fn backward(&self, step: &mut BackwardStep<'_>) {
        let grad = Tensor::<D>::from_dispatch(step.take());
        let slices: Vec<Slice> = self.ranges.iter().cloned().map(Slice::from).collect();
        step.give(0, || {
            let zeros: Tensor<D> = zeros(self.full.clone(), &grad);
            zeros.slice_assign(slices.as_slice(), grad).into_dispatch()
        });
    }
}
