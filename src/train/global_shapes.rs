//! [`with_global_shapes`]: a model for burn's summary.

use std::collections::HashMap;

use burn::backend::TensorMetadata;
use burn::module::{Module, ModuleMapper, Param, ParamId};
use burn::tensor::{Shape, Tensor};

use crate::param::walk;

/// Returns the model with every distributed parameter replaced by a tensor of zeros of its global
/// shape. The tensors are expanded from one element, so they take no memory. burn's `Display` of
/// the result prints global sizes.
///
/// Local: no communication.
pub(super) fn with_global_shapes<M: Module>(model: &M) -> M {
    let mut mapper = GlobalShapes(
        walk(model)
            .distributed
            .into_iter()
            .map(|visited| {
                (
                    visited.id,
                    visited.param.spec(visited.base.dtype()).shape().clone(),
                )
            })
            .collect(),
    );
    model.clone().map(&mut mapper)
}

struct GlobalShapes(HashMap<ParamId, Shape>);

impl ModuleMapper for GlobalShapes {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Some(shape) = self.0.get(&param.id) else {
            return param;
        };
        let base = param.base();
        let zero = Tensor::<D>::zeros([1; D], (&base.device(), base.dtype()));
        Param::initialized(param.id, zero.expand(shape.dims::<D>()))
    }
}
