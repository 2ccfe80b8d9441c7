//! Headers of safetensors files: of those that a checkpoint consists of, and of those of other origins, such as models of
//! Hugging Face.
//!
//! ```text
//! 8 bytes      length of the JSON, little-endian
//! JSON         {"__metadata__":{..}, "weight":{"dtype":"F32","shape":[4,3],"data_offsets":[0,48]}, ..}, then spaces
//! data         of all tensors, without gaps, in the order of their offsets
//! ```
//!
//! A model in several files has a file `model.safetensors.index.json` with the name of the file of each tensor. Files of
//! other origins become a [`Manifest`] in which each tensor is one chunk without checksums. It follows the same rules.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

use itertools::Itertools;
use safetensors::tensor::{Metadata, TensorInfo};
use serde::de::{Error, IgnoredAny, MapAccess, Visitor};
use serde::ser::SerializeMap;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::CheckpointError;
use super::fs::{FileSystem, Links, read_all};
use super::manifest::{ChunkEntry, FileEntry, Manifest, MeshEntry, StoredDType, TensorEntry, json};
use super::region::Region;

/// The data of a file that this crate writes begin at a multiple of this.
const ALIGNMENT: usize = 4096;

/// Most bytes of a header, as the crate `safetensors` has it.
const LONGEST: u64 = 100_000_000;

/// Name of the index of a model in several files, and of a model in one.
const INDEX: &str = "model.safetensors.index.json";
const SINGLE: &str = "model.safetensors";

/// Name of the entry of a header that is not a tensor.
const METADATA: &str = "__metadata__";

/// Returns the beginning of a file with these tensors, up to the first byte of data, and the first byte of each tensor.
/// The data begin at a multiple of 4096, and follow each other in the order of `tensors`.
///
/// # Panics
/// If two tensors have the same name, or one has that of the metadata.
pub(super) fn header(
    tensors: &[(String, StoredDType, Vec<usize>)],
    metadata: &BTreeMap<String, String>,
) -> (Vec<u8>, Vec<u64>) {
    let mut end = 0;
    let info = |(name, dtype, shape): &(String, StoredDType, Vec<usize>)| {
        let begin = end;
        end += shape.iter().product::<usize>() * dtype.bytes();
        (name.clone(), TensorInfo { dtype: dtype.safetensors(), shape: shape.clone(), data_offsets: (begin, end) })
    };
    let infos = tensors.iter().map(info).collect_vec();
    let names = infos.iter().map(|(name, _)| name.as_str()).chain([METADATA]);
    assert!(names.clone().all_unique(), "names of a header differ: {:?}", names.duplicates().collect_vec());

    let mut bytes = vec![0; 8];
    serde_json::to_writer(&mut bytes, &Header { metadata, infos: &infos }).expect("memory takes all bytes");
    bytes.resize(bytes.len().next_multiple_of(ALIGNMENT), b' ');
    let len = bytes.len() - 8;
    bytes[..8].copy_from_slice(&(len as u64).to_le_bytes());
    let begins = infos.iter().map(|(_, info)| (bytes.len() + info.data_offsets.0) as u64).collect();
    (bytes, begins)
}

struct Header<'a> {
    metadata: &'a BTreeMap<String, String>,
    infos: &'a [(String, TensorInfo)],
}

impl Serialize for Header<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.infos.len() + 1))?;
        map.serialize_entry(METADATA, self.metadata)?;
        self.infos.iter().try_for_each(|(name, info)| map.serialize_entry(name, info))?;
        map.end()
    }
}

/// Reads the headers of a model's files, and returns their folder and what is in them. `path` is a safetensors file, an
/// index (`.json`), or a folder with `model.safetensors.index.json` or else `model.safetensors`. Links are followed, but no
/// name in the files leads out of the folder.
pub(super) fn open(fs: &dyn FileSystem, path: &Path, rank: usize) -> Result<(PathBuf, Manifest), CheckpointError> {
    let io = |action: &str, path: &Path, error: std::io::Error| CheckpointError::Io {
        rank,
        action: action.into(),
        path: path.into(),
        reason: error.to_string(),
    };
    let path = match fs.is_dir(path, Links::Follow).map_err(|error| io("open", path, error))? {
        false => path.to_owned(),
        true => {
            let entries = fs.list(path).map_err(|error| io("list", path, error))?;
            let has_index = entries.iter().any(|entry| entry.name == INDEX);
            path.join(if has_index { INDEX } else { SINGLE })
        }
    };
    let invalid = |path: &Path, reason: String| CheckpointError::Safetensors { path: path.into(), reason };
    let dir = super::fs::parent(&path).to_owned();
    let index = match path.extension() {
        Some(extension) if extension == "json" => {
            let bytes = read_all(fs, &path, Links::Follow, LONGEST).map_err(|error| io("read", &path, error))?;
            Some(parse_index(&bytes).map_err(|reason| invalid(&path, reason))?)
        }
        _ => None,
    };
    let name = || path.file_name().and_then(|name| name.to_str()).map(str::to_owned);
    let names = match &index {
        Some(index) => index.values().cloned().sorted_unstable().dedup().collect_vec(),
        None => vec![name().ok_or_else(|| invalid(&path, "its name is not UTF-8".into()))?],
    };
    let mut manifest = Manifest::of_names(&names);
    // Before any path is made of the names.
    manifest.validate(false).map_err(|error| invalid(&path, error.to_string()))?;
    for (file, name) in names.iter().enumerate() {
        let path = dir.join(name);
        let source = fs.open(&path, Links::Follow).map_err(|error| io("open", &path, error))?;
        let len = source.len().map_err(|error| io("read", &path, error))?;
        let mut start = [0; 8];
        if len >= 8 {
            source.read_exact_at(&mut start, 0).map_err(|error| io("read", &path, error))?;
        }
        let header = header_len(start, len).map_err(|reason| invalid(&path, reason))?;
        let mut json = vec![0; header];
        source.read_exact_at(&mut json, 8).map_err(|error| io("read", &path, error))?;
        let is_here = |key: &str| index.as_ref().is_none_or(|index| index.get(key).is_some_and(|of| of == name));
        let tensors = parse_header(&json, len, file).map_err(|reason| invalid(&path, reason))?;
        manifest.files[file].len = len;
        manifest.tensors.extend(tensors.into_iter().filter(|(key, _)| is_here(key)));
    }
    if let Some((key, name)) = index.iter().flatten().find(|(key, _)| !manifest.tensors.contains_key(*key)) {
        return Err(invalid(&path, format!("it names `{name}` for `{key}`, which that file does not have")));
    }
    manifest.validate(false).map_err(|error| invalid(&path, error.to_string()))?;
    Ok((dir, manifest))
}

impl Manifest {
    /// Returns a manifest of files of another origin, without tensors.
    fn of_names(names: &[String]) -> Self {
        let files = names.iter().map(|name| FileEntry { name: name.clone(), len: 0 }).collect();
        Self {
            step: None,
            software: String::new(),
            mesh: MeshEntry { shape: Vec::new(), names: Vec::new() },
            files,
            tensors: BTreeMap::new(),
            values: BTreeMap::new(),
            rank_values: BTreeMap::new(),
        }
    }
}

/// Returns the length of the JSON of a file with `len` bytes that begins with `start`.
fn header_len(start: [u8; 8], len: u64) -> Result<usize, String> {
    let header = u64::from_le_bytes(start);
    if len < 8 || header > LONGEST.min(len - 8) {
        return Err(format!("it has {len} bytes, but its header has {header}; at most {LONGEST} are read"));
    }
    Ok(header as usize)
}

/// Reads the JSON of the header of a file with `len` bytes: the tensors in it, as tensors of the manifest's file `file`.
/// Allocates at most a constant times its length.
pub(crate) fn parse_header(json: &[u8], len: u64, file: usize) -> Result<BTreeMap<String, TensorEntry>, String> {
    let Tensors(infos) = serde_json::from_slice(json).map_err(|error| error.to_string())?;
    let data = 8 + json.len() as u64;
    let entry = |(key, info): (&String, &TensorInfo)| {
        let dtype = StoredDType::try_from(info.dtype).map_err(|reason| format!("`{key}`: {reason}"))?;
        let chunk = ChunkEntry {
            region: Region::full(&info.shape),
            file,
            begin: data + info.data_offsets.0 as u64,
            checksums: Vec::new(),
        };
        let chunks = if chunk.region.is_empty() { Vec::new() } else { vec![chunk] };
        Ok((key.clone(), TensorEntry { shape: info.shape.clone(), dtype, placements: String::new(), chunks }))
    };
    // The crate checks that lengths fit shapes, and that no byte is of no tensor or of two.
    let by_offset = infos.iter().sorted_by_key(|(_, info)| info.data_offsets);
    let by_offset = by_offset.map(|(key, info)| (key.clone(), info.clone())).collect();
    let metadata = Metadata::new(None, by_offset).map_err(|error| error.to_string())?;
    if data.checked_add(metadata.data_len() as u64) != Some(len) {
        return Err(format!("it has {len} bytes, but header and data are {data} and {}", metadata.data_len()));
    }
    infos.iter().map(entry).collect()
}

/// The tensors of a header by name.
struct Tensors(BTreeMap<String, TensorInfo>);

impl<'de> Deserialize<'de> for Tensors {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;

        impl<'de> Visitor<'de> for Entries {
            type Value = Tensors;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a map of tensors")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Tensors, A::Error> {
                let mut tensors = BTreeMap::new();
                while let Some(name) = access.next_key::<String>()? {
                    if name == METADATA {
                        access.next_value::<IgnoredAny>()?;
                    } else if tensors.contains_key(&name) {
                        return Err(A::Error::custom(format_args!("two tensors `{name}`")));
                    } else {
                        tensors.insert(name, access.next_value()?);
                    }
                }
                Ok(Tensors(tensors))
            }
        }

        deserializer.deserialize_map(Entries)
    }
}

/// Reads an index: the name of the file of each tensor.
pub(crate) fn parse_index(bytes: &[u8]) -> Result<BTreeMap<String, String>, String> {
    #[derive(Deserialize)]
    struct Index {
        #[serde(deserialize_with = "json::unique")]
        weight_map: BTreeMap<String, String>,
    }

    let index: Index = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
    Ok(index.weight_map)
}

#[cfg(test)]
mod tests;
