//! [`inspect`]: what a checkpoint contains, for people.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

use itertools::Itertools;
use serde::{Serialize, Serializer};

use super::CheckpointError;
use super::fs::{self, FileSystem};
use super::load::read_manifest;
use super::manifest::{Manifest, TensorEntry};
use super::save_plan::rank_of_file;
use super::state::decode;
use crate::dtensor::{Grid, draw_grid};

/// Description of a checkpoint, as [`inspect`] returns it. With serde it becomes JSON.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct CheckpointSummary {
    /// Folder of the checkpoint.
    #[serde(serialize_with = "as_text")]
    pub path: PathBuf,
    /// Number of training steps after which it was saved.
    pub step: Option<u64>,
    /// Name and version of the crate that wrote it.
    pub software: String,
    /// Name and size of each dimension of the mesh that wrote it.
    pub mesh: Vec<(String, usize)>,
    /// Files with the data of tensors.
    pub files: Vec<FileSummary>,
    /// Tensors by key.
    pub tensors: BTreeMap<String, TensorSummary>,
    /// Values by key, as text.
    pub values: BTreeMap<String, String>,
    /// Values by key of which each rank has its own, as text.
    pub rank_values: BTreeMap<String, Vec<String>>,
}

/// A file of a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct FileSummary {
    /// Name in the folder.
    pub name: String,
    /// Length in bytes.
    pub bytes: u64,
    /// Rank of the mesh that wrote it, counted in the order of the mesh.
    pub rank: usize,
}

/// A tensor of a checkpoint.
///
/// [`Display`](fmt::Display) writes its size, and which rank wrote which part of it:
///
/// ```text
/// [6, 4] F32, 96 bytes, [S(0)]
///
///        0..4
///      +------+
/// 0..3 | 0    |
///      +------+
/// 3..6 | 1    |
///      +------+
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct TensorSummary {
    /// Global shape.
    pub shape: Vec<usize>,
    /// Data type, by the name that safetensors gives it.
    pub dtype: String,
    /// Placements when it was saved.
    pub placements: String,
    /// Number of bytes.
    pub bytes: u64,
    /// Parts in which it is stored.
    pub chunks: Vec<ChunkSummary>,
}

/// A part of a tensor in a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct ChunkSummary {
    /// First element in each dimension.
    pub offsets: Vec<usize>,
    /// Number of elements in each dimension.
    pub shape: Vec<usize>,
    /// Name of the file.
    pub file: String,
    /// Rank that wrote it.
    pub rank: usize,
    /// First byte in the file.
    pub begin: u64,
    /// Number of bytes.
    pub bytes: u64,
}

/// Returns what the checkpoint in the folder `path` contains. Only its manifest is read.
///
/// Local: needs no launch.
///
/// # Errors
/// [`CheckpointError::Incomplete`] for a folder without a manifest, [`CheckpointError::Manifest`],
/// [`CheckpointError::Io`].
pub fn inspect(path: impl AsRef<Path>) -> Result<CheckpointSummary, CheckpointError> {
    inspect_in(&*fs::real(), path.as_ref())
}

pub(super) fn inspect_in(
    fs: &dyn FileSystem,
    path: &Path,
) -> Result<CheckpointSummary, CheckpointError> {
    let (manifest, _) = read_manifest(fs, path, 0)?;
    let tensor =
        |(key, entry): (&String, &TensorEntry)| (key.clone(), TensorSummary::new(entry, &manifest));
    let of_ranks = |(key, values): (&String, &Vec<String>)| {
        (
            key.clone(),
            values.iter().map(|value| text(value)).collect(),
        )
    };
    let file = |(index, file): (usize, &super::manifest::FileEntry)| FileSummary {
        name: file.name.clone(),
        bytes: file.len,
        rank: rank_of_file(&file.name).unwrap_or(index),
    };
    Ok(CheckpointSummary {
        path: path.into(),
        step: manifest.step,
        software: manifest.software.clone(),
        mesh: manifest
            .mesh
            .names
            .iter()
            .cloned()
            .zip(manifest.mesh.shape.iter().copied())
            .collect(),
        files: manifest.files.iter().enumerate().map(file).collect(),
        tensors: manifest.tensors.iter().map(tensor).collect(),
        values: manifest
            .values
            .iter()
            .map(|(key, value)| (key.clone(), text(value)))
            .collect(),
        rank_values: manifest.rank_values.iter().map(of_ranks).collect(),
    })
}

impl CheckpointSummary {
    /// Returns the bytes of tensors that each rank of the mesh wrote, up to the last that wrote
    /// any.
    pub fn bytes_by_rank(&self) -> Vec<u64> {
        // A manifest may claim any mesh: only ranks that wrote something count.
        const MOST: usize = 1 << 20;
        let last = self
            .files
            .iter()
            .map(|file| file.rank)
            .filter(|&rank| rank < MOST)
            .max();
        let mut bytes = vec![0; last.map_or(0, |last| last + 1)];
        for chunk in self.tensors.values().flat_map(|tensor| &tensor.chunks) {
            if let Some(of_rank) = bytes.get_mut(chunk.rank) {
                *of_rank += chunk.bytes;
            }
        }
        bytes
    }
}

impl TensorSummary {
    fn new(entry: &TensorEntry, manifest: &Manifest) -> Self {
        let size = entry.dtype.bytes();
        let chunk = |chunk: &super::manifest::ChunkEntry| {
            let name = &manifest.files[chunk.file].name;
            ChunkSummary {
                offsets: chunk.region.offsets.clone(),
                shape: chunk.region.shape.clone(),
                file: name.clone(),
                rank: rank_of_file(name).unwrap_or(chunk.file),
                begin: chunk.begin,
                bytes: (chunk.region.num_elements() * size) as u64,
            }
        };
        Self {
            shape: entry.shape.clone(),
            dtype: entry.dtype.to_string(),
            placements: entry.placements.clone(),
            bytes: (entry.shape.iter().product::<usize>() * size) as u64,
            chunks: entry.chunks.iter().map(chunk).collect(),
        }
    }

    /// Returns the drawing, unless the tensor is divided in more than two dimensions, or has none.
    fn grid(&self) -> Option<Grid> {
        let divided = (0..self.shape.len())
            .filter(|&dim| self.chunks.iter().any(|c| c.shape[dim] < self.shape[dim]));
        let slices = |chunk: &ChunkSummary| {
            let slices = chunk
                .offsets
                .iter()
                .zip(&chunk.shape)
                .map(|(&offset, &len)| offset..offset + len);
            (chunk.rank, slices.collect())
        };
        Grid::new(
            &self.shape,
            divided.collect(),
            self.chunks.iter().map(slices),
        )
        .filter(|_| !self.shape.is_empty())
    }
}

impl fmt::Display for TensorSummary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            shape,
            dtype,
            placements,
            bytes,
            chunks,
        } = self;
        writeln!(f, "{shape:?} {dtype}, {bytes} bytes, {placements}")?;
        match self.grid() {
            _ if chunks.is_empty() => Ok(()),
            Some(grid) => f.write_str(&draw_grid(&grid, shape.len())),
            None => writeln!(
                f,
                "written by {}",
                chunks
                    .iter()
                    .map(|chunk| chunk.rank)
                    .sorted()
                    .dedup()
                    .join(", ")
            ),
        }
    }
}

/// Serializes a path as people read it: JSON has no other bytes than those of text.
fn as_text<S: Serializer>(path: &Path, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(&path.display())
}

/// Returns a stored value as text, much like JSON.
fn text(value: &str) -> String {
    let decoded: Result<ciborium::Value, _> = decode("", value);
    decoded.map_or_else(|_| value.to_string(), |value| cbor_text(&value))
}

fn cbor_text(value: &ciborium::Value) -> String {
    use ciborium::Value as Cbor;

    match value {
        Cbor::Null => "null".into(),
        Cbor::Bool(value) => value.to_string(),
        Cbor::Integer(value) => i128::from(*value).to_string(),
        Cbor::Float(value) => format!("{value:?}"),
        Cbor::Text(value) => format!("{value:?}"),
        Cbor::Bytes(bytes) => format!("{} bytes", bytes.len()),
        Cbor::Array(values) => format!("[{}]", values.iter().map(cbor_text).join(", ")),
        Cbor::Map(entries) => {
            let entry =
                |(key, value): &(Cbor, Cbor)| format!("{}: {}", cbor_text(key), cbor_text(value));
            format!("{{{}}}", entries.iter().map(entry).join(", "))
        }
        other => format!("{other:?}"),
    }
}
