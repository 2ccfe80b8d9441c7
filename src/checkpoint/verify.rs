//! [`verify`]: finds the damaged blocks of a checkpoint.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::thread;

use itertools::Itertools;
use twox_hash::XxHash3_64;

use super::fs::{self, FileSystem, Links, ReadFile};
use super::load::read_manifest;
use super::manifest::{BLOCK, ChunkEntry, Manifest};
use super::save_plan::stored_name;
use super::state::decode;
use super::{CheckpointError, ReadOptions, safetensors_file};

/// Blocks that are read together.
const BLOCKS: usize = 4;

/// Result of [`verify`].
#[derive(Debug, Clone, Default, PartialEq)]
#[non_exhaustive]
pub struct Verification {
    /// Bytes that were read and compared with checksums.
    pub bytes: u64,
    /// Values that cannot be read, damaged blocks, and files that are missing or have another length
    /// or header, by file and position.
    pub damage: Vec<CheckpointError>,
}

impl Verification {
    /// Returns true if nothing is damaged.
    pub fn is_intact(&self) -> bool {
        self.damage.is_empty()
    }
}

/// Reads all files of the checkpoint in the folder `path`, compares every block of 1 MiB with its
/// checksum and every header with the manifest, reads all values, and lists all damage.
///
/// `progress` is called with the bytes that were read so far and the bytes of all tensors.
///
/// Local: needs no launch. Of `options`, the number of threads counts.
///
/// # Errors
/// [`CheckpointError::Incomplete`] for a folder without a manifest, [`CheckpointError::Manifest`]
/// for a damaged one, and [`CheckpointError::Io`] if it cannot be read.
pub fn verify(
    path: impl AsRef<Path>,
    options: &ReadOptions,
    progress: impl FnMut(u64, u64),
) -> Result<Verification, CheckpointError> {
    verify_in(&*fs::real(), path.as_ref(), options, progress)
}

pub(super) fn verify_in(
    fs: &dyn FileSystem,
    dir: &Path,
    options: &ReadOptions,
    mut progress: impl FnMut(u64, u64),
) -> Result<Verification, CheckpointError> {
    let (manifest, _) = read_manifest(fs, dir, 0)?;
    let values = damaged_values(&manifest);
    let files = (0..manifest.files.len())
        .map(|file| check(fs, dir, &manifest, file))
        .collect_vec();
    let tasks = tasks(&manifest, dir, &files);
    let total = tasks.iter().map(BlockRange::len).sum();
    let mut found: Vec<_> = files
        .iter()
        .enumerate()
        .filter_map(|(file, is)| Some(((file, 0), is.as_ref().err()?.clone())))
        .collect();
    let (send, receive) = mpsc::channel();
    let next = AtomicUsize::new(0);
    thread::scope(|scope| {
        for started in 0..options.threads.clamp(1, tasks.len().max(1)) {
            let send = send.clone();
            let next = &next;
            let tasks = &tasks;
            let thread = thread::Builder::new().spawn_scoped(scope, move || {
                let mut buffer = vec![0; BLOCKS * BLOCK];
                let mut opened = None;
                while let Some(task) = tasks.get(next.fetch_add(1, Ordering::Relaxed)) {
                    // The other end is dropped if `progress` panics.
                    if send
                        .send((task, task.run(fs, &mut opened, &mut buffer)))
                        .is_err()
                    {
                        return;
                    }
                }
            });
            match thread {
                Ok(_) => {}
                Err(error) if started == 0 => return Err(io("start a thread to read", dir, error)),
                Err(_) => break,
            }
        }
        drop(send);
        let mut done = 0;
        for (task, damage) in receive {
            done += task.len();
            found.extend(
                damage
                    .into_iter()
                    .map(|error| ((task.chunk.file, task.bytes().start), error)),
            );
            progress(done, total);
        }
        Ok(())
    })?;
    found.sort_by_key(|(place, _)| *place);
    Ok(Verification {
        bytes: total,
        damage: values
            .into_iter()
            .chain(found.into_iter().map(|(_, error)| error))
            .collect(),
    })
}

/// Returns an error for each value that cannot be read.
fn damaged_values(manifest: &Manifest) -> Vec<CheckpointError> {
    let of_ranks = manifest
        .rank_values
        .iter()
        .flat_map(|(key, values)| values.iter().map(move |value| (key, value)));
    manifest
        .values
        .iter()
        .chain(of_ranks)
        .filter_map(|(key, value)| decode::<ciborium::Value>(key, value).err())
        .collect()
}

/// A file, by its index in the manifest.
type OpenFile = (usize, Arc<dyn ReadFile>);

/// Consecutive blocks of a chunk.
struct BlockRange<'a> {
    path: PathBuf,
    key: &'a str,
    chunk: &'a ChunkEntry,
    /// Bytes of the chunk.
    len: usize,
    blocks: Range<usize>,
}

/// Returns the blocks of all files that are as the manifest says, in the order in which they lie in
/// them.
fn tasks<'a>(
    manifest: &'a Manifest,
    dir: &Path,
    files: &[Result<(), CheckpointError>],
) -> Vec<BlockRange<'a>> {
    let chunks = manifest
        .tensors
        .iter()
        .flat_map(|(key, tensor)| tensor.chunks.iter().map(move |c| (key, tensor, c)));
    let chunks = chunks.sorted_unstable_by_key(|(.., chunk)| (chunk.file, chunk.begin));
    let of_chunk =
        |(key, tensor, chunk): (&'a String, &super::manifest::TensorEntry, &'a ChunkEntry)| {
            let (file, path) = (&files[chunk.file], manifest.files[chunk.file].path(dir));
            let (len, count) = (
                chunk.region.num_elements() * tensor.dtype.bytes(),
                chunk.checksums.len(),
            );
            file.iter().flat_map(move |()| {
                let path = path.clone();
                (0..count).step_by(BLOCKS).map(move |first| {
                    let blocks = first..(first + BLOCKS).min(count);
                    BlockRange {
                        path: path.clone(),
                        key,
                        chunk,
                        len,
                        blocks,
                    }
                })
            })
        };
    chunks.flat_map(of_chunk).collect()
}

impl BlockRange<'_> {
    /// Returns the bytes in the file.
    fn bytes(&self) -> Range<u64> {
        let byte = |block: usize| self.chunk.begin + (block * BLOCK).min(self.len) as u64;
        byte(self.blocks.start)..byte(self.blocks.end)
    }

    fn len(&self) -> u64 {
        self.bytes().end - self.bytes().start
    }

    /// Reads the blocks, and returns an error for each that is damaged. `opened` is the file that
    /// the thread read last: each thread keeps one open, since there may be more files than a
    /// process may open.
    fn run(
        &self,
        fs: &dyn FileSystem,
        opened: &mut Option<OpenFile>,
        buffer: &mut [u8],
    ) -> Vec<CheckpointError> {
        let begin = self.bytes().start;
        let buffer = &mut buffer[..self.len() as usize];
        if opened
            .as_ref()
            .is_none_or(|(file, _)| *file != self.chunk.file)
        {
            match fs.open(&self.path, Links::Refuse) {
                Ok(file) => *opened = Some((self.chunk.file, file)),
                Err(error) => return vec![io("open", &self.path, error)],
            }
        }
        let (_, file) = opened.as_ref().expect("opened above");
        if let Err(error) = file.read_exact_at(buffer, begin) {
            return vec![io("read", &self.path, error)];
        }
        let blocks = buffer
            .chunks(BLOCK)
            .zip(&self.chunk.checksums[self.blocks.clone()])
            .enumerate();
        let damaged =
            blocks.filter(|(_, (bytes, checksum))| XxHash3_64::oneshot(bytes) != **checksum);
        let error = |(index, (bytes, _)): (usize, (&[u8], &u64))| {
            let first = begin + (index * BLOCK) as u64;
            let path = self.path.clone();
            let key = self.key.to_owned();
            CheckpointError::Corrupt {
                path,
                key,
                first,
                last: first + bytes.len() as u64,
            }
        };
        damaged.map(error).collect()
    }
}

/// Compares the length and the header of a file with the manifest.
fn check(
    fs: &dyn FileSystem,
    dir: &Path,
    manifest: &Manifest,
    file: usize,
) -> Result<(), CheckpointError> {
    let entry = &manifest.files[file];
    let path = dir.join(&entry.name);
    let opened = fs
        .open(&path, Links::Refuse)
        .map_err(|error| io("open", &path, error))?;
    let found = opened.len().map_err(|error| io("read", &path, error))?;
    if found != entry.len {
        return Err(CheckpointError::Length {
            path,
            found,
            expected: entry.len,
        });
    }
    let (_, header) = safetensors_file::open(fs, &path, 0)?;
    let stored = header.tensors.iter().flat_map(|(name, tensor)| {
        let begin = tensor.chunks.iter().map(|chunk| chunk.begin);
        begin.map(move |begin| (name.clone(), (tensor.dtype, tensor.shape.clone(), begin)))
    });
    let expected = manifest.tensors.iter().flat_map(|(key, tensor)| {
        let chunks = tensor.chunks.iter().filter(|chunk| chunk.file == file);
        chunks.map(move |chunk| {
            let shape = chunk.region.shape.clone();
            (
                stored_name(key, &chunk.region, &tensor.shape),
                (tensor.dtype, shape, chunk.begin),
            )
        })
    });
    if stored.collect::<BTreeMap<_, _>>() != expected.collect() {
        let reason = "its header is not the one that was saved".into();
        return Err(CheckpointError::Safetensors { path, reason });
    }
    Ok(())
}

fn io(action: &str, path: &Path, error: std::io::Error) -> CheckpointError {
    CheckpointError::io(0, action, path, &error)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::manifest::MeshEntry;

    #[test]
    fn values_that_cannot_be_read_are_damage() {
        let text = |digits: &str| digits.to_owned();
        // CBOR: 3, a text of which one byte is there, and what are no digits.
        let values = [("short", "6461"), ("digits", "0g"), ("good", "03")];
        let manifest = Manifest {
            step: None,
            required_features: Vec::new(),
            software: String::new(),
            mesh: MeshEntry {
                shape: vec![2],
                names: vec!["shard".into()],
            },
            files: Vec::new(),
            tensors: BTreeMap::new(),
            values: values
                .map(|(key, digits)| (key.into(), text(digits)))
                .into(),
            rank_values: [("ranks".into(), vec![text("03"), text("")])].into(),
        };
        let damaged = damaged_values(&manifest);
        let keys = damaged.iter().map(|damage| match damage {
            CheckpointError::Value { key, .. } => key.as_str(),
            other => panic!("{other}"),
        });
        assert_eq!(keys.collect_vec(), ["digits", "short", "ranks"]);
    }
}
