//! [`TensorFiles`]: files with tensors, of which every rank of a mesh reads its shards.

use std::collections::BTreeMap;
use std::io::{self, ErrorKind};
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::sync::Arc;

use burn::module::Module;
use burn::tensor::{Bytes, DType, Shape, TensorData};
use parking_lot::Mutex;

use super::assign::shard_region;
use super::fs::{FileSystem, Links, ReadFile};
use super::manifest::{Manifest, TensorEntry};
use super::matching::{self, Matching, SavedTensor, Targets};
use super::reader::{Reader, Want};
use super::region::transpose;
use super::weight_source::WeightSource;
use super::{CheckpointError, KeyReport, ReadOptions, ReadStats};
use crate::Result;
use crate::comm::agree_on_success;
use crate::memory::UninitBytes;
use crate::mesh::DeviceMesh;
use crate::param::NewValue;

/// Most files that are kept open.
const MAX_HELD: usize = 64;

/// The files of a manifest, and the mesh whose ranks read them.
#[derive(Debug, Clone)]
pub(super) struct TensorFiles {
    pub fs: Arc<dyn FileSystem>,
    pub folder: PathBuf,
    pub manifest: Arc<Manifest>,
    pub mesh: DeviceMesh,
    /// Treatment of files that are links.
    pub links: Links,
    read: ReadOptions,
    stats: Arc<Mutex<ReadStats>>,
    /// Files that stay open, in the order of the manifest; none, or all.
    held: Arc<[Arc<dyn ReadFile>]>,
}

impl TensorFiles {
    pub fn new(
        fs: Arc<dyn FileSystem>,
        folder: PathBuf,
        manifest: Manifest,
        mesh: &DeviceMesh,
        links: Links,
    ) -> Self {
        let manifest = Arc::new(manifest);
        let mesh = mesh.clone();
        let read = ReadOptions::new();
        Self {
            fs,
            folder,
            manifest,
            mesh,
            links,
            read,
            stats: Arc::default(),
            held: Arc::default(),
        }
    }

    pub fn with_read_options(self, read: ReadOptions) -> Self {
        Self { read, ..self }
    }

    /// Keeps all files open, so that they can be read once the checkpoint is removed. Does nothing
    /// if there are more than [`MAX_HELD`], if the process can open no more, or if one is missing:
    /// the load says so.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`] if the checkpoint is removed already.
    pub fn hold(mut self) -> io::Result<Self> {
        let files = &self.manifest.files;
        if files.len() > MAX_HELD {
            return Ok(self);
        }
        let mut held = Vec::new();
        for file in files {
            match self.fs.open(&file.path(&self.folder), self.links) {
                Ok(open) => held.push(open),
                // Its folder has got another name.
                Err(error)
                    if error.kind() == ErrorKind::NotFound
                        && !self.fs.is_dir(&self.folder, Links::Follow)? =>
                {
                    return Err(error);
                }
                // The load meets it, or not.
                Err(_) => return Ok(self),
            }
        }
        self.held = held.into();
        Ok(self)
    }

    /// Returns what this rank has read so far.
    pub fn stats(&self) -> ReadStats {
        self.stats.lock().clone()
    }

    /// Loads the tensors whose keys begin with `prefix` into a model, by the rest of their keys.
    ///
    /// # Collective
    /// Every rank of the mesh. Tensors are not communicated.
    ///
    /// # Errors
    /// Those of [`matching::load_model`] and of [`read_values`](Self::read_values), on every rank.
    pub fn load_model<M: Module>(
        &self,
        prefix: &str,
        model: M,
        matching: &Matching<'_>,
    ) -> Result<(M, KeyReport)> {
        let saved = self
            .below(prefix)
            .map(|(path, entry)| (path.to_owned(), saved_tensor(entry)))
            .collect();
        matching::load_model(model, &self.mesh, matching, &saved, |pairs, targets| {
            let read = self.read_values(
                pairs
                    .iter()
                    .map(|(path, source)| {
                        (
                            path.clone(),
                            format!("{prefix}{}", source.key()),
                            source.clone(),
                        )
                    })
                    .collect(),
                targets,
            );
            let values = agree_on_success(
                &self.mesh.all()?,
                "checkpoint_read",
                read.map_err(Into::into),
                CheckpointError::of,
            )?;
            Ok(values
                .into_iter()
                .map(|(path, data)| (path, NewValue::Data(data)))
                .collect())
        })
    }

    /// Returns the tensors whose keys begin with `prefix`, by the rest of their keys.
    pub fn below(&self, prefix: &str) -> impl Iterator<Item = (&str, &TensorEntry)> {
        let tensors = self.manifest.tensors.range(prefix.to_owned()..);
        tensors.map_while(move |(key, entry)| Some((key.strip_prefix(prefix)?, entry)))
    }

    /// Reads this rank's parts of values, by path, in the dtypes of `targets`. `sources` has the
    /// paths, the keys of the stored tensors, and what is taken of them.
    ///
    /// # Errors
    /// Those of [`read`](Self::read), and [`CheckpointError::IntegerRange`].
    pub fn read_values(
        &self,
        sources: Vec<(String, String, WeightSource)>,
        targets: &Targets,
    ) -> Result<BTreeMap<String, TensorData>, CheckpointError> {
        let want = |(path, key, source): &(String, String, WeightSource)| {
            let region = source.region(shard_region(&targets[path]));
            Want {
                key: key.clone(),
                region,
            }
        };
        let wants: Vec<_> = sources.iter().map(want).collect();
        let mut values = BTreeMap::new();
        self.read(&wants, |index, data| {
            let (path, key, source) = &sources[index];
            let data = if source.is_transposed() {
                transposed(&data)
            } else {
                data
            };
            let wanted = targets[path].dtype();
            check_range(key, &data, wanted)?;
            values.insert(
                path.clone(),
                if wanted == data.dtype() {
                    data
                } else {
                    data.convert_dtype(wanted)
                },
            );
            Ok(())
        })?;
        Ok(values)
    }

    /// Reads regions of tensors with dtypes that burn has, and passes them to `done` in their
    /// order.
    ///
    /// # Errors
    /// [`CheckpointError::Corrupt`], [`CheckpointError::Length`], [`CheckpointError::NotBool`],
    /// [`CheckpointError::Io`].
    pub fn read(
        &self,
        wants: &[Want],
        mut done: impl FnMut(usize, TensorData) -> Result<(), CheckpointError>,
    ) -> Result<(), CheckpointError> {
        let reader = Reader::new(
            &*self.fs,
            &self.folder,
            &self.manifest,
            &self.read,
            self.mesh.rank(),
        );
        let stats = reader.with_links(self.links).with_held(&self.held).read(
            wants,
            |index: usize, bytes: Bytes| {
                let Want { key, region } = &wants[index];
                let dtype = self.manifest.tensors[key]
                    .dtype
                    .dtype()
                    .expect("only dtypes of burn are wanted");
                if dtype.is_bool()
                    && let Some(&byte) = bytes.iter().find(|&&byte| byte > 1)
                {
                    return Err(CheckpointError::NotBool {
                        key: key.clone(),
                        byte,
                    });
                }
                done(
                    index,
                    TensorData::from_bytes(bytes, region.shape.clone(), dtype),
                )
            },
        )?;
        self.stats.lock().add(&stats);
        Ok(())
    }
}

/// Checks that integers are in the range of the dtype to which they are converted.
fn check_range(key: &str, data: &TensorData, wanted: DType) -> Result<(), CheckpointError> {
    let range = |dtype: DType| -> Option<RangeInclusive<i128>> {
        Some(match dtype {
            DType::I64 => i64::MIN.into()..=i64::MAX.into(),
            DType::I32 => i32::MIN.into()..=i32::MAX.into(),
            DType::I16 => i16::MIN.into()..=i16::MAX.into(),
            DType::I8 => i8::MIN.into()..=i8::MAX.into(),
            DType::U64 => u64::MIN.into()..=u64::MAX.into(),
            DType::U32 => u32::MIN.into()..=u32::MAX.into(),
            DType::U16 => u16::MIN.into()..=u16::MAX.into(),
            DType::U8 => u8::MIN.into()..=u8::MAX.into(),
            _ => return None,
        })
    };
    let (Some(from), Some(to)) = (range(data.dtype()), range(wanted)) else {
        return Ok(());
    };
    if to.contains(from.start()) && to.contains(from.end()) {
        return Ok(());
    }
    let wide = |value: i128| (!to.contains(&value)).then_some(value);
    let found = match data.dtype() {
        DType::U64 => data.iter::<u64>().find_map(|value| wide(value.into())),
        _ => data.iter::<i64>().find_map(|value| wide(value.into())),
    };
    let key = key.into();
    let dtype = wanted.name().into();
    found.map_or(Ok(()), |value| {
        Err(CheckpointError::IntegerRange {
            key,
            value: value.to_string(),
            dtype,
        })
    })
}

/// Returns the shape and dtype of a tensor in a manifest.
pub(super) fn saved_tensor(entry: &TensorEntry) -> SavedTensor {
    let dtype = entry.dtype.dtype().ok_or_else(|| entry.dtype.to_string());
    SavedTensor {
        shape: entry.shape.clone().into(),
        dtype,
    }
}

/// Returns the shape and dtype of a stored tensor that becomes one of burn.
///
/// # Errors
/// [`CheckpointError::StoredDType`] and [`CheckpointError::Dims`] if burn has no such tensors.
pub(super) fn readable(key: &str, entry: &TensorEntry) -> Result<(Shape, DType), CheckpointError> {
    let saved = saved_tensor(entry);
    saved.check_dims(key)?;
    let dtype = saved.dtype.map_err(|dtype| CheckpointError::StoredDType {
        key: key.into(),
        dtype,
    })?;
    Ok((saved.shape, dtype))
}

fn transposed(matrix: &TensorData) -> TensorData {
    let [rows, columns] = [0, 1].map(|dim| matrix.shape()[dim]);
    let size = matrix.dtype().size();
    let mut bytes = UninitBytes::at(None, size, rows * columns).initialized();
    transpose(matrix.as_bytes(), &mut bytes, [rows, columns], size);
    TensorData::from_bytes(bytes, [columns, rows], matrix.dtype())
}
