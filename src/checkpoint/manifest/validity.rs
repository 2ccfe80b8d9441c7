//! Rules of a manifest. What follows them can be read without a large allocation, an overflow, or a
//! read outside of the folder or the files.
//!
//! 1. Names of files differ. They are letters, digits, `.`, `_` and `-`, and not `.` or `..`: no
//!    path leads elsewhere. Those of files of another origin are any single component of a path.
//! 2. The mesh has a name for each axis, no axis of length 0, and a number of ranks that fits.
//! 3. The bytes of a tensor fit an address, even if lengths of 0 count as 1.
//! 4. A chunk has elements, all of them of its tensor.
//! 5. The chunks of a tensor are disjoint and cover it.
//! 6. The bytes of a chunk are in its file, and no other chunk has them.
//! 7. A chunk has a checksum for each block, or none in files of another origin.
//! 8. A value of each rank is as many values as the mesh has ranks.

use std::path::{Component, Path};

use itertools::Itertools;

use super::super::region::Region;
use super::{BLOCK, ChunkEntry, Manifest, TensorEntry};

/// Reason why a manifest is not valid. The remedy is another checkpoint, unless the version
/// differs.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ManifestError {
    /// The bytes do not begin and end as those of a manifest.
    #[error("it is not a manifest, or its beginning or end is missing")]
    Frame,
    /// Another version of the format.
    #[error(
        "its format has version {found}, and this version of burn-dtensor reads up to version {known}. {}",
        match found > known {
            true => "Use a newer one",
            false => "There is no such version: the file was not written by burn-dtensor",
        }
    )]
    Version {
        /// Version of the manifest.
        found: u64,
        /// Version that this crate reads.
        known: u64,
    },
    /// The manifest needs what this version does not have.
    #[error(
        "it needs `{feature}`, which this version of burn-dtensor does not have. Use a newer one"
    )]
    Feature {
        /// Name of the feature.
        feature: String,
    },
    /// The contents have changed since they were written.
    #[error("its contents have the checksum {found:016x}, but {stored:016x} was written")]
    Checksum {
        /// Checksum in the file.
        stored: u64,
        /// Checksum of the contents.
        found: u64,
    },
    /// The contents are not the JSON of a manifest, or a key has two values.
    #[error("its contents are not as expected: {reason}")]
    Json {
        /// Message of the parser.
        reason: String,
    },
    /// The name of a file is not plain, or two files have it (rule 1).
    #[error("{name:?} is not the name of a file in the folder, or of two")]
    FileName {
        /// The name.
        name: String,
    },
    /// The mesh is impossible (rule 2).
    #[error("a mesh of shape {shape:?} with {names} names is impossible")]
    Mesh {
        /// Ranks in each axis.
        shape: Vec<usize>,
        /// Number of names.
        names: usize,
    },
    /// A tensor is larger than any memory (rule 3).
    #[error("the tensor `{key}` of shape {shape:?} is larger than any memory")]
    Shape {
        /// Key of the tensor.
        key: String,
        /// Shape of the tensor.
        shape: Vec<usize>,
    },
    /// A chunk is empty or not inside its tensor (rule 4).
    #[error(
        "the chunk at {offsets:?} of shape {shape:?} of `{key}` is empty or not inside of {tensor:?}"
    )]
    OutOfBounds {
        /// Key of the tensor.
        key: String,
        /// Offsets of the chunk.
        offsets: Vec<usize>,
        /// Shape of the chunk.
        shape: Vec<usize>,
        /// Shape of the tensor.
        tensor: Vec<usize>,
    },
    /// The chunks of a tensor leave elements out (rule 5).
    #[error("the chunks of `{key}` have {found} elements, but it has {elements}")]
    Coverage {
        /// Key of the tensor.
        key: String,
        /// Elements of the chunks.
        found: usize,
        /// Elements of the tensor.
        elements: usize,
    },
    /// Two chunks of a tensor share an element (rule 5).
    #[error("two chunks of `{key}` share elements, or are divided as no mesh divides a tensor")]
    Overlap {
        /// Key of the tensor.
        key: String,
    },
    /// The bytes of a chunk are not in a file (rule 6).
    #[error(
        "the chunk {region} of `{key}` has {bytes} bytes from byte {begin} on, which file {file} does not contain"
    )]
    Range {
        /// Key of the tensor.
        key: String,
        /// The chunk.
        region: String,
        /// Index of the file.
        file: usize,
        /// First byte in the file.
        begin: u64,
        /// Number of bytes.
        bytes: u64,
    },
    /// Two chunks share a byte of a file (rule 6).
    #[error("chunks of `{first}` and `{second}` share bytes of {file}")]
    Shared {
        /// Name of the file.
        file: String,
        /// Key of the chunk that begins first.
        first: String,
        /// Key of the other chunk.
        second: String,
    },
    /// A chunk has too many or too few checksums (rule 7).
    #[error("the chunk {region} of `{key}` has {found} checksums, but {blocks} blocks")]
    Checksums {
        /// Key of the tensor.
        key: String,
        /// The chunk.
        region: String,
        /// Number of checksums.
        found: usize,
        /// Number of blocks.
        blocks: usize,
    },
    /// A value of each rank is not one for each (rule 8).
    #[error("`{key}` has {found} values, but the mesh has {ranks} ranks")]
    RankValues {
        /// Key of the values.
        key: String,
        /// Number of values.
        found: usize,
        /// Number of ranks.
        ranks: usize,
    },
}

impl Manifest {
    /// Checks the rules. `checksummed` is false for files of another origin, for which rules 1 and
    /// 7 differ.
    pub fn validate(&self, checksummed: bool) -> Result<(), ManifestError> {
        self.validate_files(if checksummed { is_plain } else { is_component })?;
        let ranks = self.validate_mesh()?;
        for (key, tensor) in &self.tensors {
            self.validate_tensor(key, tensor, checksummed)?;
        }
        self.validate_bytes()?;
        match self
            .rank_values
            .iter()
            .find(|(_, values)| values.len() != ranks)
        {
            Some((key, values)) => Err(ManifestError::RankValues {
                key: key.clone(),
                found: values.len(),
                ranks,
            }),
            None => Ok(()),
        }
    }

    fn validate_files(&self, is_valid: fn(&str) -> bool) -> Result<(), ManifestError> {
        let names = self
            .files
            .iter()
            .map(|file| file.name.as_str())
            .sorted_unstable()
            .collect_vec();
        let twice = names
            .iter()
            .tuple_windows()
            .find_map(|(a, b)| (a == b).then_some(*a));
        match names.iter().copied().find(|name| !is_valid(name)).or(twice) {
            Some(name) => Err(ManifestError::FileName {
                name: name.to_owned(),
            }),
            None => Ok(()),
        }
    }

    /// Returns the number of ranks.
    fn validate_mesh(&self) -> Result<usize, ManifestError> {
        let shape = &self.mesh.shape;
        let names = self.mesh.names.len();
        let ranks = shape
            .iter()
            .try_fold(1usize, |ranks, &len| ranks.checked_mul(len));
        ranks
            .filter(|&ranks| ranks > 0 && names == shape.len())
            .ok_or_else(|| ManifestError::Mesh {
                shape: shape.clone(),
                names,
            })
    }

    fn validate_tensor(
        &self,
        key: &str,
        tensor: &TensorEntry,
        checksummed: bool,
    ) -> Result<(), ManifestError> {
        let bytes = tensor
            .shape
            .iter()
            .try_fold(tensor.dtype.bytes(), |bytes, &len| {
                bytes.checked_mul(len.max(1))
            });
        if bytes.is_none_or(|bytes| bytes > isize::MAX as usize) {
            return Err(ManifestError::Shape {
                key: key.to_owned(),
                shape: tensor.shape.clone(),
            });
        }
        let elements: usize = tensor.shape.iter().product();
        let mut found = 0usize;
        for chunk in &tensor.chunks {
            self.validate_chunk(key, tensor, chunk, checksummed)?;
            // Each has no more elements than the tensor, and none is without a place in memory.
            found = found.saturating_add(chunk.region.num_elements());
        }
        if !Region::are_disjoint(
            &mut tensor
                .chunks
                .iter()
                .map(|chunk| &chunk.region)
                .collect_vec(),
        ) {
            return Err(ManifestError::Overlap {
                key: key.to_owned(),
            });
        }
        if found != elements {
            return Err(ManifestError::Coverage {
                key: key.to_owned(),
                found,
                elements,
            });
        }
        Ok(())
    }

    fn validate_chunk(
        &self,
        key: &str,
        tensor: &TensorEntry,
        chunk: &ChunkEntry,
        checksummed: bool,
    ) -> Result<(), ManifestError> {
        let Region { offsets, shape } = &chunk.region;
        let inside = |((&offset, &len), &of): ((&usize, &usize), &usize)| {
            len > 0 && offset <= of && len <= of - offset
        };
        let dims = tensor.shape.len();
        if [offsets.len(), shape.len()] != [dims; 2]
            || !offsets.iter().zip(shape).zip(&tensor.shape).all(inside)
        {
            return Err(ManifestError::OutOfBounds {
                key: key.to_owned(),
                offsets: offsets.clone(),
                shape: shape.clone(),
                tensor: tensor.shape.clone(),
            });
        }
        let file = chunk.file;
        let begin = chunk.begin;
        let bytes = chunk.region.num_elements() * tensor.dtype.bytes();
        let end = begin.checked_add(bytes as u64);
        if self
            .files
            .get(file)
            .is_none_or(|file| end.is_none_or(|end| end > file.len))
        {
            let region = chunk.region.to_string();
            return Err(ManifestError::Range {
                key: key.to_owned(),
                region,
                file,
                begin,
                bytes: bytes as u64,
            });
        }
        let found = chunk.checksums.len();
        let blocks = if checksummed {
            bytes.div_ceil(BLOCK)
        } else {
            0
        };
        if found != blocks {
            let region = chunk.region.to_string();
            return Err(ManifestError::Checksums {
                key: key.to_owned(),
                region,
                found,
                blocks,
            });
        }
        Ok(())
    }

    fn validate_bytes(&self) -> Result<(), ManifestError> {
        let chunks = self
            .tensors
            .iter()
            .flat_map(|(key, tensor)| tensor.chunks.iter().map(move |c| (key, tensor, c)));
        let ranges =
            chunks.map(|(key, tensor, chunk)| (chunk.file, chunk.bytes(tensor.dtype), key));
        let ranges = ranges
            .sorted_unstable_by_key(|(file, bytes, _)| (*file, bytes.start))
            .collect_vec();
        let shared = ranges
            .iter()
            .tuple_windows()
            .find(|(a, b)| a.0 == b.0 && b.1.start < a.1.end);
        match shared {
            Some((a, b)) => Err(ManifestError::Shared {
                file: self.files[a.0].name.clone(),
                first: a.2.clone(),
                second: b.2.clone(),
            }),
            None => Ok(()),
        }
    }
}

/// Returns true if the name is a single component of a path on every system, and not `.` or `..`.
fn is_component(name: &str) -> bool {
    let components = Path::new(name).components();
    components.eq([Component::Normal(name.as_ref())]) && !name.contains(['/', '\\', '\0'])
}

fn is_plain(name: &str) -> bool {
    !matches!(name, "" | "." | "..")
        && name
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-'))
}
