//! Headers of safetensors files: of those that a checkpoint consists of, and of those of other
//! origins, such as models of Hugging Face.
//!
//! ```text
//! 8 bytes      length of the JSON, little-endian
//! JSON         {"__metadata__":{..}, "weight":{"dtype":"F32","shape":[4,3],"data_offsets":[0,48]}, ..}, then spaces
//! data         of all tensors, without gaps, in the order of their offsets
//! ```
//!
//! A model in several files has a file `model.safetensors.index.json` with the name of the file of
//! each tensor. Files of other origins become a [`Manifest`] in which each tensor is one chunk
//! without checksums. It follows the same rules.

mod header;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use itertools::Itertools;

use super::CheckpointError;
use super::fs::{FileSystem, Links, read_all};
use super::manifest::{FileEntry, Manifest, MeshEntry};
use header::{LONGEST, header_len, parse_header, parse_index};
pub(super) use header::{METADATA, header};

/// Name of the index of a model in several files.
pub(super) const INDEX: &str = "model.safetensors.index.json";
/// Name of the file of a model in one.
const SINGLE: &str = "model.safetensors";

/// Reads the headers of a model's files, and returns their folder and what is in them. `path` is a
/// safetensors file, an index (`.json`), or a folder with `model.safetensors.index.json` or else
/// `model.safetensors`. Links are followed, but no name in the files leads out of the folder.
pub(super) fn open(
    fs: &dyn FileSystem,
    path: &Path,
    rank: usize,
) -> Result<(PathBuf, Manifest), CheckpointError> {
    let io = |action: &str, path: &Path, error: std::io::Error| {
        CheckpointError::io(rank, action, path, &error)
    };
    let path = match fs
        .is_dir(path, Links::Follow)
        .map_err(|error| io("open", path, error))?
    {
        false => path.to_owned(),
        true => {
            let entries = fs.list(path).map_err(|error| io("list", path, error))?;
            let has_index = entries.iter().any(|entry| entry.name == INDEX);
            path.join(if has_index { INDEX } else { SINGLE })
        }
    };
    let invalid = |path: &Path, reason: String| CheckpointError::Safetensors {
        path: path.into(),
        reason,
    };
    let dir = super::fs::parent(&path).to_owned();
    let index = match path.extension() {
        Some(extension) if extension == "json" => {
            let bytes = read_all(fs, &path, Links::Follow, LONGEST)
                .map_err(|error| io("read", &path, error))?;
            Some(parse_index(&bytes).map_err(|reason| invalid(&path, reason))?)
        }
        _ => None,
    };
    let mut manifest = match &index {
        Some(index) => Manifest::of_files(
            index
                .values()
                .sorted_unstable()
                .dedup()
                .map(|name| FileEntry::new(name, 0)),
        ),
        None => Manifest::of_files([FileEntry::of_name(path.file_name().unwrap_or_default())]),
    };
    // Before any path is made of the names.
    manifest
        .validate(false)
        .map_err(|error| invalid(&path, error.to_string()))?;
    for (file, entry) in manifest.files.iter_mut().enumerate() {
        let path = entry.path(&dir);
        let source = fs
            .open(&path, Links::Follow)
            .map_err(|error| io("open", &path, error))?;
        let len = source.len().map_err(|error| io("read", &path, error))?;
        let mut start = [0; 8];
        if len >= 8 {
            source
                .read_exact_at(&mut start, 0)
                .map_err(|error| io("read", &path, error))?;
        }
        let mut json = vec![0; header_len(start, len).map_err(|reason| invalid(&path, reason))?];
        source
            .read_exact_at(&mut json, 8)
            .map_err(|error| io("read", &path, error))?;
        let is_here = |key: &str| {
            index
                .as_ref()
                .is_none_or(|index| index.get(key).is_some_and(|of| *of == entry.name))
        };
        let tensors = parse_header(&json, len, file).map_err(|reason| invalid(&path, reason))?;
        entry.len = len;
        manifest
            .tensors
            .extend(tensors.into_iter().filter(|(key, _)| is_here(key)));
    }
    if let Some((key, name)) = index
        .iter()
        .flatten()
        .find(|(key, _)| !manifest.tensors.contains_key(*key))
    {
        return Err(invalid(
            &path,
            format!("it names `{name}` for `{key}`, which that file does not have"),
        ));
    }
    manifest
        .validate(false)
        .map_err(|error| invalid(&path, error.to_string()))?;
    Ok((dir, manifest))
}

impl Manifest {
    /// Returns a manifest of files of another origin, without tensors.
    fn of_files(files: impl IntoIterator<Item = FileEntry>) -> Self {
        Self {
            step: None,
            required_features: Vec::new(),
            software: String::new(),
            mesh: MeshEntry {
                shape: Vec::new(),
                names: Vec::new(),
            },
            files: files.into_iter().collect(),
            tensors: BTreeMap::new(),
            values: BTreeMap::new(),
            rank_values: BTreeMap::new(),
        }
    }
}
