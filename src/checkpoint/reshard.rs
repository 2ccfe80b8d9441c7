//! [`Checkpoint::reshard`]: saves a checkpoint once more, by other ranks.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use burn::tensor::{Bytes, TensorData};

use super::assign::shard_region;
use super::load::together;
use super::reader::{Reader, Want};
use super::{Checkpoint, CheckpointError, SaveReport, State, save};
use crate::Result;
use crate::dtensor::{DTensorSpec, DynDTensor};
use crate::placement::{Layout, Placement};

impl Checkpoint {
    /// Saves everything whose key `keep` returns true for into the folder `path`, divided evenly among the ranks of the mesh,
    /// which takes no model. Together they hold all tensors in memory. A load reads what it needs from any checkpoint; a
    /// copy has as many files as there are ranks now, and may leave out the optimizer.
    ///
    /// ```
    /// # use burn::nn::LinearConfig;
    /// # use burn_dtensor::prelude::*;
    /// use burn_dtensor::checkpoint::{self, Checkpoint, State, inspect};
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
    ///     Checkpoint::open(&four, &mesh)?.reshard(&two, |_key| true)?;
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
    /// On all ranks: [`CheckpointError::RankValues`] if ranks have values of their own and their number is another;
    /// [`CheckpointError::DType`] for a dtype that burn does not have; those of [`save`] and of
    /// [`load_model`](Self::load_model).
    pub fn reshard(&self, path: impl AsRef<Path>, keep: impl Fn(&str) -> bool) -> Result<SaveReport> {
        let state = together(&self.mesh.all()?, "checkpoint_reshard", self.even_state(&keep))?;
        save(path, &state)
    }

    /// Reads an even share of all tensors.
    fn even_state(&self, keep: &dyn Fn(&str) -> bool) -> Result<State> {
        let mut specs = Vec::new();
        for (key, entry) in self.manifest.tensors.iter().filter(|(key, _)| keep(key)) {
            let dtype = || CheckpointError::DType { key: key.clone(), dtype: entry.dtype.to_string() };
            let placements = even_placements(&entry.shape, self.mesh.shape());
            let layout = Layout::new(self.mesh.shape(), &placements)?;
            let shape = entry.shape.clone().into();
            specs.push((
                key,
                DTensorSpec::new(&self.mesh, layout, shape, entry.dtype.dtype().ok_or_else(dtype)?)?.shared(),
            ));
        }
        let want = |(key, spec): &(&String, Arc<DTensorSpec>)| Want { key: (*key).clone(), region: shard_region(spec) };
        let wants: Vec<_> = specs.iter().map(want).collect();
        let mut tensors = BTreeMap::new();
        let add = |index: usize, bytes: Bytes| {
            let (key, spec): &(&String, Arc<DTensorSpec>) = &specs[index];
            let data = TensorData::from_bytes(bytes, wants[index].region.shape.clone(), spec.dtype());
            tensors.insert((*key).clone(), DynDTensor::from_local_data(data, spec));
            Ok(())
        };
        let reader = Reader::new(&*self.fs, &self.path, &self.manifest, &self.read, self.mesh.rank());
        self.stats.lock().add(&reader.read(&wants, add)?);

        let comm = self.mesh.all()?;
        let values = self.manifest.values.iter().filter(|(key, _)| keep(key));
        let mut rank_values = BTreeMap::new();
        for (key, of_ranks) in self.manifest.rank_values.iter().filter(|(key, _)| keep(key)) {
            let (saved, ranks) = (of_ranks.len(), self.mesh.size());
            if saved != ranks {
                return Err(CheckpointError::RankValues { key: key.clone(), saved, ranks }.into());
            }
            rank_values.insert(key.clone(), of_ranks[comm.group().rank()].clone());
        }
        let values = values.map(|(key, value)| (key.clone(), value.clone())).collect();
        Ok(State { mesh: self.mesh.clone(), step: self.manifest.step, tensors, values, rank_values })
    }
}

/// Returns placements that shard a tensor in its first dimension over as many mesh dimensions as it has rows for. On
/// the others it is replicated, and the save divides the work.
fn even_placements(shape: &[usize], mesh: &[usize]) -> Vec<Placement> {
    let mut rows = shape.first().copied().unwrap_or(0);
    let placement = |&ranks: &usize| match rows >= ranks {
        true => {
            rows /= ranks;
            Placement::Shard(0)
        }
        false => Placement::Replicate,
    };
    mesh.iter().map(placement).collect()
}
