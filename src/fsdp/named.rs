//! [`named_parameters`]: a model's distributed parameters as DTensors, by path.

use std::fmt;
use std::sync::Arc;

use burn::backend::{DispatchTensor, TensorMetadata};
use burn::module::{Module, ParamId};
use burn::tensor::Tensor;

use crate::Result;
use crate::dtensor::{DTensor, DTensorSpec};
use crate::param::{Visited, check_not_replaced, walk_with_paths};

/// A distributed parameter of a model.
#[derive(Debug, Clone)]
pub struct NamedParameter {
    /// Full path in the model, such as `blocks.0.attention.query.weight`.
    pub path: String,
    /// burn's id of the parameter, by which optimizers and gradients refer to it.
    pub id: ParamId,
    /// Label of the unit with which it is gathered: a path, or `root` for the root unit.
    pub unit: Arc<str>,
    /// Mesh, placements, global shape and dtype, over all data-parallel and tensor-parallel mesh
    /// dimensions that place it.
    pub spec: Arc<DTensorSpec>,
    local: DispatchTensor,
}

impl NamedParameter {
    /// Returns the shard that the optimizer steps, as a [`DTensor`], like
    /// [`ParamExt::shard`](super::ParamExt::shard). Returns `None` if the parameter does not have
    /// `D` dimensions.
    ///
    /// Local: no communication.
    pub fn shard<const D: usize>(&self) -> Option<DTensor<D>> {
        let local = (self.spec.shape().num_dims() == D)
            .then(|| Tensor::from_dispatch(self.local.clone()))?;
        Some(DTensor::from_parts(local, self.spec.clone()))
    }
}

impl fmt::Display for NamedParameter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            path,
            unit,
            spec,
            local,
            ..
        } = self;
        let (shape, local) = (spec.shape().as_slice(), local.shape());
        write!(
            f,
            "{path}: {shape:?} as {}, local {:?}, unit {unit}",
            spec.layout(),
            local.as_slice()
        )
    }
}

/// Returns the distributed parameters of `model`, in burn's order, with their paths in it.
///
/// Local: no communication. Parameters that are neither sharded nor parallelized are not included.
///
/// # Errors
/// [`ParamError::Replaced`](crate::param::ParamError::Replaced) if a parameter was replaced after
/// it was distributed.
pub fn named_parameters<M: Module>(model: &M) -> Result<Vec<NamedParameter>> {
    let walk = walk_with_paths(model);
    check_not_replaced(model, &walk)?;
    let named = |Visited {
                     id,
                     param,
                     base,
                     path,
                     ..
                 }: Visited| NamedParameter {
        path: path.expect("the walk records paths"),
        id,
        unit: param.unit.label(),
        spec: param.spec(base.dtype()),
        local: base,
    };
    Ok(walk.distributed.into_iter().map(named).collect())
}
