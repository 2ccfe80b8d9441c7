//! [`SafetensorsWeights`]: weights of other frameworks, of which each rank reads its shards.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use burn::module::Module;
use burn::tensor::{Shape, TensorData};
use parking_lot::Mutex;
use twox_hash::XxHash3_64;

use super::agree::agree;
use super::assign::shard_region;
use super::capture::{replace, targets};
use super::fs::{self, FileSystem};
use super::load::{read_values, saved_tensor, together};
use super::manifest::Manifest;
use super::options::SavedTensor;
use super::reader::{Reader, Want};
use super::region::Region;
use super::{CheckpointError, KeyReport, ReadOptions, ReadStats, safetensors_file};
use crate::Result;
use crate::dtensor::{DTensorSpec, is_castable};
use crate::mesh::DeviceMesh;

/// Weights in safetensors files, as Hugging Face's models have them: one file, or several with an index.
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
    fs: Arc<dyn FileSystem>,
    folder: PathBuf,
    manifest: Arc<Manifest>,
    mesh: DeviceMesh,
    read: ReadOptions,
    stats: Arc<Mutex<ReadStats>>,
}

/// The place of a parameter's values in files of another framework.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WeightSource {
    key: String,
    rows: Option<Range<usize>>,
    is_transposed: bool,
}

impl WeightSource {
    /// Returns the tensor named `key`.
    pub fn new(key: impl Into<String>) -> Self {
        Self { key: key.into(), rows: None, is_transposed: false }
    }

    /// Takes only these indices of the stored tensor's first dimension, for instance the queries of a weight in which
    /// queries, keys and values are fused.
    #[must_use]
    pub fn rows(self, rows: Range<usize>) -> Self {
        Self { rows: Some(rows), ..self }
    }

    /// Transposes the stored matrix, after [`rows`](Self::rows).
    #[must_use]
    pub fn transposed(self) -> Self {
        Self { is_transposed: true, ..self }
    }

    /// Returns the shape of the values for a stored tensor of shape `stored`; `None` if it does not have the rows, or is not
    /// the matrix that is to be transposed.
    fn shape(&self, stored: &Shape) -> Option<Shape> {
        let mut shape = stored.to_vec();
        if let Some(rows) = &self.rows {
            let first = shape.first_mut().filter(|len| rows.start <= rows.end && rows.end <= **len)?;
            *first = rows.len();
        }
        if self.is_transposed {
            if shape.len() != 2 {
                return None;
            }
            shape.reverse();
        }
        Some(shape.into())
    }

    /// Returns the stored region of a region of the values.
    fn region(&self, of_values: Region) -> Region {
        let mut region = if self.is_transposed { of_values.transposed() } else { of_values };
        if let Some(rows) = &self.rows {
            region.offsets[0] += rows.start;
        }
        region
    }
}

impl SafetensorsWeights {
    /// Opens a safetensors file, an index of several (`model.safetensors.index.json`), or a folder with one of them.
    /// Symbolic links are followed, as in Hugging Face's cache.
    ///
    /// # Collective
    /// Every rank of `mesh`. Each reads the headers, which are compared. Hosts may have copies of their own; that the tensors
    /// of these are the same is not checked.
    ///
    /// # Errors
    /// On all ranks: [`CheckpointError::Safetensors`], [`CheckpointError::NotShared`], [`CheckpointError::Io`].
    pub fn open(path: impl AsRef<Path>, mesh: &DeviceMesh) -> Result<Self> {
        mesh.member("load weights on it")?;
        let fs = fs::real();
        let opened = safetensors_file::open(&*fs, path.as_ref(), mesh.rank());
        let comm = mesh.all()?;
        let checksum = |(_, manifest): &(PathBuf, Manifest)| XxHash3_64::oneshot(&manifest.to_bytes());
        let checksums = agree(&comm, "safetensors_open", opened.as_ref().map(checksum).map_err(Clone::clone))?;
        if let Some(other) = checksums.iter().position(|checksum| *checksum != checksums[0]) {
            let ranks = comm.group().ranks();
            return Err(
                CheckpointError::NotShared { path: path.as_ref().into(), rank: ranks[other], of: ranks[0] }.into()
            );
        }
        let (folder, manifest) = opened?;
        let (manifest, mesh, read) = (Arc::new(manifest), mesh.clone(), ReadOptions::new());
        Ok(Self { fs, folder, manifest, mesh, read, stats: Arc::default() })
    }

    /// Sets how files are read.
    #[must_use]
    pub fn with_read_options(self, read: ReadOptions) -> Self {
        Self { read, ..self }
    }

    /// Returns the names of the tensors.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.manifest.tensors.keys().map(String::as_str)
    }

    /// Returns what this rank has read so far through this value and its clones.
    pub fn read_stats(&self) -> ReadStats {
        self.stats.lock().clone()
    }

    /// Loads a model, as it is distributed now. `source` returns the place of the values of a parameter or buffer, given its
    /// path in the model; `None` leaves it as it is. Values of another dtype are cast. Tensors of the files that no
    /// parameter reads are listed in the report.
    ///
    /// # Collective
    /// Every rank of the mesh. Tensors are not communicated.
    ///
    /// # Errors
    /// On all ranks: [`CheckpointError::Keys`] with all parameters whose tensor does not exist or has another shape;
    /// [`CheckpointError::Io`]; [`Error::Comm`](crate::Error::Comm) if another rank fails.
    pub fn load_model<M: Module>(
        &self,
        model: M,
        source: impl Fn(&str) -> Option<WeightSource>,
    ) -> Result<(M, KeyReport)> {
        let run = || -> Result<_> {
            let targets = targets(&model, &self.mesh)?;
            let (sources, report) = self.matched(&targets, source)?;
            Ok((self.read(&sources, &targets)?, report))
        };
        let (values, report) = together(&self.mesh.all()?, "safetensors_load_model", run())?;
        Ok((replace(model, values)?, report))
    }

    fn matched(
        &self,
        targets: &BTreeMap<String, Arc<DTensorSpec>>,
        source: impl Fn(&str) -> Option<WeightSource>,
    ) -> Result<(Vec<(String, WeightSource)>, KeyReport), CheckpointError> {
        let (mut sources, mut report, mut mismatched) = (Vec::new(), KeyReport::default(), Vec::new());
        for (path, target) in targets {
            let Some(source) = source(path) else {
                report.skipped.push(path.clone());
                continue;
            };
            let Some(entry) = self.manifest.tensors.get(&source.key) else {
                report.missing.push(format!("{path} (`{}`)", source.key));
                continue;
            };
            let stored = saved_tensor(&source.key, entry)?;
            let fits = source.shape(&stored.shape).as_ref() == Some(target.shape());
            if !fits || !is_castable(stored.dtype, target.dtype()) {
                let own = SavedTensor::of(target);
                let how = if source.is_transposed { ", to be transposed" } else { "" };
                let rows = source.rows.as_ref().map_or_else(String::new, |rows| format!(", rows {rows:?}"));
                mismatched.push(format!("`{path}` is {own} in the model, but `{}` is {stored}{rows}{how}", source.key));
                continue;
            }
            if stored.dtype != target.dtype() {
                report.cast.push(path.clone());
            }
            report.loaded.push(path.clone());
            sources.push((path.clone(), source));
        }
        let used: BTreeSet<_> = sources.iter().map(|(_, source)| &source.key).collect();
        report.unexpected = self.manifest.tensors.keys().filter(|key| !used.contains(key)).cloned().collect();
        if report.missing.is_empty() && mismatched.is_empty() {
            return Ok((sources, report));
        }
        Err(CheckpointError::Keys { missing: report.missing, unexpected: Vec::new(), mismatched })
    }

    /// Reads this rank's parts of the values, by path.
    fn read(
        &self,
        sources: &[(String, WeightSource)],
        targets: &BTreeMap<String, Arc<DTensorSpec>>,
    ) -> Result<BTreeMap<String, TensorData>> {
        let want = |(path, source): &(String, WeightSource)| {
            let region = source.region(shard_region(&targets[path]));
            (path.clone(), Want { key: source.key.clone(), region }, source.is_transposed)
        };
        let reader = Reader::new(&*self.fs, &self.folder, &self.manifest, &self.read, self.mesh.rank());
        let parts = sources.iter().map(want).collect();
        let (values, stats) = read_values(&reader.following_links(), &self.manifest, parts, targets)?;
        self.stats.lock().add(&stats);
        Ok(values)
    }
}
