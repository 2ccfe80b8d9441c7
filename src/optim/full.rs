//! [`FullOptimizerState`]: an optimizer's state without a mesh.

use std::collections::BTreeMap;
use std::sync::Arc;

use burn::tensor::{Bytes, TensorData};
use burn_pack::{Reader, Scalar, Tensor, Writer};

use super::state::{StateTensor, field};
use super::{OptimError, OptimizerState};
use crate::dtensor::DTensorSpec;
use crate::{Error, Result};

/// An optimizer's state, whole and by name: what a checkpoint keeps, whatever the mesh.
///
/// [`OptimizerState::full`] makes it. The same on every rank.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct FullOptimizerState {
    /// Whole tensors by path and field, such as `blocks.0.weight.momentum.moment_1`.
    pub tensors: BTreeMap<String, TensorData>,
    /// Numbers, such as `blocks.0.weight.momentum.time`.
    pub scalars: BTreeMap<String, Scalar>,
}

impl OptimizerState {
    /// Every tensor whole, on every rank: what can be saved, and laid out on any mesh.
    ///
    /// # Collective
    /// Every rank of the parameters' meshes.
    ///
    /// # Errors
    /// [`Error::Comm`](crate::Error::Comm) if a collective fails.
    pub fn full(&self) -> Result<FullOptimizerState> {
        let tensors = self.tensors().map(|(name, tensor)| Ok((name, tensor.full_data()?))).collect::<Result<_>>()?;
        Ok(FullOptimizerState { tensors, scalars: self.scalars().collect() })
    }
}

impl FullOptimizerState {
    /// In burn's format of records, burnpack.
    ///
    /// # Errors
    /// [`Error::Other`] with burnpack's, such as for a name that is too long.
    pub fn into_bytes(self) -> Result<Bytes> {
        let tensors = self.tensors.into_iter().map(|(name, data)| {
            let (bytes, shape, dtype) = data.into_parts();
            Tensor::new(name, dtype, shape, None, bytes)
        });
        let writer = Writer::new(tensors.collect());
        let writer = self.scalars.iter().fold(writer, |writer, (name, scalar)| writer.with_scalar(name, *scalar));
        writer.into_bytes().map_err(Error::other)
    }

    /// What [`into_bytes`](Self::into_bytes) wrote.
    ///
    /// # Errors
    /// [`Error::Other`] with burnpack's, for bytes that are none of its files.
    pub fn from_bytes(bytes: Bytes) -> Result<Self> {
        let reader = Reader::from_bytes(bytes).map_err(Error::other)?;
        let scalars = reader.scalars().clone();
        let tensors = reader.into_tensors().map_err(Error::other)?.into_iter().map(|tensor| {
            let (name, dtype, shape, _, bytes) = tensor.into_parts().map_err(Error::other)?;
            Ok((name, TensorData::from_bytes(bytes, shape, dtype)))
        });
        Ok(Self { tensors: tensors.collect::<Result<_>>()?, scalars })
    }

    /// Lays the state out as parameters are: `specs` are theirs, by path. Local: each rank takes its part.
    ///
    /// A tensor of its parameter's shape gets the parameter's layout; others are whole on every rank.
    ///
    /// # Errors
    /// [`OptimError::NoParameter`] for a name that begins with no path of `specs`.
    pub fn distribute(&self, specs: impl IntoIterator<Item = (String, Arc<DTensorSpec>)>) -> Result<OptimizerState> {
        let specs: BTreeMap<_, _> = specs.into_iter().collect();
        // Of paths that begin alike the longest.
        let owner = |name: &str| {
            let owners = specs.iter().filter_map(|(path, spec)| Some((path, spec, field(name, path)?.to_owned())));
            owners.max_by_key(|(path, ..)| path.len()).ok_or_else(|| OptimError::no_parameter(name, specs.keys()))
        };
        let mut state = OptimizerState::default();
        for (name, data) in &self.tensors {
            let (path, spec, field) = owner(name)?;
            state.of(path, spec).tensors.insert(field, StateTensor::cut(data.clone(), spec)?);
        }
        for (name, scalar) in &self.scalars {
            let (path, spec, field) = owner(name)?;
            state.of(path, spec).scalars.insert(field, *scalar);
        }
        Ok(state)
    }
}
