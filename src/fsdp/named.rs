//! [`named_parameters`]: a model's sharded parameters as DTensors, by path.

use std::fmt;
use std::sync::Arc;

use burn::backend::{DispatchTensor, TensorMetadata};
use burn::module::{Module, ParamId};
use burn::tensor::Tensor;

use super::visit::{Visited, sharded_parameters_with_paths};
use crate::dtensor::{DTensor, DTensorSpec};

/// A sharded parameter of a model.
#[derive(Debug, Clone)]
pub struct NamedParameter {
    /// Full path in the model, such as `blocks.0.attention.query.weight`.
    pub path: String,
    /// burn's id, under which optimizers and gradients know it.
    pub id: ParamId,
    /// Path of the unit it is gathered with; `root` for the model's own.
    pub unit: Arc<str>,
    /// Mesh, placements, global shape and dtype.
    pub spec: Arc<DTensorSpec>,
    local: DispatchTensor,
}

impl NamedParameter {
    /// The parameter as a [`DTensor`]; `None` if it has not `D` dimensions.
    ///
    /// Local: no communication.
    pub fn dtensor<const D: usize>(&self) -> Option<DTensor<D>> {
        let local = (self.spec.shape().num_dims() == D).then(|| Tensor::from_dispatch(self.local.clone()))?;
        Some(DTensor::from_parts(local, self.spec.clone()))
    }
}

impl fmt::Display for NamedParameter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { path, unit, spec, local, .. } = self;
        let (shape, local) = (spec.shape().as_slice(), local.shape());
        write!(f, "{path}: {shape:?} as {}, local {:?}, unit {unit}", spec.layout(), local.as_slice())
    }
}

/// The sharded parameters of `model`, in burn's order, with their paths in it.
///
/// Local: no communication. Parameters that are ignored or not sharded are left out.
pub fn named_parameters<M: Module>(model: &M) -> Vec<NamedParameter> {
    let named = |Visited { id, sharded, base, path, .. }: Visited| NamedParameter {
        path: path.expect("paths were asked for"),
        id,
        unit: sharded.unit.label(),
        spec: sharded.spec(base.dtype()).expect("the shard was made from this spec").shared(),
        local: base,
    };
    sharded_parameters_with_paths(model).into_iter().map(named).collect()
}
