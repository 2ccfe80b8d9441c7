//! [`FullOptimizerState`]: optimizer state independent of a mesh.

use std::collections::BTreeMap;
use std::sync::Arc;

use burn::tensor::{Bytes, TensorData};
use burn_pack::{Reader, Scalar, Tensor, Writer};

use super::OptimizerState;
use crate::dtensor::{DTensorSpec, DynDTensor};
use crate::{Error, Result};

/// Optimizer state with full tensors, by name. Save it in a checkpoint and load it on any mesh.
///
/// [`OptimizerState::full`] returns it, identical on every rank.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct FullOptimizerState {
    /// Full tensors by path and field, such as `blocks.0.weight.momentum.moment_1`.
    pub tensors: BTreeMap<String, TensorData>,
    /// Numbers by path and field, such as `blocks.0.weight.momentum.time`.
    pub scalars: BTreeMap<String, Scalar>,
}

impl OptimizerState {
    /// Gathers every tensor on every rank. The result can be saved, and distributed on any mesh.
    ///
    /// # Collective
    /// Every rank of the parameters' meshes must call it.
    ///
    /// # Errors
    /// [`Error::Comm`](crate::Error::Comm) if a collective fails.
    pub fn full(&self) -> Result<FullOptimizerState> {
        let tensors = self
            .tensors()
            .map(|(name, tensor)| Ok((name, tensor.full_data()?)))
            .collect::<Result<_>>()?;
        Ok(FullOptimizerState {
            tensors,
            scalars: self.scalars().collect(),
        })
    }
}

impl FullOptimizerState {
    /// Serializes the state in burnpack, burn's record format. Local.
    ///
    /// # Errors
    /// [`Error::Other`] with burnpack's error, for example for a name that is too long.
    pub fn into_bytes(self) -> Result<Bytes> {
        let tensors = self.tensors.into_iter().map(|(name, data)| {
            let (bytes, shape, dtype) = data.into_parts();
            Tensor::new(name, dtype, shape, None, bytes)
        });
        let writer = Writer::new(tensors.collect());
        let writer = self.scalars.iter().fold(writer, |writer, (name, scalar)| {
            writer.with_scalar(name, *scalar)
        });
        writer.into_bytes().map_err(Error::other)
    }

    /// Reads the bytes that [`into_bytes`](Self::into_bytes) returned. Local.
    ///
    /// # Errors
    /// [`Error::Other`] with burnpack's error, if the bytes are not a burnpack file.
    pub fn from_bytes(bytes: Bytes) -> Result<Self> {
        let reader = Reader::from_bytes(bytes).map_err(Error::other)?;
        let scalars = reader.scalars().clone();
        let tensors = reader
            .into_tensors()
            .map_err(Error::other)?
            .into_iter()
            .map(|tensor| {
                let (name, dtype, shape, _, bytes) = tensor.into_parts().map_err(Error::other)?;
                Ok((name, TensorData::from_bytes(bytes, shape, dtype)))
            });
        Ok(Self {
            tensors: tensors.collect::<Result<_>>()?,
            scalars,
        })
    }

    /// Distributes the state like the parameters. `specs` are the parameters' specs by path. Local:
    /// each rank takes its shards.
    ///
    /// A tensor with the shape of its parameter gets the parameter's layout. Other tensors are
    /// replicated.
    ///
    /// # Errors
    /// [`OptimError::NoParameter`](super::OptimError::NoParameter) for a name that does not begin
    /// with a path of `specs`.
    pub fn distribute(
        &self,
        specs: impl IntoIterator<Item = (String, Arc<DTensorSpec>)>,
    ) -> Result<OptimizerState> {
        let specs: BTreeMap<_, _> = specs.into_iter().collect();
        let described = self
            .tensors
            .iter()
            .map(|(name, data)| (name.as_str(), data.shape(), data.dtype()));
        let targets = OptimizerState::targets(&specs, described)?;
        let tensors = self.tensors.iter().map(|(name, data)| {
            let target = &targets[name];
            let tensor =
                DynDTensor::from_full_data(data.clone(), target.mesh(), target.layout().clone())?;
            Ok((name.clone(), tensor))
        });
        let tensors: Vec<_> = tensors.collect::<Result<_>>()?;
        Ok(OptimizerState::from_parts(
            &specs,
            [],
            tensors,
            self.scalars.clone(),
        )?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::{Launch, launch};
    use crate::mesh::DeviceMesh;
    use crate::optim::state::LOOKUPS;
    use crate::placement::{Layout, Placement};

    /// Counts the comparisons of a name with a path, for a state of `params` parameters: first
    /// those of distributing the state, then those of reading each tensor and number by its name.
    fn lookups(params: usize) -> [usize; 2] {
        let counted = launch(Launch::threads(1), |world| {
            let mesh = DeviceMesh::new(world, [1], ["shard"])?;
            let data = TensorData::from([1.0f32]);
            let layout = Layout::new(mesh.shape(), &[Placement::Shard(0)])?;
            let spec =
                DTensorSpec::new(&mesh, layout, data.shape().clone(), data.dtype())?.shared();
            let paths: Vec<_> = (0..params)
                .map(|at| format!("blocks.{at}.weight"))
                .collect();
            let field = |path: &String, field: &str| format!("{path}.momentum.{field}");
            let tensors = paths
                .iter()
                .map(|path| (field(path, "moment_1"), data.clone()))
                .collect();
            let scalars = paths
                .iter()
                .map(|path| (field(path, "time"), Scalar::from(3usize)))
                .collect();
            let full = FullOptimizerState { tensors, scalars };
            let since = |before| LOOKUPS.get() - before;
            let before = LOOKUPS.get();
            let state = full.distribute(paths.iter().map(|path| (path.clone(), spec.clone())))?;
            let distributed = since(before);
            let before = LOOKUPS.get();
            for path in &paths {
                assert!(state.tensor::<1>(&field(path, "moment_1")).is_some());
                assert_eq!(
                    state.scalar(&field(path, "time")),
                    Some(Scalar::from(3usize))
                );
            }
            let read = since(before);
            assert_eq!(state.full()?, full);
            Ok([distributed, read])
        });
        counted.unwrap_or_else(|error| panic!("{error}"))[0].1
    }

    #[test]
    fn lookups_grow_with_the_number_of_parameters_and_not_with_its_square() {
        let [few, many] = [25, 100].map(lookups);
        assert!(
            few.iter().all(|&few| few >= 2 * 25),
            "every name is looked up: {few:?}"
        );
        assert_eq!(many, few.map(|few| 4 * few));
    }
}
