//! [`StoredOptimizer`]: what a checkpoint says about an optimizer's state, next to its tensors.

use std::collections::{BTreeMap, BTreeSet};

use burn::tensor::DType;
use burn_pack::Scalar;
use serde::{Deserialize, Serialize};

use super::matching::SavedTensor;
use crate::optim::OptimizerState;

/// The parameters of the model by path, with and without state. Each tensor of the state is stored
/// under the parameter's path and its field, below the key of the optimizer.
#[derive(Debug, Serialize, Deserialize)]
#[serde(transparent)]
pub(super) struct StoredOptimizer {
    pub params: BTreeMap<String, StoredParameter>,
}

/// A parameter and its state.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct StoredParameter {
    /// Global shape of the parameter.
    pub shape: Vec<usize>,
    /// Dtype of the parameter.
    pub dtype: DType,
    /// Fields of the state that are tensors.
    pub tensors: BTreeSet<String>,
    /// Fields of the state that are numbers.
    pub scalars: BTreeMap<String, StoredScalar>,
    /// True if the optimizer has stepped the parameter. Its state may have no fields.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub stepped: bool,
}

impl StoredOptimizer {
    pub fn of(state: &OptimizerState) -> Self {
        let params = state.parameters().map(|(path, spec, state)| {
            let stepped = state.is_some();
            let (tensors, scalars) = state.map(|state| (&state.tensors, &state.scalars)).unzip();
            let stored = StoredParameter {
                shape: spec.shape().to_vec(),
                dtype: spec.dtype(),
                tensors: tensors
                    .into_iter()
                    .flat_map(|tensors| tensors.keys().cloned())
                    .collect(),
                scalars: scalars
                    .into_iter()
                    .flatten()
                    .map(|(field, scalar)| (field.clone(), (*scalar).into()))
                    .collect(),
                stepped,
            };
            (path.to_owned(), stored)
        });
        Self {
            params: params.collect(),
        }
    }
}

impl StoredParameter {
    /// Returns true if the optimizer has state for the parameter.
    pub fn has_state(&self) -> bool {
        self.stepped || !self.tensors.is_empty() || !self.scalars.is_empty()
    }

    /// Returns what a parameter of a model must equal to get the state.
    pub fn saved(&self) -> SavedTensor {
        SavedTensor {
            shape: self.shape.clone().into(),
            dtype: Ok(self.dtype),
        }
    }
}

/// A number of an optimizer, as it is stored.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(super) enum StoredScalar {
    Int(i64),
    UInt(u64),
    Float(f64),
    Bool(bool),
}

impl From<Scalar> for StoredScalar {
    fn from(scalar: Scalar) -> Self {
        match scalar {
            Scalar::Int(value) => Self::Int(value),
            Scalar::UInt(value) => Self::UInt(value),
            Scalar::Float(value) => Self::Float(value),
            Scalar::Bool(value) => Self::Bool(value),
        }
    }
}

impl From<StoredScalar> for Scalar {
    fn from(stored: StoredScalar) -> Self {
        match stored {
            StoredScalar::Int(value) => Self::Int(value),
            StoredScalar::UInt(value) => Self::UInt(value),
            StoredScalar::Float(value) => Self::Float(value),
            StoredScalar::Bool(value) => Self::Bool(value),
        }
    }
}
