//! [`SafetensorsWeights`]: weights of other frameworks, of which each rank reads its shards.

use std::path::{Path, PathBuf};

use burn::module::Module;
use twox_hash::XxHash3_64;

use super::fs::{self, Links};
use super::manifest::Manifest;
use super::matching::Matching;
use super::tensor_files::TensorFiles;
use super::{
    CheckpointError, KeyReport, LoadKind, ReadOptions, ReadStats, WeightSource, safetensors_file,
};
use crate::Result;
use crate::comm::agree;
use crate::mesh::DeviceMesh;

/// Weights in safetensors files, as Hugging Face's models have them: one file, or several with an
/// index.
///
/// Each rank reads only the parts of the files that make up its shards.
///
/// ```
/// # use burn::nn::LinearConfig;
/// # use burn_dtensor::prelude::*;
/// use burn_dtensor::checkpoint::{self, SafetensorsWeights, WeightSource};
///
/// # let folder = std::env::temp_dir().join(format!("safetensors-weights-{}", std::process::id()));
/// # let (saved, exported) = (folder.join("saved"), folder.join("exported"));
/// launch(Launch::threads(2), |world| {
///     let mesh = DeviceMesh::new(world, [2], ["shard"])?;
/// #   let model = fully_shard(LinearConfig::new(4, 6).init(world.device()), &mesh, FullyShard::new())?;
/// #   checkpoint::save(&saved, &checkpoint::State::new(&mesh).with_model("model", &model)?)?;
/// #   world.run_on(0, || {
/// #       let options = checkpoint::ConsolidateOptions::new().with_key("model").with_transposed(|name| name == "weight");
/// #       checkpoint::consolidate(&saved, &exported, &options, |_, _| {}).unwrap();
/// #   });
/// #   world.barrier("exported")?;
///     let weights = SafetensorsWeights::open(&exported, &mesh)?;
///     let again = fully_shard(LinearConfig::new(4, 6).init(world.device()), &mesh, FullyShard::new())?;
///     // A PyTorch `Linear` has its weight as [out, in].
///     let (again, _) = weights.load_model(again, |path| match path {
///         "weight" => Some(WeightSource::new(path).transposed()),
///         _ => Some(WeightSource::new(path)),
///     })?;
///     assert_eq!(again.weight.val().into_data(), model.weight.val().into_data());
///     Ok(())
/// })?;
/// # std::fs::remove_dir_all(folder)?;
/// # Ok::<_, burn_dtensor::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct SafetensorsWeights {
    files: TensorFiles,
}

impl SafetensorsWeights {
    /// Opens a safetensors file, an index of several (`model.safetensors.index.json`), or a folder
    /// with one of them. Symbolic links are followed, as in Hugging Face's cache.
    ///
    /// # Collective
    /// Every rank of `mesh`. Each reads the headers, which are compared. Hosts may have copies of
    /// their own; that the tensors of these are the same is not checked.
    ///
    /// # Errors
    /// On all ranks: [`CheckpointError::Safetensors`], [`CheckpointError::NotShared`],
    /// [`CheckpointError::Io`].
    pub fn open(path: impl AsRef<Path>, mesh: &DeviceMesh) -> Result<Self> {
        mesh.member("load weights on it")?;
        let fs = fs::real();
        let opened = safetensors_file::open(&*fs, path.as_ref(), mesh.rank());
        let comm = mesh.all()?;
        let checksum =
            |(_, manifest): &(PathBuf, Manifest)| XxHash3_64::oneshot(&manifest.to_bytes());
        let checksums = agree(
            &comm,
            "safetensors_open",
            opened.as_ref().map(checksum).map_err(Clone::clone),
        )?;
        if let Some(other) = checksums
            .iter()
            .position(|checksum| *checksum != checksums[0])
        {
            let ranks = comm.group().ranks();
            return Err(CheckpointError::NotShared {
                path: path.as_ref().into(),
                rank: ranks[other],
                of: ranks[0],
            }
            .into());
        }
        let (folder, manifest) = opened?;
        Ok(Self {
            files: TensorFiles::new(fs, folder, manifest, mesh, Links::Follow),
        })
    }

    /// Sets how files are read.
    #[must_use]
    pub fn with_read_options(self, read: ReadOptions) -> Self {
        Self {
            files: self.files.with_read_options(read),
        }
    }

    /// Returns the names of the tensors.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.files.manifest.tensors.keys().map(String::as_str)
    }

    /// Returns what this rank has read so far through this value and its clones.
    pub fn read_stats(&self) -> ReadStats {
        self.files.stats()
    }

    /// Loads a model, as it is distributed now. `source` returns the place of the values of a
    /// parameter or buffer, given its path in the model; `None` leaves it as it is. Values of
    /// another dtype are cast. Tensors of the files that no parameter reads are listed in the
    /// report. The shards of `model` are freed before the new ones are read, as by
    /// [`Checkpoint::load_model`](super::Checkpoint::load_model).
    ///
    /// # Collective
    /// Every rank of the mesh. Tensors are not communicated.
    ///
    /// # Errors
    /// On all ranks: [`CheckpointError::Keys`] with all parameters whose tensor does not exist or
    /// has another shape; [`CheckpointError::Io`]; [`Error::Comm`](crate::Error::Comm) if another
    /// rank fails.
    pub fn load_model<M: Module>(
        &self,
        model: M,
        source: impl Fn(&str) -> Option<WeightSource>,
    ) -> Result<(M, KeyReport)> {
        // Files of other frameworks contain more than weights.
        let matching = Matching {
            of: LoadKind::Weights,
            source: Box::new(source),
            allows_missing: false,
            allows_unexpected: true,
        };
        self.files.load_model("", model, &matching)
    }
}
