//! [`Checkpoint`]: a saved checkpoint, of which every rank reads its shards.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use burn::module::Module;
use burn::tensor::{Bytes, Tensor, TensorData};
use parking_lot::Mutex;
use serde::de::DeserializeOwned;
use twox_hash::XxHash3_64;

use super::agree::agree;
use super::assign::shard_region;
use super::capture::{replace, targets};
use super::fs::{self, FileSystem, Links, MANIFEST};
use super::manifest::{Manifest, TensorEntry};
use super::options::SavedTensor;
use super::reader::{Reader, Want};
use super::region::transposed_bytes;
use super::save::LIMIT;
use super::state::{StoredScalar, decode};
use super::{CheckpointError, KeyReport, LoadOptions, ReadOptions, ReadStats};
use crate::Result;
use crate::comm::{Call, Communicator};
use crate::dtensor::{DTensor, DTensorSpec, DynDTensor, Kind};
use crate::mesh::DeviceMesh;
use crate::optim::{OptimizerState, parameter_specs};

/// A complete checkpoint, opened by the ranks of a mesh.
///
/// Each rank reads what it holds: the parts of the files that make up its shards. Ranks, mesh and placements may be others
/// than those that saved it.
#[derive(Debug, Clone)]
pub struct Checkpoint {
    pub(super) fs: Arc<dyn FileSystem>,
    pub(super) path: PathBuf,
    pub(super) manifest: Arc<Manifest>,
    pub(super) mesh: DeviceMesh,
    pub(super) read: ReadOptions,
    pub(super) stats: Arc<Mutex<ReadStats>>,
}

impl Checkpoint {
    /// Opens the checkpoint in the folder `path`.
    ///
    /// # Collective
    /// Every rank of `mesh`, with the folder that [`save`](super::save) wrote.
    ///
    /// # Errors
    /// On all ranks: [`CheckpointError::Incomplete`] for a folder without a manifest, [`CheckpointError::Manifest`],
    /// [`CheckpointError::NotShared`] if ranks see different checkpoints, [`CheckpointError::Io`].
    /// [`Error::Comm`](crate::Error::Comm) if another rank fails.
    pub fn open(path: impl AsRef<Path>, mesh: &DeviceMesh) -> Result<Self> {
        Self::open_in(fs::real(), path.as_ref(), mesh)
    }

    pub(super) fn open_in(fs: Arc<dyn FileSystem>, path: &Path, mesh: &DeviceMesh) -> Result<Self> {
        mesh.member("load a checkpoint on it")?;
        let comm = mesh.all()?;
        let ranks = comm.group().ranks();
        let own = read_manifest(&*fs, path, mesh.rank());
        let seen = own.as_ref().map(|(_, digest)| (path.to_owned(), *digest)).map_err(Clone::clone);
        let mut seen = agree(&comm, "checkpoint_open", seen)?;
        if let Some(other) = seen.iter().position(|(_, digest)| *digest != seen[0].1) {
            let path = seen.swap_remove(other).0;
            return Err(CheckpointError::NotShared { path, rank: ranks[other], of: ranks[0] }.into());
        }
        let manifest = Arc::new(own?.0);
        Ok(Self {
            fs,
            path: path.into(),
            manifest,
            mesh: mesh.clone(),
            read: ReadOptions::new(),
            stats: Arc::default(),
        })
    }

    /// Sets how files are read.
    #[must_use]
    pub fn with_read_options(self, read: ReadOptions) -> Self {
        Self { read, ..self }
    }

    /// Returns the folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the number of training steps after which it was saved, if the state had one.
    pub fn step(&self) -> Option<u64> {
        self.manifest.step
    }

    /// Returns the keys of the tensors.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.manifest.tensors.keys().map(String::as_str)
    }

    /// Returns what this rank has read so far through this checkpoint and its clones.
    pub fn read_stats(&self) -> ReadStats {
        self.stats.lock().clone()
    }

    /// Loads the parameters and buffers of a model that were saved under `key`. Each rank reads its shards, as
    /// `model` is distributed now; values of another dtype are cast. Parameters that are not initialized take no memory
    /// before they are read.
    ///
    /// # Collective
    /// Every rank of the mesh. Tensors are not communicated.
    ///
    /// # Errors
    /// On all ranks: [`CheckpointError::Keys`] with all missing, unexpected and misshapen keys, as far as `options` do not
    /// allow them; [`CheckpointError::Corrupt`]; [`CheckpointError::Io`]. [`Error::Comm`](crate::Error::Comm) if another
    /// rank fails.
    pub fn load_model<M: Module>(&self, key: &str, model: M, options: &LoadOptions) -> Result<(M, KeyReport)> {
        let comm = self.mesh.all()?;
        let run = || -> Result<_> {
            let targets = targets(&model, &self.mesh)?;
            let (pairs, report) = options.matched(&targets, &self.saved(key)?)?;
            let keys = pairs.into_iter().map(|(path, stored)| (path, format!("{key}.{stored}")));
            Ok((self.read_tensors(keys, &targets)?, report))
        };
        let (values, report) = together(&comm, "checkpoint_load_model", run())?;
        Ok((replace(model, values)?, report))
    }

    /// Loads the state of an optimizer that was saved under `key`, for the parameters of `model`, as they are distributed
    /// now. Pass it to [`ShardedOptimizer::load_state`](crate::optim::ShardedOptimizer::load_state).
    ///
    /// A parameter without saved state has none, so its state starts from zero.
    ///
    /// # Collective
    /// Every rank of the mesh. Tensors are not communicated.
    ///
    /// # Errors
    /// On all ranks: [`OptimError::NoParameter`](crate::optim::OptimError::NoParameter) for state of a parameter that the
    /// model does not have, [`CheckpointError::NoValue`], [`CheckpointError::Corrupt`], [`CheckpointError::Io`].
    /// [`Error::Comm`](crate::Error::Comm) if another rank fails.
    pub fn load_optimizer<M: Module>(&self, key: &str, model: &M) -> Result<OptimizerState> {
        let comm = self.mesh.all()?;
        let run = || -> Result<_> {
            let params = parameter_specs(model)?;
            let scalars: BTreeMap<String, StoredScalar> = self.value(key)?;
            let saved = self.saved(key)?;
            let described = saved.iter().map(|(name, saved)| (name.as_str(), &saved.shape, saved.dtype));
            let targets = OptimizerState::targets(&params, described)?;
            let keys = targets.keys().map(|name| (name.clone(), format!("{key}.{name}")));
            let values = self.read_tensors(keys, &targets)?;
            let tensors = values.into_iter().map(|(name, data)| {
                let tensor = DynDTensor::from_local_data(data, &targets[&name]);
                (name, tensor)
            });
            let scalars = scalars.into_iter().map(|(name, scalar)| (name, scalar.into()));
            Ok(OptimizerState::from_parts(&params, tensors, scalars)?)
        };
        together(&comm, "checkpoint_load_optimizer", run())
    }

    /// Loads one tensor with the placements of `like`. Values of another dtype are cast.
    ///
    /// # Collective
    /// Every rank of the mesh. The tensor is not communicated.
    ///
    /// # Errors
    /// As [`load_model`](Self::load_model), [`CheckpointError::NoValue`] if there is no such tensor, and
    /// [`CheckpointError::Partial`] if `like` is partial.
    pub fn load_tensor<const D: usize, K: Kind>(&self, key: &str, like: &DTensor<D, K>) -> Result<DTensor<D, K>> {
        let comm = self.mesh.all()?;
        let run = || -> Result<_> {
            let (layout, tensors) = (like.spec().layout(), &self.manifest.tensors);
            if layout.has_partial() {
                return Err(CheckpointError::Partial { key: key.into(), placements: layout.to_string() }.into());
            }
            let entry = tensors.get(key).ok_or_else(|| no_value(key, tensors.keys()))?;
            let targets = BTreeMap::from([(key.to_owned(), like.spec().clone())]);
            let saved = BTreeMap::from([(key.to_owned(), saved_tensor(key, entry)?)]);
            let (pairs, _) = LoadOptions::new().matched(&targets, &saved)?;
            let mut values = self.read_tensors(pairs.into_iter(), &targets)?;
            Ok(values.remove(key).expect("it is the one that was read"))
        };
        let data = together(&comm, "checkpoint_load_tensor", run())?;
        let (device, dtype) = (like.device(), data.dtype());
        Ok(DTensor::from_parts(Tensor::from_data(data, (&device, dtype)), like.spec().clone()))
    }

    /// Returns a value. Local: no communication.
    ///
    /// # Errors
    /// [`CheckpointError::NoValue`], and [`CheckpointError::Value`] if it is not a `T`.
    pub fn value<T: DeserializeOwned>(&self, key: &str) -> Result<T> {
        let values = &self.manifest.values;
        Ok(decode(key, values.get(key).ok_or_else(|| no_value(key, values.keys()))?)?)
    }

    /// Returns the values of all ranks that saved the checkpoint, in the order of their mesh. Local: no communication.
    ///
    /// # Errors
    /// As [`value`](Self::value).
    pub fn rank_values<T: DeserializeOwned>(&self, key: &str) -> Result<Vec<T>> {
        let values = &self.manifest.rank_values;
        let of_ranks = values.get(key).ok_or_else(|| no_value(key, values.keys()))?;
        Ok(of_ranks.iter().map(|value| decode(key, value)).collect::<Result<_, _>>()?)
    }

    /// Returns the tensors below `key`, by the rest of their keys.
    fn entries(&self, key: &str) -> impl Iterator<Item = (&str, &TensorEntry)> {
        let prefix = format!("{key}.");
        let below = self.manifest.tensors.range(prefix.clone()..);
        below.map_while(move |(name, entry)| Some((name.strip_prefix(&prefix)?, entry)))
    }

    /// Returns shapes and dtypes of the tensors below `key`.
    fn saved(&self, key: &str) -> Result<BTreeMap<String, SavedTensor>, CheckpointError> {
        let saved = |(path, entry)| Ok((String::from(path), saved_tensor(&format!("{key}.{path}"), entry)?));
        self.entries(key).map(saved).collect()
    }

    /// Reads this rank's parts of tensors, by path: each path with its key.
    fn read_tensors(
        &self,
        keys: impl Iterator<Item = (String, String)>,
        targets: &BTreeMap<String, Arc<DTensorSpec>>,
    ) -> Result<BTreeMap<String, TensorData>> {
        let want = |(path, key): (String, String)| {
            let region = shard_region(&targets[&path]);
            (path, Want { key, region }, false)
        };
        let reader = Reader::new(&*self.fs, &self.path, &self.manifest, &self.read, self.mesh.rank());
        let (values, stats) = read_values(&reader, &self.manifest, keys.map(want).collect(), targets)?;
        self.stats.lock().add(&stats);
        Ok(values)
    }
}

/// Reads values of this rank, by path, in the dtypes of `targets`. Each path has the stored region, and says whether the values
/// are its transpose.
pub(super) fn read_values(
    reader: &Reader<'_>,
    manifest: &Manifest,
    parts: Vec<(String, Want, bool)>,
    targets: &BTreeMap<String, Arc<DTensorSpec>>,
) -> Result<(BTreeMap<String, TensorData>, ReadStats), CheckpointError> {
    let wants: Vec<_> = parts.iter().map(|(_, want, _)| want.clone()).collect();
    let mut values = BTreeMap::new();
    let done = |index: usize, bytes: Bytes| {
        let (path, Want { key, region }, is_transposed) = &parts[index];
        let dtype = manifest.tensors[key].dtype.dtype().expect("only dtypes of burn are wanted");
        let mut data = TensorData::from_bytes(bytes, region.shape.clone(), dtype);
        if *is_transposed {
            let [rows, columns] = [region.shape[0], region.shape[1]];
            let bytes = transposed_bytes(data.as_bytes(), [rows, columns], dtype.size());
            data = TensorData::from_bytes_vec(bytes, [columns, rows], dtype);
        }
        let wanted = targets[path].dtype();
        values.insert(path.clone(), if wanted == dtype { data } else { data.convert_dtype(wanted) });
        Ok(())
    };
    let stats = reader.read(&wants, done)?;
    Ok((values, stats))
}

/// Returns this rank's result if all ranks succeeded; otherwise, on every rank, the error of the first that failed.
pub(super) fn together<T>(comm: &Communicator, label: &str, own: Result<T>) -> Result<T> {
    let failed = match &own {
        Ok(_) => None,
        Err(crate::Error::Checkpoint(error)) => Some(Ok(error.clone())),
        Err(error) => Some(Err(error.to_string())),
    };
    let outcomes = comm.all_gather_object(Call::new(label), &failed)?;
    match (own, outcomes.into_iter().flatten().next()) {
        (Ok(value), None) => Ok(value),
        (Err(error @ (crate::Error::Checkpoint(_) | crate::Error::Comm(_))), None) => Err(error),
        (_, Some(Ok(error))) => Err(error.into()),
        (Err(error), _) => Err(error),
        (Ok(_), Some(Err(text))) => Err(crate::Error::other(text)),
    }
}

pub(super) fn read_manifest(fs: &dyn FileSystem, path: &Path, rank: usize) -> Result<(Manifest, u64), CheckpointError> {
    let file = path.join(MANIFEST);
    let bytes = fs::read_all(fs, &file, Links::Refuse, LIMIT).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => CheckpointError::Incomplete { path: path.into() },
        _ => CheckpointError::io(rank, "read", &file, &error),
    })?;
    let manifest = Manifest::parse(&bytes);
    let manifest = manifest.map_err(|error| CheckpointError::Manifest { path: file, reason: error.to_string() })?;
    Ok((manifest, XxHash3_64::oneshot(&bytes)))
}

/// Returns the shape and dtype of a tensor in a manifest.
pub(super) fn saved_tensor(key: &str, entry: &TensorEntry) -> Result<SavedTensor, CheckpointError> {
    let dtype = entry.dtype.dtype();
    let dtype = dtype.ok_or_else(|| CheckpointError::DType { key: key.into(), dtype: entry.dtype.to_string() })?;
    Ok(SavedTensor { shape: entry.shape.clone().into(), dtype })
}

pub(super) fn no_value<'a>(key: &str, present: impl Iterator<Item = &'a String>) -> CheckpointError {
    let present = present.map(|key| format!("`{key}`")).collect::<Vec<_>>().join(", ");
    CheckpointError::NoValue { key: key.into(), present: if present.is_empty() { "none".into() } else { present } }
}
