//! [`consolidate`]: writes a checkpoint as a model in the layout of Hugging Face.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use itertools::Itertools;
use serde_json::json;

use super::fs::{self, FileSystem, Links};
use super::load::{no_value, read_manifest};
use super::manifest::StoredDType;
use super::reader::{Reader, Want};
use super::region::{Region, transpose};
use super::safetensors_file::{INDEX, METADATA, header};
use super::{CheckpointError, ReadOptions, ReadStats};

const SUFFIX: &str = ".safetensors";
/// Ending of the file in which a large matrix is transposed.
const TRANSPOSED: &str = ".transposed";

/// Options of [`consolidate`]. By default all tensors are written as they are, under their keys.
#[derive(Clone)]
pub struct ConsolidateOptions {
    key: Option<String>,
    most_bytes: u64,
    read: ReadOptions,
    renamed: Arc<ExportNameFn>,
    transposed: Arc<TransposeFn>,
}

type ExportNameFn = dyn Fn(&str) -> Option<String> + Send + Sync;
type TransposeFn = dyn Fn(&str) -> bool + Send + Sync;

/// Files that [`consolidate`] wrote.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct ConsolidateReport {
    /// Names of the files with tensors, and their length in bytes.
    pub files: Vec<(String, u64)>,
    /// Number of tensors.
    pub tensors: usize,
    /// Bytes of all tensors.
    pub bytes: u64,
    /// Bytes that were read.
    pub read: ReadStats,
}

impl Default for ConsolidateOptions {
    fn default() -> Self {
        Self {
            key: None,
            most_bytes: 5_000_000_000,
            read: ReadOptions::default(),
            renamed: Arc::new(|path| Some(path.to_owned())),
            transposed: Arc::new(|_| false),
        }
    }
}

impl ConsolidateOptions {
    /// Returns the default: all tensors, in files of at most 5 GB.
    pub fn new() -> Self {
        Self::default()
    }

    /// Writes only the tensors below `key`, under the rest of their keys: below `model`, the tensor
    /// `model.head.weight` is written as `head.weight`.
    #[must_use]
    pub fn with_key(self, key: &str) -> Self {
        Self {
            key: Some(key.into()),
            ..self
        }
    }

    /// Begins another file before one would have more bytes of tensors than this. A larger tensor
    /// has a file of its own.
    #[must_use]
    pub fn with_max_file_bytes(self, bytes: u64) -> Self {
        Self {
            most_bytes: bytes,
            ..self
        }
    }

    /// Sets how the checkpoint is read. Memory is bounded by [`ReadOptions::memory`], and a quarter
    /// of it for a transpose. A matrix with more bytes than that quarter is transposed by way of a
    /// temporary file in the folder that is written.
    #[must_use]
    pub fn with_read_options(self, read: ReadOptions) -> Self {
        Self { read, ..self }
    }

    /// Writes each tensor under the name that `name` returns for it, or leaves it out if that is
    /// `None`.
    #[must_use]
    pub fn with_renamed(
        self,
        name: impl Fn(&str) -> Option<String> + Send + Sync + 'static,
    ) -> Self {
        Self {
            renamed: Arc::new(name),
            ..self
        }
    }

    /// Transposes the matrices for whose name, before it is renamed, `is_transposed` returns true.
    /// The weight of a `Linear` of burn is `[input, output]`, and `[output, input]` in PyTorch.
    #[must_use]
    pub fn with_transposed(
        self,
        is_transposed: impl Fn(&str) -> bool + Send + Sync + 'static,
    ) -> Self {
        Self {
            transposed: Arc::new(is_transposed),
            ..self
        }
    }
}

impl fmt::Debug for ConsolidateOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            key,
            most_bytes,
            read,
            ..
        } = self;
        let mut text = f.debug_struct("ConsolidateOptions");
        text.field("key", key)
            .field("most_bytes", most_bytes)
            .field("read", read)
            .finish_non_exhaustive()
    }
}

/// Writes the full tensors of the checkpoint in the folder `path` into the folder `out`, as Hugging
/// Face's libraries and PyTorch's users read them: `model.safetensors`, or
/// `model-00001-of-00002.safetensors` and so on with `model.safetensors.index.json`.
///
/// Tensors are read and written in parts, so that memory is bounded. The checksums of what is read
/// are verified. Files get their names once all of them are on disk, and the index last. `progress`
/// is called with the bytes that were written so far and the bytes of all tensors.
///
/// ```
/// # use burn::nn::LinearConfig;
/// # use burn_dtensor::prelude::*;
/// use burn_dtensor::checkpoint::{self, ConsolidateOptions, State};
///
/// # let folder = std::env::temp_dir().join(format!("checkpoint-consolidate-{}", std::process::id()));
/// # let (saved, out) = (folder.join("step-1"), folder.join("exported"));
/// launch(Launch::threads(2), |world| {
///     let mesh = DeviceMesh::new(world, [2], ["shard"])?;
///     let model = fully_shard(LinearConfig::new(4, 3).init(world.device()), &mesh, FullyShard::new())?;
///     checkpoint::save(&saved, &State::new(&mesh).with_model("model", &model)?)?;
///     Ok(())
/// })?;
/// let options = ConsolidateOptions::new().with_key("model").with_transposed(|name| name == "weight");
/// let report = checkpoint::consolidate(&saved, &out, &options, |_written, _total| ())?;
/// assert_eq!((report.tensors, report.files[0].0.as_str()), (2, "model.safetensors"));
/// # std::fs::remove_dir_all(folder)?;
/// # Ok::<_, burn_dtensor::Error>(())
/// ```
///
/// Local: needs no launch. If a launcher has started several processes, call it in one of them:
/// [`is_first_process`](crate::comm::is_first_process).
///
/// # Errors
/// [`CheckpointError::Occupied`] if `out` contains safetensors files; [`CheckpointError::NoValue`]
/// if there are no tensors to write; [`CheckpointError::Duplicate`] if two have the same name;
/// [`CheckpointError::Name`]; [`CheckpointError::Corrupt`]; [`CheckpointError::Io`];
/// [`CheckpointError::Incomplete`] and [`CheckpointError::Manifest`] for the checkpoint. Nothing is
/// left in `out` then.
pub fn consolidate(
    path: impl AsRef<Path>,
    out: impl AsRef<Path>,
    options: &ConsolidateOptions,
    mut progress: impl FnMut(u64, u64),
) -> Result<ConsolidateReport, CheckpointError> {
    consolidate_in(
        &*fs::real(),
        path.as_ref(),
        out.as_ref(),
        options,
        &mut progress,
    )
}

pub(super) fn consolidate_in(
    fs: &dyn FileSystem,
    path: &Path,
    out: &Path,
    options: &ConsolidateOptions,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<ConsolidateReport, CheckpointError> {
    let (manifest, _) = read_manifest(fs, path, 0)?;
    let exports = exports(&manifest.tensors, options)?;
    if exports.is_empty() {
        return Err(no_value(
            options.key.as_deref().unwrap_or(""),
            manifest.tensors.keys(),
        ));
    }
    check_vacant(fs, out)?;
    fs.create_dir_all(out)
        .map_err(|error| io("create", out, error))?;
    let files = divided(exports, options.most_bytes);
    let reader = Reader::new(fs, path, &manifest, &options.read, 0);
    let total = files.iter().flatten().map(Export::bytes).sum();
    let most_bytes = (options.read.memory / 16).max(1);
    let mut writer = Writer {
        fs,
        reader,
        read: ReadStats::default(),
        most_bytes,
        done: 0,
        total,
        progress,
    };
    let mut report = ConsolidateReport {
        files: Vec::new(),
        tensors: 0,
        bytes: total,
        read: ReadStats::default(),
    };
    let mut index = BTreeMap::new();
    let mut temporaries = Vec::new();
    let written = files.iter().enumerate().try_for_each(|(number, exports)| {
        let name = file_name(number, files.len());
        let temporary = out.join(format!("{name}.tmp"));
        temporaries.push((temporary.clone(), out.join(&name)));
        let len = writer.write(&temporary, exports)?;
        index.extend(
            exports
                .iter()
                .map(|export| (export.name.clone(), name.clone())),
        );
        report.tensors += exports.len();
        report.files.push((name, len));
        Ok(())
    });
    let committed = written.and_then(|()| {
        commit(
            fs,
            out,
            &temporaries,
            (files.len() > 1).then_some((&index, total)),
        )
    });
    if let Err(error) = committed {
        for (temporary, file) in &temporaries {
            for file in [temporary, &appended(temporary, TRANSPOSED), file] {
                let _ = fs.remove_file(file);
            }
        }
        let _ = fs.remove_file(&out.join(INDEX));
        return Err(error);
    }
    report.read = writer.read;
    Ok(report)
}

/// Gives the files their names, and writes the index last.
fn commit(
    fs: &dyn FileSystem,
    out: &Path,
    temporaries: &[(PathBuf, PathBuf)],
    index: Option<(&BTreeMap<String, String>, u64)>,
) -> Result<(), CheckpointError> {
    for (temporary, file) in temporaries {
        fs.rename(temporary, file)
            .map_err(|error| io("write", file, error))?;
    }
    fs.sync_dir(out).map_err(|error| io("sync", out, error))?;
    let Some((index, total)) = index else {
        return Ok(());
    };
    let json = json!({ "metadata": { "total_size": total }, "weight_map": index });
    let file = out.join(INDEX);
    let bytes = serde_json::to_vec_pretty(&json).expect("the keys of all maps are text");
    fs::write_atomically(fs, &file, &bytes).map_err(|error| io("write", &file, error))
}

/// A tensor that is written.
#[derive(Debug)]
struct Export {
    /// Name in the file.
    name: String,
    key: String,
    dtype: StoredDType,
    /// Global shape in the checkpoint.
    shape: Vec<usize>,
    is_transposed: bool,
}

impl Export {
    fn bytes(&self) -> u64 {
        (self.shape.iter().product::<usize>() * self.dtype.bytes()) as u64
    }

    /// Returns true if the bytes are written in another order.
    fn is_reordered(&self) -> bool {
        self.is_transposed && !self.shape.contains(&1)
    }

    /// Returns the parts that are read one after the other, consecutive rows of at most so many
    /// bytes; the full matrix if it is reordered.
    fn parts(&self, most_bytes: usize) -> Vec<Want> {
        let full = Region::full(&self.shape);
        let parts = if self.is_reordered() {
            vec![full]
        } else {
            full.split(most_bytes / self.dtype.bytes())
        };
        parts
            .into_iter()
            .map(|region| Want {
                key: self.key.clone(),
                region,
            })
            .collect()
    }
}

/// Returns what is written, ordered by name.
fn exports(
    tensors: &BTreeMap<String, super::manifest::TensorEntry>,
    options: &ConsolidateOptions,
) -> Result<Vec<Export>, CheckpointError> {
    let mut exports = BTreeMap::new();
    for (key, entry) in tensors {
        let path = match &options.key {
            Some(prefix) => key
                .strip_prefix(prefix.as_str())
                .and_then(|rest| rest.strip_prefix('.')),
            None => Some(key.as_str()),
        };
        let Some((path, name)) = path.and_then(|path| Some((path, (options.renamed)(path)?)))
        else {
            continue;
        };
        let is_transposed = entry.shape.len() == 2 && (options.transposed)(path);
        let dtype = entry.dtype;
        let shape = entry.shape.clone();
        let export = Export {
            name: name.clone(),
            key: key.clone(),
            dtype,
            shape,
            is_transposed,
        };
        if name == METADATA {
            let reason = "the format uses it for what is not a tensor".into();
            return Err(CheckpointError::Name { key: name, reason });
        }
        if exports.insert(name.clone(), export).is_some() {
            return Err(CheckpointError::Duplicate { key: name });
        }
    }
    Ok(exports.into_values().collect())
}

/// Divides the tensors among files, in their order.
fn divided(exports: Vec<Export>, most_bytes: u64) -> Vec<Vec<Export>> {
    let mut files = vec![Vec::new()];
    let mut bytes = 0;
    for export in exports {
        if bytes > 0 && bytes + export.bytes() > most_bytes {
            files.push(Vec::new());
            bytes = 0;
        }
        bytes += export.bytes();
        files.last_mut().expect("there is one").push(export);
    }
    // Data are aligned for their dtypes if the widest come first.
    files
        .iter_mut()
        .for_each(|file| file.sort_by_key(|export| std::cmp::Reverse(export.dtype.bytes())));
    files
}

fn file_name(number: usize, count: usize) -> String {
    match count {
        1 => format!("model{SUFFIX}"),
        _ => format!("model-{:05}-of-{count:05}{SUFFIX}", number + 1),
    }
}

/// Fails if the folder contains a model.
fn check_vacant(fs: &dyn FileSystem, out: &Path) -> Result<(), CheckpointError> {
    let entries = match fs.list(out) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        entries => entries.map_err(|error| io("read", out, error))?,
    };
    let model = entries
        .into_iter()
        .find(|entry| entry.name.ends_with(SUFFIX) || entry.name == INDEX);
    model.map_or(Ok(()), |entry| {
        Err(CheckpointError::Occupied {
            path: out.into(),
            name: entry.name,
        })
    })
}

/// Copies tensors from the checkpoint into files.
struct Writer<'a> {
    fs: &'a dyn FileSystem,
    reader: Reader<'a>,
    read: ReadStats,
    /// Bytes of a part.
    most_bytes: usize,
    done: u64,
    total: u64,
    progress: &'a mut dyn FnMut(u64, u64),
}

impl Writer<'_> {
    /// Writes and syncs a file, and returns its length.
    fn write(&mut self, file: &Path, exports: &[Export]) -> Result<u64, CheckpointError> {
        let failed = |error| io("write", file, error);
        let tensor = |export: &Export| {
            let mut shape = export.shape.clone();
            if export.is_transposed {
                shape.reverse();
            }
            (export.name.clone(), export.dtype, shape)
        };
        let tensors = exports.iter().map(tensor).collect_vec();
        let (head, _) = header(&tensors, &BTreeMap::from([("format".into(), "pt".into())]));
        let mut to = fs::create_or_replace(self.fs, file).map_err(failed)?;
        to.write_all(&head).map_err(failed)?;
        let most = 4 * self.most_bytes as u64;
        let is_large = |export: &Export| export.is_reordered() && export.bytes() > most;
        for exports in exports.chunk_by(|a, b| !is_large(a) && !is_large(b)) {
            let mut write = |bytes: &[u8]| to.write_all(bytes).map_err(failed);
            match exports {
                [export] if is_large(export) => {
                    self.transpose_on_disk(export, &appended(file, TRANSPOSED), &mut write)?
                }
                _ => self.copy(exports, &mut write)?,
            }
        }
        to.sync().map_err(failed)?;
        Ok(head.len() as u64 + exports.iter().map(Export::bytes).sum::<u64>())
    }

    /// Copies tensors in parts.
    fn copy(&mut self, exports: &[Export], write: &mut WriteFn<'_>) -> Result<(), CheckpointError> {
        let parts = exports.iter().flat_map(|export| {
            export
                .parts(self.most_bytes)
                .into_iter()
                .map(move |part| (export, part))
        });
        let (exports_of, wants): (Vec<_>, Vec<_>) = parts.unzip();
        let done = &mut self.done;
        let total = self.total;
        let progress = &mut self.progress;
        let stats = self.reader.read(&wants, |index, bytes| {
            let export = exports_of[index];
            let bytes = match export.is_reordered() {
                true => Cow::Owned(transposed(&wants[index].region, &bytes, export.dtype)),
                false => Cow::Borrowed(&bytes[..]),
            };
            write(&bytes)?;
            *done += bytes.len() as u64;
            progress(*done, total);
            Ok(())
        })?;
        self.read.add(&stats);
        Ok(())
    }

    /// Copies a matrix that is transposed and too large to be in memory. Reading it column by
    /// column would read every row's blocks for each of them. Instead, panels of consecutive rows
    /// are read once, and written transposed to a temporary file:
    ///
    /// ```text
    ///  stored      temporary file    written: for rows 0, 1, ..
    ///  a b c d     a e  b f  c g  d h          of each panel one run
    ///  e f g h     i m  j n  k o  l p          a e i m   b f j n   ..
    ///  --------
    ///  i j k l
    ///  m n o p
    /// ```
    fn transpose_on_disk(
        &mut self,
        export: &Export,
        file: &Path,
        write: &mut WriteFn<'_>,
    ) -> Result<(), CheckpointError> {
        let failed = |action| move |error| io(action, file, error);
        let size = export.dtype.bytes();
        let [rows, columns] = [export.shape[0], export.shape[1]];
        let panels = Region::full(&export.shape).split(self.most_bytes / size);
        let wants = panels
            .iter()
            .map(|region| Want {
                key: export.key.clone(),
                region: region.clone(),
            })
            .collect_vec();
        let mut to = fs::create_or_replace(self.fs, file).map_err(failed("write"))?;
        let copied = self.reader.read(&wants, |index, bytes| {
            to.write_all(&transposed(&wants[index].region, &bytes, export.dtype))
                .map_err(failed("write"))
        });
        drop(to);
        self.read.add(&copied?);

        let from = self.fs.open(file, Links::Refuse).map_err(failed("open"))?;
        // Columns that are written together, as rows.
        let stripe = (self.most_bytes / (rows * size)).clamp(1, columns);
        let mut run = Vec::new();
        let mut joined = vec![0; stripe * rows * size];
        for first in (0..columns).step_by(stripe) {
            let count = stripe.min(columns - first);
            for panel in &panels {
                let begin = panel.offsets[0];
                let of_panel = panel.shape[0];
                run.resize(count * of_panel * size, 0);
                let at = (begin * columns + first * of_panel) * size;
                from.read_exact_at(&mut run, at as u64)
                    .map_err(failed("read"))?;
                for (column, bytes) in run.chunks(of_panel * size).enumerate() {
                    joined[(column * rows + begin) * size..][..bytes.len()].copy_from_slice(bytes);
                }
            }
            let bytes = &joined[..count * rows * size];
            write(bytes)?;
            self.done += bytes.len() as u64;
            (self.progress)(self.done, self.total);
        }
        drop(from);
        self.fs.remove_file(file).map_err(failed("remove"))
    }
}

type WriteFn<'a> = dyn FnMut(&[u8]) -> Result<(), CheckpointError> + 'a;

/// Returns the bytes of a region of a matrix, transposed.
fn transposed(region: &Region, bytes: &[u8], dtype: StoredDType) -> Vec<u8> {
    let mut transposed = vec![0; bytes.len()];
    transpose(
        bytes,
        &mut transposed,
        [region.shape[0], region.shape[1]],
        dtype.bytes(),
    );
    transposed
}

fn appended(file: &Path, suffix: &str) -> PathBuf {
    let mut name = file.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

fn io(action: &str, path: &Path, error: io::Error) -> CheckpointError {
    CheckpointError::io(0, action, path, &error)
}
