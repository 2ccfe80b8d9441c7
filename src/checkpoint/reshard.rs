//! [`Checkpoint::reshard`]: saves a checkpoint once more, by other ranks.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::Path;
use std::sync::Arc;

use super::assign::shard_region;
use super::reader::Want;
use super::tensor_files::readable;
use super::{Checkpoint, CheckpointError, SaveReport, State, save};
use crate::Result;
use crate::comm::agree_on_success;
use crate::dtensor::{DTensorSpec, DynDTensor};
use crate::placement::{Layout, Placement};

/// Options of [`Checkpoint::reshard`]. By default everything is kept, and tensors are divided in
/// their first dimension.
#[derive(Clone)]
pub struct ReshardOptions {
    keep: Arc<KeepFn>,
    shard_dim: Arc<ShardDimFn>,
}

type KeepFn = dyn Fn(&str) -> bool + Send + Sync;
type ShardDimFn = dyn Fn(&str, &[usize]) -> usize + Send + Sync;

impl Default for ReshardOptions {
    fn default() -> Self {
        Self {
            keep: Arc::new(|_| true),
            shard_dim: Arc::new(|_, _| 0),
        }
    }
}

impl ReshardOptions {
    /// Creates the default options.
    pub fn new() -> Self {
        Self::default()
    }

    /// Keeps only tensors and values for whose key `keep` returns true.
    #[must_use]
    pub fn with_keep(self, keep: impl Fn(&str) -> bool + Send + Sync + 'static) -> Self {
        Self {
            keep: Arc::new(keep),
            ..self
        }
    }

    /// Divides each tensor in the dimension that `dim` returns for its key and global shape. If
    /// that is the one in which the model will be sharded, each rank of a load reads consecutive
    /// bytes.
    #[must_use]
    pub fn with_shard_dim(
        self,
        dim: impl Fn(&str, &[usize]) -> usize + Send + Sync + 'static,
    ) -> Self {
        Self {
            shard_dim: Arc::new(dim),
            ..self
        }
    }
}

impl fmt::Debug for ReshardOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReshardOptions").finish_non_exhaustive()
    }
}

impl Checkpoint {
    /// Saves this checkpoint, as far as `options` keep it, into the folder `path`, divided evenly
    /// among the ranks of the mesh, which takes no model. Together they hold all tensors in memory.
    /// A load reads what it needs from any checkpoint; a copy has as many files as there are ranks
    /// now, may leave out the optimizer, and may be divided as the ranks of later loads read it.
    ///
    /// ```
    /// # use burn::nn::LinearConfig;
    /// # use burn_dtensor::prelude::*;
    /// use burn_dtensor::checkpoint::{self, Checkpoint, ReshardOptions, State, inspect};
    ///
    /// # let folder = std::env::temp_dir().join(format!("checkpoint-reshard-{}", std::process::id()));
    /// # let (four, two) = (folder.join("four"), folder.join("two"));
    /// launch(Launch::threads(4), |world| {
    ///     let mesh = DeviceMesh::new(world, [4], ["shard"])?;
    ///     let model = fully_shard(LinearConfig::new(64, 32).init(world.device()), &mesh, FullyShard::new())?;
    ///     checkpoint::save(&four, &State::new(&mesh).with_model("model", &model)?)?;
    ///     Ok(())
    /// })?;
    /// launch(Launch::threads(2), |world| {
    ///     let mesh = DeviceMesh::new(world, [2], ["shard"])?;
    ///     Checkpoint::open(&four, &mesh)?.reshard(&two, &ReshardOptions::new())?;
    ///     Ok(())
    /// })?;
    /// assert_eq!([inspect(&four)?, inspect(&two)?].map(|summary| summary.files.len()), [4, 2]);
    /// # std::fs::remove_dir_all(folder)?;
    /// # Ok::<_, burn_dtensor::Error>(())
    /// ```
    ///
    /// # Collective
    /// Every rank of the mesh.
    ///
    /// # Errors
    /// On all ranks: [`CheckpointError::RankValues`] if ranks have values of their own and their
    /// number is another; [`CheckpointError::NoDim`] for a dimension that a tensor does not have;
    /// [`CheckpointError::StoredDType`] and [`CheckpointError::Dims`] for tensors that burn does
    /// not have; those of [`save`] and of [`load_model`](Self::load_model).
    pub fn reshard(&self, path: impl AsRef<Path>, options: &ReshardOptions) -> Result<SaveReport> {
        let state = agree_on_success(
            &self.files.mesh.all()?,
            "checkpoint_reshard",
            self.even_state(options),
            CheckpointError::of,
        )?;
        save(path, &state)
    }

    /// Reads an even share of all tensors.
    fn even_state(&self, options: &ReshardOptions) -> Result<State> {
        let keep = &options.keep;
        let mut specs = Vec::new();
        for (key, entry) in self
            .files
            .manifest
            .tensors
            .iter()
            .filter(|(key, _)| keep(key))
        {
            let (shape, dtype) = readable(key, entry)?;
            let dim = (options.shard_dim)(key, &shape);
            if dim >= shape.num_dims() {
                return Err(CheckpointError::NoDim {
                    key: key.clone(),
                    dim,
                    shape: shape.to_vec(),
                }
                .into());
            }
            let placements = even_placements(shape[dim], dim, self.files.mesh.shape());
            let layout = Layout::new(self.files.mesh.shape(), &placements)?;
            specs.push((
                key,
                DTensorSpec::new(&self.files.mesh, layout, shape, dtype)?.shared(),
            ));
        }
        let wants: Vec<_> = specs
            .iter()
            .map(|(key, spec)| Want {
                key: (*key).clone(),
                region: shard_region(spec),
            })
            .collect();
        let mut tensors = BTreeMap::new();
        self.files.read(&wants, |index, data| {
            let (key, spec) = &specs[index];
            tensors.insert((*key).clone(), DynDTensor::from_local_data(data, spec));
            Ok(())
        })?;
        let comm = self.files.mesh.all()?;
        let values = self
            .files
            .manifest
            .values
            .iter()
            .filter(|(key, _)| keep(key));
        let mut rank_values = BTreeMap::new();
        for (key, of_ranks) in self
            .files
            .manifest
            .rank_values
            .iter()
            .filter(|(key, _)| keep(key))
        {
            let saved = of_ranks.len();
            let ranks = self.files.mesh.size();
            if saved != ranks {
                return Err(CheckpointError::RankValues {
                    key: key.clone(),
                    saved,
                    ranks,
                }
                .into());
            }
            rank_values.insert(key.clone(), of_ranks[comm.group().rank()].clone());
        }
        // The keys are those of one state already.
        let groups = BTreeSet::new();
        let values = values
            .map(|(key, value)| (key.clone(), value.clone()))
            .collect();
        Ok(State {
            mesh: self.files.mesh.clone(),
            step: self.files.manifest.step,
            tensors,
            groups,
            values,
            rank_values,
        })
    }
}

/// Returns placements that shard dimension `dim`, of length `len`, over as many mesh dimensions as
/// it has indices for. On the others the tensor is replicated, and the save divides the work.
fn even_placements(mut len: usize, dim: usize, mesh: &[usize]) -> Vec<Placement> {
    let placement = |&ranks: &usize| match len >= ranks {
        true => {
            len /= ranks;
            Placement::Shard(dim)
        }
        false => Placement::Replicate,
    };
    mesh.iter().map(placement).collect()
}
