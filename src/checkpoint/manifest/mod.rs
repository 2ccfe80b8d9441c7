//! [`Manifest`]: which files of a checkpoint have which elements of which tensors.
//!
//! The file `manifest.json` is one line of JSON, and frame and contents are separated by their
//! bytes, so that the checksum is compared before anything else is read:
//!
//! ```text
//! {"format":"burn-dtensor checkpoint","version":1,"checksum":"<XXH3-64>","manifest":<contents>}
//!
//! contents   {"step":100, "software":"burn-dtensor 0.1.0", "mesh":{"shape":[2],"names":["shard"]},
//!             "files":[{"name":"rank-00000.safetensors","len":1184}, ..],
//!             "tensors":{"model.weight":{"shape":[8,4],"dtype":"F32","placements":"[Shard(0)]","chunks":[..]}, ..},
//!             "values":{..}, "rank_values":{..}}
//! chunk      [[0,0], [4,4], 0, 160, "<XXH3-64>.."]
//!            offsets, shape, index of the file, first byte in the file, checksum of each MiB of its bytes
//! ```
//!
//! A manifest that was [parsed](Manifest::parse) follows the rules of [`validity`].
//!
//! # Versions
//!
//! 1. Every version of this crate reads what every earlier version wrote.
//! 2. A reader ignores fields that it does not know, unless their names are in `required_features`:
//!    then the checkpoint is an error that names the feature.
//! 3. The version of the frame changes only if frame, checksum or the meaning of a field does.
//!    [`Manifest::parse`] has an arm for each version.

pub(super) mod json;
#[cfg(test)]
mod tests;
mod validity;

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::ops::Range;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use twox_hash::XxHash3_64;

use super::region::Region;
use json::Checksums;
pub(crate) use validity::ManifestError;

/// Bytes of a chunk that one checksum covers, counted from its first byte. The last block of a
/// chunk may be shorter.
pub(crate) const BLOCK: usize = 1 << 20;

/// The version that this crate writes.
const VERSION: u64 = 1;

/// Names in [`Manifest::required_features`] that this crate knows.
const FEATURES: [&str; 0] = [];

// The frame without version, checksum and contents.
const BEFORE_VERSION: &str = r#"{"format":"burn-dtensor checkpoint","version":"#;
const BEFORE_CHECKSUM: &str = r#","checksum":""#;
const BEFORE_CONTENTS: &str = r#"","manifest":"#;
const AFTER_CONTENTS: &str = "}\n";

/// Returns the checksum of each block of a chunk's bytes.
pub(crate) fn block_checksums(bytes: &[u8]) -> Vec<u64> {
    bytes.chunks(BLOCK).map(XxHash3_64::oneshot).collect()
}

/// The manifest of a checkpoint.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Manifest {
    /// Step of the training.
    pub step: Option<u64>,
    /// Names of what a reader must know to read the checkpoint: fields that cannot be left out.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub required_features: Vec<String>,
    /// Name and version of the crate that wrote the checkpoint.
    pub software: String,
    /// Mesh of the ranks that wrote it.
    pub mesh: MeshEntry,
    /// Files with the data of tensors.
    pub files: Vec<FileEntry>,
    /// Tensors by key.
    #[serde(deserialize_with = "json::unique")]
    pub tensors: BTreeMap<String, TensorEntry>,
    /// Values by key that are the same on all ranks, as text.
    #[serde(deserialize_with = "json::unique")]
    pub values: BTreeMap<String, String>,
    /// Values by key of which each rank of the mesh has its own, as text.
    #[serde(deserialize_with = "json::unique")]
    pub rank_values: BTreeMap<String, Vec<String>>,
}

/// The field of a manifest that says why the others cannot be read.
#[derive(Deserialize)]
struct Required {
    #[serde(default)]
    required_features: Vec<String>,
}

/// A mesh in a manifest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct MeshEntry {
    /// Ranks in each mesh axis.
    pub shape: Vec<usize>,
    /// Name of each mesh axis.
    pub names: Vec<String>,
}

/// A file in a manifest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct FileEntry {
    /// Name in the folder of the checkpoint.
    pub name: String,
    /// Length in bytes.
    pub len: u64,
    /// The name if it is not UTF-8, as that of a file of another origin may be. `name` then has
    /// U+FFFD for other bytes.
    #[serde(skip)]
    pub other_name: Option<OsString>,
}

impl FileEntry {
    pub fn new(name: impl Into<String>, len: u64) -> Self {
        Self {
            name: name.into(),
            len,
            other_name: None,
        }
    }

    /// Returns the entry of a file of another origin, whose length is not known yet.
    pub fn of_name(name: &OsStr) -> Self {
        let text = name.to_string_lossy();
        let other_name = name.to_str().is_none().then(|| name.to_owned());
        Self {
            name: text.into(),
            len: 0,
            other_name,
        }
    }

    /// Returns the path of the file in the folder `dir`.
    pub fn path(&self, dir: &Path) -> PathBuf {
        dir.join(self.other_name.as_deref().unwrap_or(self.name.as_ref()))
    }
}

/// A tensor in a manifest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct TensorEntry {
    /// Global shape.
    pub shape: Vec<usize>,
    /// Data type of the elements.
    pub dtype: StoredDType,
    /// Placements when it was written, for people to read.
    pub placements: String,
    /// Chunks that cover the tensor.
    pub chunks: Vec<ChunkEntry>,
}

/// A chunk in a manifest: a region of a tensor, row-major and little-endian in one file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ChunkEntry {
    /// Elements of the tensor.
    pub region: Region,
    /// Index of the file.
    pub file: usize,
    /// First byte in the file.
    pub begin: u64,
    /// Checksum of each block. Of a file of another origin, none.
    pub checksums: Vec<u64>,
}

/// A data type in files: one of safetensors whose elements have a number of bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "safetensors::Dtype")]
pub(crate) struct StoredDType(safetensors::Dtype);

impl StoredDType {
    /// Returns the number of bytes of an element.
    pub fn bytes(self) -> usize {
        self.0.bitsize() / 8
    }

    /// Returns the data type of safetensors.
    pub fn safetensors(self) -> safetensors::Dtype {
        self.0
    }
}

impl TryFrom<safetensors::Dtype> for StoredDType {
    type Error = String;

    fn try_from(dtype: safetensors::Dtype) -> Result<Self, String> {
        let has_bytes = dtype.bitsize().is_multiple_of(8);
        if has_bytes {
            Ok(Self(dtype))
        } else {
            Err(format!(
                "elements of the dtype {dtype} have a fraction of a byte"
            ))
        }
    }
}

impl std::fmt::Display for StoredDType {
    /// Writes the name that safetensors gives it.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

impl ChunkEntry {
    /// Returns the bytes of the file that the chunk has as part of a tensor of `dtype`.
    pub fn bytes(&self, dtype: StoredDType) -> Range<u64> {
        self.begin..self.begin + (self.region.num_elements() * dtype.bytes()) as u64
    }
}

impl Serialize for ChunkEntry {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Self {
            region: Region { offsets, shape },
            file,
            begin,
            checksums,
        } = self;
        (offsets, shape, file, begin, Checksums::from(&**checksums)).serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for ChunkEntry {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let (offsets, shape, file, begin, checksums) = Deserialize::deserialize(deserializer)?;
        Ok(Self {
            region: Region { offsets, shape },
            file,
            begin,
            checksums: Checksums::into_vec(checksums),
        })
    }
}

impl Manifest {
    /// Returns the contents of the file.
    pub fn to_bytes(&self) -> Vec<u8> {
        let contents = serde_json::to_vec(self).expect("the keys of all maps are text");
        let checksum = XxHash3_64::oneshot(&contents);
        let frame =
            format!("{BEFORE_VERSION}{VERSION}{BEFORE_CHECKSUM}{checksum:016x}{BEFORE_CONTENTS}");
        [frame.as_bytes(), &contents, AFTER_CONTENTS.as_bytes()].concat()
    }

    /// Reads the contents of the file. Allocates at most a constant times their length.
    ///
    /// # Errors
    /// Fails if the bytes are not those of a manifest, if they have changed since, or if what they
    /// describe cannot be read safely.
    pub fn parse(bytes: &[u8]) -> Result<Self, ManifestError> {
        let (version, checksum, contents) = frame(bytes).ok_or(ManifestError::Frame)?;
        match version {
            VERSION => {}
            found => {
                return Err(ManifestError::Version {
                    found,
                    known: VERSION,
                });
            }
        }
        let found = XxHash3_64::oneshot(contents.as_bytes());
        if found != checksum {
            return Err(ManifestError::Checksum {
                stored: checksum,
                found,
            });
        }
        let parsed = serde_json::from_str::<Self>(contents);
        let required = match &parsed {
            Ok(manifest) => manifest.required_features.clone(),
            // A feature may be why.
            Err(_) => serde_json::from_str(contents).map_or_else(
                |_| Vec::new(),
                |Required { required_features }| required_features,
            ),
        };
        let unknown = |name: &String| !FEATURES.contains(&name.as_str());
        if let Some(feature) = required.into_iter().find(unknown) {
            return Err(ManifestError::Feature { feature });
        }
        let manifest = parsed.map_err(|error| ManifestError::Json {
            reason: error.to_string(),
        })?;
        manifest.validate(true)?;
        Ok(manifest)
    }
}

/// Returns version, checksum and contents.
fn frame(bytes: &[u8]) -> Option<(u64, u64, &str)> {
    let text = str::from_utf8(bytes).ok()?;
    let (version, rest) = text
        .strip_prefix(BEFORE_VERSION)?
        .split_once(BEFORE_CHECKSUM)?;
    let (checksum, rest) = rest.split_once(BEFORE_CONTENTS)?;
    let contents = rest.strip_suffix(AFTER_CONTENTS)?;
    Some((version.parse().ok()?, json::checksum(checksum)?, contents))
}
