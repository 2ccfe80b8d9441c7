//! [`Checkpoint`]: a saved checkpoint, of which every rank reads its shards.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::Path;
use std::sync::Arc;

use burn::module::Module;
use burn::tensor::Tensor;
use serde::de::DeserializeOwned;
use twox_hash::XxHash3_64;

use super::fs::{self, FileSystem, Links, MANIFEST};
use super::manifest::{Manifest, ManifestError};
use super::optimizer::StoredOptimizer;
use super::save_plan::LIMIT;
use super::state::decode;
use super::tensor_files::{TensorFiles, readable, saved_tensor};
use super::weight_source::WeightSource;
use super::{
    CheckpointError, KeyReport, LoadKind, LoadOptions, ReadOptions, ReadStats, StateDTypes,
};
use crate::comm::{agree, agree_on_success};
use crate::dtensor::{DTensor, DynDTensor, Kind};
use crate::mesh::DeviceMesh;
use crate::optim::{OptimizerState, parameter_specs};
use crate::{Error, Result};

/// A complete checkpoint, opened by the ranks of a mesh.
///
/// Each rank reads what it holds: the parts of the files that make up its shards. Ranks, mesh and
/// placements may be others than those that saved it.
#[derive(Debug, Clone)]
pub struct Checkpoint {
    pub(super) files: TensorFiles,
}

impl Checkpoint {
    /// Opens the checkpoint in the folder `path`.
    ///
    /// # Collective
    /// Every rank of `mesh`, with the folder that [`save`](super::save) wrote.
    ///
    /// # Errors
    /// On all ranks: [`CheckpointError::Incomplete`] for a folder without a manifest,
    /// [`CheckpointError::Manifest`], [`CheckpointError::NotShared`] if ranks see different
    /// checkpoints, [`CheckpointError::Io`]. [`Error::Comm`](crate::Error::Comm) if another rank
    /// fails.
    pub fn open(path: impl AsRef<Path>, mesh: &DeviceMesh) -> Result<Self> {
        Self::open_in(fs::real(), path.as_ref(), mesh)
    }

    pub(super) fn open_in(fs: Arc<dyn FileSystem>, path: &Path, mesh: &DeviceMesh) -> Result<Self> {
        mesh.member("load a checkpoint on it")?;
        let comm = mesh.all()?;
        let ranks = comm.group().ranks();
        let own = read_manifest(&*fs, path, mesh.rank());
        let seen = own
            .as_ref()
            .map(|(_, digest)| (path.as_os_str().to_owned(), *digest))
            .map_err(Clone::clone);
        let mut seen = agree(&comm, "checkpoint_open", seen)?;
        if let Some(other) = seen.iter().position(|(_, digest)| *digest != seen[0].1) {
            let path = seen.swap_remove(other).0.into();
            return Err(CheckpointError::NotShared {
                path,
                rank: ranks[other],
                of: ranks[0],
            }
            .into());
        }
        Ok(Self {
            files: TensorFiles::new(fs, path.into(), own?.0, mesh, Links::Refuse),
        })
    }

    /// Keeps the files open, so that they can be loaded once another program has removed them.
    ///
    /// # Collective
    /// Every rank of the mesh.
    ///
    /// # Errors
    /// [`CheckpointError::Incomplete`] on all ranks if files are removed already.
    pub(super) fn hold_files(self) -> Result<Self> {
        let comm = self.files.mesh.all()?;
        let path = self.files.folder.clone();
        let held = self.files.hold();
        let held = held.map_err(|_| CheckpointError::Incomplete { path }.into());
        let files = agree_on_success(&comm, "checkpoint_hold", held, CheckpointError::of)?;
        Ok(Self { files })
    }

    /// Sets how files are read.
    #[must_use]
    pub fn with_read_options(self, read: ReadOptions) -> Self {
        Self {
            files: self.files.with_read_options(read),
        }
    }

    /// Returns the folder.
    pub fn path(&self) -> &Path {
        &self.files.folder
    }

    /// Returns the number of training steps after which it was saved, if the state had one.
    pub fn step(&self) -> Option<u64> {
        self.files.manifest.step
    }

    /// Returns the keys of the tensors.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.files.manifest.tensors.keys().map(String::as_str)
    }

    /// Returns what this rank has read so far through this checkpoint and its clones.
    pub fn read_stats(&self) -> ReadStats {
        self.files.stats()
    }

    /// Loads the parameters and buffers of a model that were saved under `key`. Each rank reads its
    /// shards, as `model` is distributed now; values of another dtype are cast.
    ///
    /// A rank holds its shards and the memory of [`ReadOptions`], and for a GPU, its shards in host
    /// memory as well: once it is known that all keys fit, the shards of `model` are freed, and
    /// then the new ones are read. A clone of the model keeps its shards, and so its values if the
    /// load fails, but then both are in memory.
    ///
    /// # Collective
    /// Every rank of the mesh. Tensors are not communicated.
    ///
    /// # Errors
    /// On all ranks: [`CheckpointError::Keys`] with all missing, unexpected and misshapen keys, as
    /// far as `options` do not allow them, or [`CheckpointError::NoTensors`] if nothing was saved
    /// under `key`; [`CheckpointError::Corrupt`]; [`CheckpointError::Io`].
    /// [`Error::Comm`](crate::Error::Comm) if another rank fails.
    pub fn load_model<M: Module>(
        &self,
        key: &str,
        model: M,
        options: &LoadOptions,
    ) -> Result<(M, KeyReport)> {
        let prefix = format!("{key}.");
        let matching = options.matching(LoadKind::Model);
        match self.files.load_model(&prefix, model, &matching) {
            // All ranks have read the same manifest.
            Err(Error::Checkpoint(CheckpointError::Keys { .. }))
                if self.files.below(&prefix).next().is_none() =>
            {
                let tensors = self.files.manifest.tensors.keys();
                Err(CheckpointError::no_tensors(key, tensors).into())
            }
            loaded => loaded,
        }
    }

    /// Loads the state of an optimizer that was saved under `key`, for the parameters of `model`,
    /// as they are distributed now, and returns it with a report. Pass it to
    /// [`ShardedOptimizer::load_state`](crate::optim::ShardedOptimizer::load_state).
    ///
    /// `options` are those with which the model was loaded: [`LoadOptions::with_renamed`] receives
    /// the path of a parameter and returns the path that it had when it was saved. State of a
    /// parameter of another dtype is refused or converted, as
    /// [`LoadOptions::with_state_dtypes`] says. A parameter for which the optimizer had no state when it was saved, because it had
    /// never had a gradient, fits a parameter without state. In a
    /// [partial](LoadOptions::with_partial) load, parameters that were not saved start without
    /// state, and saved state of other parameters is left out.
    ///
    /// # Collective
    /// Every rank of the mesh. Tensors are not communicated.
    ///
    /// # Errors
    /// On all ranks: [`CheckpointError::Keys`] with all parameters without saved state, all with
    /// saved state that are not in the model, and all of another shape, as far as `options` do not
    /// allow them; [`CheckpointError::StateDType`], [`CheckpointError::NoValue`],
    /// [`CheckpointError::Corrupt`], [`CheckpointError::Io`]. [`Error::Comm`](crate::Error::Comm) if another rank fails.
    pub fn load_optimizer<M: Module>(
        &self,
        key: &str,
        model: &M,
        options: &LoadOptions,
    ) -> Result<(OptimizerState, KeyReport)> {
        let run = || -> Result<_> {
            let (params, stored) = (
                parameter_specs(model)?,
                self.value::<StoredOptimizer>(key)?.params,
            );
            let matching = options.matching(LoadKind::Optimizer);
            let asked: BTreeSet<_> = params
                .keys()
                .filter_map(|path| Some((matching.source)(path)?.key().to_owned()))
                .collect();
            // What had no state need not be in the model.
            let expected = stored
                .iter()
                .filter(|(path, param)| param.has_state() || asked.contains(*path));
            let saved = expected
                .map(|(path, param)| (path.clone(), param.saved()))
                .collect();
            let (pairs, mut report) = matching.pairs(&params, &saved)?;
            report.loaded = pairs
                .iter()
                .filter(|(_, source)| stored[source.key()].has_state())
                .map(|(path, _)| path.clone())
                .collect();
            report.cast.clear();

            let dtypes = options.state_dtypes;
            let tensors = &self.files.manifest.tensors;
            let mut described = Vec::new();
            let mut sources = Vec::new();
            let mut scalars = Vec::new();
            for (path, source) in &pairs {
                let param = &stored[source.key()];
                let now = params[path].dtype();
                let is_other = !param.tensors.is_empty() && param.dtype != now;
                match dtypes {
                    StateDTypes::Refuse if is_other => {
                        return Err(CheckpointError::state_dtype(path, param.dtype, now).into());
                    }
                    StateDTypes::Convert if is_other => report.cast.push(path.clone()),
                    _ => {}
                }
                for field in &param.tensors {
                    let name = format!("{path}.{field}");
                    let stored = format!("{key}.{}.{field}", source.key());
                    let entry = tensors
                        .get(&stored)
                        .ok_or_else(|| no_value(&stored, tensors.keys()))?;
                    let (shape, saved) = readable(&stored, entry)?;
                    let is_converted = dtypes == StateDTypes::Convert && saved == param.dtype;
                    let dtype = if is_converted { now } else { saved };
                    described.push((name.clone(), shape, dtype));
                    sources.push((name, stored.clone(), WeightSource::new(stored)));
                }
                scalars.extend(
                    param
                        .scalars
                        .iter()
                        .map(|(field, scalar)| (format!("{path}.{field}"), (*scalar).into())),
                );
            }
            let described = described
                .iter()
                .map(|(name, shape, dtype)| (name.as_str(), shape, *dtype));
            let targets = OptimizerState::targets(&params, described)?;
            let values = self.files.read_values(sources, &targets)?;
            let tensors = values.into_iter().map(|(name, data)| {
                let tensor = DynDTensor::from_local_data(data, &targets[&name]);
                (name, tensor)
            });
            let state = OptimizerState::from_parts(&params, &report.loaded, tensors, scalars)?;
            let state = match dtypes {
                StateDTypes::Refuse => state,
                StateDTypes::Convert | StateDTypes::Keep => state.in_any_dtype(),
            };
            Ok((state, report))
        };
        agree_on_success(
            &self.files.mesh.all()?,
            "checkpoint_load_optimizer",
            run(),
            CheckpointError::of,
        )
    }

    /// Loads one tensor with the placements of `like`. Values of another dtype are cast.
    ///
    /// # Collective
    /// Every rank of the mesh. The tensor is not communicated.
    ///
    /// # Errors
    /// As [`load_model`](Self::load_model), [`CheckpointError::NoValue`] if there is no such
    /// tensor, and [`CheckpointError::Partial`] if `like` is partial.
    pub fn load_tensor<const D: usize, K: Kind>(
        &self,
        key: &str,
        like: &DTensor<D, K>,
    ) -> Result<DTensor<D, K>> {
        let run = || -> Result<_> {
            let layout = like.spec().layout();
            let tensors = &self.files.manifest.tensors;
            if layout.has_partial() {
                return Err(CheckpointError::Partial {
                    key: key.into(),
                    placements: layout.to_string(),
                }
                .into());
            }
            let entry = tensors
                .get(key)
                .ok_or_else(|| no_value(key, tensors.keys()))?;
            let targets = BTreeMap::from([(key.to_owned(), like.spec().clone())]);
            let saved = BTreeMap::from([(key.to_owned(), saved_tensor(entry))]);
            LoadOptions::new()
                .matching(LoadKind::Tensor)
                .pairs(&targets, &saved)?;
            let source = (key.to_owned(), key.to_owned(), WeightSource::new(key));
            let mut values = self.files.read_values(vec![source], &targets)?;
            Ok(values.remove(key).expect("it is the one that was read"))
        };
        let data = agree_on_success(
            &self.files.mesh.all()?,
            "checkpoint_load_tensor",
            run(),
            CheckpointError::of,
        )?;
        let device = like.device();
        let dtype = data.dtype();
        Ok(DTensor::from_parts(
            Tensor::from_data(data, (&device, dtype)),
            like.spec().clone(),
        ))
    }

    /// Returns a value. Local: no communication.
    ///
    /// # Errors
    /// [`CheckpointError::NoValue`], and [`CheckpointError::Value`] if it is not a `T`.
    pub fn value<T: DeserializeOwned>(&self, key: &str) -> Result<T> {
        let values = &self.files.manifest.values;
        Ok(decode(
            key,
            values
                .get(key)
                .ok_or_else(|| no_value(key, values.keys()))?,
        )?)
    }

    /// Returns the values of all ranks that saved the checkpoint, in the order of their mesh.
    /// Local: no communication.
    ///
    /// # Errors
    /// As [`value`](Self::value).
    pub fn rank_values<T: DeserializeOwned>(&self, key: &str) -> Result<Vec<T>> {
        let values = &self.files.manifest.rank_values;
        let of_ranks = values
            .get(key)
            .ok_or_else(|| no_value(key, values.keys()))?;
        Ok(of_ranks
            .iter()
            .map(|value| decode(key, value))
            .collect::<Result<_, _>>()?)
    }
}

pub(super) fn read_manifest(
    fs: &dyn FileSystem,
    path: &Path,
    rank: usize,
) -> Result<(Manifest, u64), CheckpointError> {
    let file = path.join(MANIFEST);
    let bytes =
        fs::read_all(fs, &file, Links::Refuse, LIMIT).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => CheckpointError::Incomplete { path: path.into() },
            _ => CheckpointError::io(rank, "read", &file, &error),
        })?;
    let manifest = Manifest::parse(&bytes);
    let manifest = manifest.map_err(|error| CheckpointError::Manifest {
        path: file,
        reason: with_remedy(&error),
    })?;
    Ok((manifest, XxHash3_64::oneshot(&bytes)))
}

/// Returns the text of an error with its remedy, which is another version of the crate if the text
/// names one, and else another checkpoint.
fn with_remedy(error: &ManifestError) -> String {
    match error {
        ManifestError::Version { found, known } if found > known => error.to_string(),
        ManifestError::Feature { .. } => error.to_string(),
        _ => format!("{error}. Load another checkpoint"),
    }
}

pub(super) fn no_value<'a>(
    key: &str,
    present: impl Iterator<Item = &'a String>,
) -> CheckpointError {
    let present = present
        .map(|key| format!("`{key}`"))
        .collect::<Vec<_>>()
        .join(", ");
    CheckpointError::NoValue {
        key: key.into(),
        present: if present.is_empty() {
            "none".into()
        } else {
            present
        },
    }
}
