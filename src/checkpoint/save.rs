//! [`save`]: writes a checkpoint from all ranks.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::path::{Path, PathBuf};

use burn::tensor::{BoolStore, DType, TensorData};
use serde::{Deserialize, Serialize};

use super::agree::{agree, on_first};
use super::assign::{AssignedRegion, Held, assign, held, shard_region};
use super::fs::{self, FileSystem, Links, MANIFEST, parent};
use super::manifest::{ChunkEntry, FileEntry, Manifest, MeshEntry, TensorEntry, block_checksums};
use super::region::Region;
use super::safetensors_file::{METADATA, header};
use super::{CheckpointError, State};
use crate::Result;
use crate::comm::{Call, Communicator};

/// Most bytes that a manifest may have.
pub(super) const LIMIT: u64 = 1 << 30;
const PROBE: &str = "probe-";
const SHARDS: &str = "rank-";

/// Report of [`save`], identical on every rank.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct SaveReport {
    /// Folder of the checkpoint.
    pub path: PathBuf,
    /// Bytes that each rank of the state's mesh wrote, in the order of the mesh.
    pub bytes: Vec<u64>,
    /// Errors of the removal of old checkpoints, of which a
    /// [`CheckpointManager`](super::CheckpointManager) keeps only some. The checkpoint is saved,
    /// and the next save tries to remove them again.
    pub not_removed: Vec<CheckpointError>,
}

impl fmt::Display for SaveReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (total, most) = (
            self.bytes.iter().sum::<u64>(),
            self.bytes.iter().max().copied().unwrap_or_default(),
        );
        write!(
            f,
            "{}: {total} bytes by {} ranks, at most {most} by one",
            self.path.display(),
            self.bytes.len()
        )?;
        self.not_removed
            .iter()
            .try_for_each(|error| write!(f, "; {error}"))
    }
}

/// Writes a checkpoint into the folder `path`, which must not exist.
///
/// Each rank writes its own shards into a file of its own. What several ranks hold is written once,
/// and the work is divided evenly among them. The manifest is written last, once all files are on
/// disk: a folder with a manifest is a complete checkpoint, also after a power loss. A folder that
/// an interrupted save left is replaced.
///
/// ```
/// # use burn::nn::LinearConfig;
/// # use burn_dtensor::prelude::*;
/// use burn_dtensor::checkpoint::{self, Checkpoint, LoadOptions, State};
///
/// # let folder = std::env::temp_dir().join(format!("checkpoint-save-{}", std::process::id()));
/// launch(Launch::threads(2), |world| {
///     let mesh = DeviceMesh::new(world, [2], ["shard"])?;
///     let model = fully_shard(LinearConfig::new(4, 3).init(world.device()), &mesh, FullyShard::new())?;
///     let state = State::new(&mesh).with_model("model", &model)?.with_value("epoch", &3)?;
///     checkpoint::save(&folder, &state)?;
///
///     // Any mesh may load it.
///     let mesh = DeviceMesh::new(world, [2, 1], ["replicate", "shard"])?;
///     let again = fully_shard(LinearConfig::new(4, 3).init(world.device()), &mesh, FullyShard::new())?;
///     let checkpoint = Checkpoint::open(&folder, &mesh)?;
///     let (again, _) = checkpoint.load_model("model", again, &LoadOptions::new())?;
///     assert_eq!(again.weight.val().into_data(), model.weight.val().into_data());
///     assert_eq!(checkpoint.value::<i32>("epoch")?, 3);
///     Ok(())
/// })?;
/// # std::fs::remove_dir_all(folder)?;
/// # Ok::<_, burn_dtensor::Error>(())
/// ```
///
/// # Collective
/// Every rank of the state's mesh, with states of the same keys. A rank waits for the others'
/// writes at most for the launch's deadline.
///
/// # Errors
/// On all ranks, and an existing complete checkpoint is never changed: [`CheckpointError::Exists`],
/// [`CheckpointError::Occupied`], [`CheckpointError::NotShared`], [`CheckpointError::Partial`],
/// [`CheckpointError::DType`], [`CheckpointError::Name`], [`CheckpointError::Disagree`],
/// [`CheckpointError::Cover`], [`CheckpointError::Overlap`], and [`CheckpointError::Io`], for
/// instance for a full disk. [`Error::Comm`](crate::Error::Comm) if another rank fails.
pub fn save(path: impl AsRef<Path>, state: &State) -> Result<SaveReport> {
    let plan = SavePlan::new(state)?;
    write(
        &*fs::real(),
        path.as_ref(),
        plan,
        &mut Live::new(state),
        None,
    )
}

/// Plan of a save, which every rank knows in full.
pub(super) struct SavePlan {
    pub comm: Communicator,
    /// Most bytes of the manifest.
    pub limit: u64,
    manifest: Manifest,
    fragments: Vec<(String, Vec<AssignedRegion>)>,
}

/// Gives the bytes of this rank's fragments.
pub(super) trait FragmentBytes {
    fn bytes(&mut self, key: &str, region: &Region) -> Cow<'_, [u8]>;
}

/// File that one rank wrote.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct WrittenFile {
    len: u64,
    /// First byte and checksums of each of its fragments, in their order.
    chunks: Vec<(u64, Vec<u64>)>,
}

impl SavePlan {
    /// Agrees with all ranks on what is written.
    ///
    /// # Collective
    /// Every rank of the state's mesh.
    pub fn new(state: &State) -> Result<Self> {
        state.mesh.member("save a checkpoint")?;
        let comm = state.mesh.all()?;
        let held = held(state, &comm)?;
        check_names(&held)?;
        let (values, rank_values) = values(state, &comm)?;
        let fragments = assign(&held, comm.group().size());
        let entry = |Held {
                         shape,
                         dtype,
                         placements,
                         ..
                     }: &Held| TensorEntry {
            shape: shape.clone(),
            dtype: *dtype,
            placements: placements.clone(),
            chunks: Vec::new(),
        };
        let manifest = Manifest {
            step: state.step,
            mesh: MeshEntry {
                shape: state.mesh.shape().to_vec(),
                names: state.mesh.names().to_vec(),
            },
            previous: None,
            software: concat!("burn-dtensor ", env!("CARGO_PKG_VERSION")).into(),
            files: Vec::new(),
            tensors: held
                .iter()
                .map(|held| (held.key.clone(), entry(held)))
                .collect(),
            values,
            rank_values,
        };
        let fragments = held
            .into_iter()
            .map(|held| held.key)
            .zip(fragments)
            .collect();
        Ok(Self {
            comm,
            limit: LIMIT,
            manifest,
            fragments,
        })
    }

    /// Returns the fragments that a rank of the group writes, in their order.
    pub fn fragments_of(&self, rank: usize) -> impl Iterator<Item = (&str, &Region)> {
        self.fragments.iter().flat_map(move |(key, fragments)| {
            fragments
                .iter()
                .filter(move |fragment| fragment.writer == rank)
                .map(move |fragment| (key.as_str(), &fragment.region))
        })
    }

    /// Returns the bytes of the fragments that a rank of the group writes.
    pub fn bytes_of(&self, rank: usize) -> usize {
        let bytes = |(key, region): (&str, &Region)| {
            region.num_elements() * self.manifest.tensors[key].dtype.bytes()
        };
        self.fragments_of(rank).map(bytes).sum()
    }

    /// Completes the manifest with what the ranks wrote.
    fn manifest(&self, written: Vec<WrittenFile>) -> Manifest {
        let mut manifest = self.manifest.clone();
        // Ranks that write nothing have no file.
        let writers: Vec<_> = (0..written.len())
            .filter(|&rank| !written[rank].chunks.is_empty())
            .collect();
        let index: BTreeMap<_, _> = writers
            .iter()
            .enumerate()
            .map(|(file, &rank)| (rank, file))
            .collect();
        manifest.files = writers
            .iter()
            .map(|&rank| FileEntry::new(file_name(rank), written[rank].len))
            .collect();
        let mut chunks: Vec<_> = written
            .into_iter()
            .map(|written| written.chunks.into_iter())
            .collect();
        for (key, fragments) in &self.fragments {
            let entry = manifest
                .tensors
                .get_mut(key)
                .expect("the manifest has every key");
            entry
                .chunks
                .extend(fragments.iter().map(|AssignedRegion { region, writer }| {
                    let (begin, checksums) = chunks[*writer]
                        .next()
                        .expect("a rank writes all its fragments");
                    ChunkEntry {
                        region: region.clone(),
                        file: index[writer],
                        begin,
                        checksums,
                    }
                }));
        }
        manifest
    }
}

/// Checks that the keys can be names of tensors in files. It does not depend on how the tensors are
/// divided, so that a state that can be saved on one mesh can be on every other.
fn check_names(held: &[Held]) -> Result<(), CheckpointError> {
    let has = |key: &str| {
        held.binary_search_by(|held| held.key.as_str().cmp(key))
            .is_ok()
    };
    for Held { key, .. } in held {
        // As `stored_name` names the regions of a tensor.
        let divided = key
            .strip_suffix(']')
            .and_then(|key| key.rsplit_once('['))
            .map(|(divided, _)| divided);
        let reason = match divided.filter(|divided| has(divided)) {
            Some(divided) => format!("a region of `{divided}` could have this name"),
            None if key == METADATA => "the format uses it for what is not a tensor".into(),
            None => continue,
        };
        return Err(CheckpointError::Name {
            key: key.clone(),
            reason,
        });
    }
    Ok(())
}

fn file_name(rank: usize) -> String {
    format!("{SHARDS}{rank:05}.safetensors")
}

/// Returns the rank whose file has this name.
pub(super) fn rank_of_file(name: &str) -> Option<usize> {
    name.strip_prefix(SHARDS)?
        .strip_suffix(".safetensors")?
        .parse()
        .ok()
}

/// Returns the name that a region of a tensor of shape `full` has in its file.
pub(super) fn stored_name(key: &str, region: &Region, full: &[usize]) -> String {
    if region.shape == full {
        key.to_owned()
    } else {
        format!("{key}{region}")
    }
}

/// Run to which a checkpoint belongs.
pub(super) trait RunStep: Send + Sync {
    /// Returns the checkpoint that was the latest of the run: its step and the checksum of its
    /// manifest.
    fn previous(&self, fs: &dyn FileSystem) -> Result<Option<(u64, u64)>, CheckpointError>;
    /// Makes the checkpoint, which is complete, the latest of the run. Returns an error for each
    /// old one that could not be removed.
    fn commit(&self, fs: &dyn FileSystem) -> Result<Vec<CheckpointError>, CheckpointError>;
}

/// Writes the files of all ranks and the manifest. If the checkpoint belongs to a run, it is then
/// the latest.
///
/// # Collective
/// Every rank of the plan's group.
pub(super) fn write(
    fs: &dyn FileSystem,
    path: &Path,
    plan: SavePlan,
    bytes: &mut dyn FragmentBytes,
    run: Option<&dyn RunStep>,
) -> Result<SaveReport> {
    let save = OpenSave::begin(fs, path, plan)?;
    let written = save.gather(fs, save.write_fragments(fs, bytes))?;
    on_first(save.comm(), "checkpoint_commit", || {
        save.commit(fs, written, run)
    })
    .map(|done| save.report(done))
}

/// A save whose folder exists. Its steps are to be called in the order of its methods.
pub(super) struct OpenSave {
    path: PathBuf,
    plan: SavePlan,
    /// File by which all ranks recognize the folder.
    probe: String,
}

impl OpenSave {
    /// Creates the folder.
    ///
    /// # Collective
    /// Every rank of the plan's group.
    pub fn begin(fs: &dyn FileSystem, path: &Path, plan: SavePlan) -> Result<Self> {
        let (comm, ranks) = (&plan.comm, plan.comm.group().ranks());
        let rank = ranks[comm.group().rank()];
        let probe = on_first(comm, "checkpoint_folder", || create(fs, path, rank))?;
        let seen = match fs.open(&path.join(&probe), Links::Refuse) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Err(match rank == ranks[0] {
                true => CheckpointError::Replaced { path: path.into() },
                false => CheckpointError::NotShared {
                    path: path.into(),
                    rank,
                    of: ranks[0],
                },
            }),
            seen => seen
                .map(drop)
                .map_err(|error| CheckpointError::io(rank, "open", &path.join(&probe), &error)),
        };
        agree(comm, "checkpoint_probe", seen).inspect_err(|_| discard(fs, path, &probe, comm))?;
        Ok(Self {
            path: path.into(),
            plan,
            probe,
        })
    }

    pub fn plan(&self) -> &SavePlan {
        &self.plan
    }

    pub fn comm(&self) -> &Communicator {
        &self.plan.comm
    }

    fn rank(&self) -> usize {
        self.comm().group().ranks()[self.comm().group().rank()]
    }

    /// Writes and syncs this rank's file. Local: no communication.
    pub fn write_fragments(
        &self,
        fs: &dyn FileSystem,
        bytes: &mut dyn FragmentBytes,
    ) -> Result<WrittenFile, CheckpointError> {
        let written = write_fragments(fs, &self.path, &self.plan, bytes);
        written.map_err(|(file, error)| CheckpointError::io(self.rank(), "write", &file, &error))
    }

    /// Returns what all ranks wrote. If one failed, the folder is removed.
    ///
    /// # Collective
    /// Every rank of the plan's group.
    pub fn gather(
        &self,
        fs: &dyn FileSystem,
        own: Result<WrittenFile, CheckpointError>,
    ) -> Result<Vec<WrittenFile>> {
        agree(self.comm(), "checkpoint_write", own).inspect_err(|_| self.discard(fs, &self.probe))
    }

    /// Writes the manifest, on group rank 0. Local: no communication.
    pub fn commit(
        &self,
        fs: &dyn FileSystem,
        written: Vec<WrittenFile>,
        run: Option<&dyn RunStep>,
    ) -> Result<Committed, CheckpointError> {
        let path = &self.path;
        let io = |action, path: &Path| {
            let (rank, path) = (self.rank(), path.to_owned());
            move |error| CheckpointError::io(rank, action, &path, &error)
        };
        let bytes = written.iter().map(|written| written.len).collect();
        let manifest = self
            .manifest_bytes(fs, written, run)
            .inspect_err(|_| self.discard(fs, &self.probe))?;
        // Another save under this name would have removed the probe, with the files of this one.
        // Under its new name it is there until the manifest is: without either, the folder would be
        // taken for the rest of a removal.
        let (probe, claim) = (path.join(&self.probe), probe_name());
        fs.rename(&probe, &path.join(&claim))
            .map_err(|error| match error.kind() {
                io::ErrorKind::NotFound => CheckpointError::Replaced { path: path.clone() },
                _ => io("rename", &probe)(error),
            })?;
        let file = path.join(MANIFEST);
        let synced = fs.sync_dir(path).map_err(io("sync", path));
        let put = synced
            .and_then(|()| fs::write_atomically(fs, &file, &manifest).map_err(io("write", &file)));
        put.inspect_err(|_| {
            // If only the last sync failed, it may be complete.
            if fs
                .open(&file, Links::Refuse)
                .is_err_and(|error| error.kind() == io::ErrorKind::NotFound)
            {
                self.discard(fs, &claim);
            }
        })?;
        let parent = parent(path);
        fs.sync_dir(parent).map_err(io("sync", parent))?;
        // If it stays, it does no harm.
        let _ = fs.remove_file(&path.join(&claim));
        let not_removed = run
            .map(|run| run.commit(fs))
            .transpose()?
            .unwrap_or_default();
        not_removed
            .iter()
            .for_each(|error| log::warn!("{} is saved, but {error}", path.display()));
        Ok(Committed { bytes, not_removed })
    }

    /// Returns the manifest of what the ranks wrote.
    fn manifest_bytes(
        &self,
        fs: &dyn FileSystem,
        written: Vec<WrittenFile>,
        run: Option<&dyn RunStep>,
    ) -> Result<Vec<u8>, CheckpointError> {
        let mut manifest = self.plan.manifest(written);
        manifest.previous = run.map(|run| run.previous(fs)).transpose()?.flatten();
        let manifest = manifest.to_bytes();
        let (bytes, limit) = (manifest.len() as u64, self.plan.limit);
        if bytes > limit {
            Err(CheckpointError::ManifestSize { bytes, limit })
        } else {
            Ok(manifest)
        }
    }

    fn discard(&self, fs: &dyn FileSystem, probe: &str) {
        discard(fs, &self.path, probe, self.comm());
    }

    pub fn report(&self, Committed { bytes, not_removed }: Committed) -> SaveReport {
        SaveReport {
            path: self.path.clone(),
            bytes,
            not_removed,
        }
    }
}

/// Result of [`OpenSave::commit`].
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Committed {
    /// Bytes of each rank's file.
    bytes: Vec<u64>,
    /// Errors of the removal of old checkpoints.
    not_removed: Vec<CheckpointError>,
}

/// Removes the folder of a save that failed, unless another save has taken its place since: then it
/// has another probe. If that fails, too, it is debris, which the next save removes.
fn discard(fs: &dyn FileSystem, path: &Path, probe: &str, comm: &Communicator) {
    if comm.group().rank() == 0 && fs.remove_file(&path.join(probe)).is_ok() {
        let _ = fs::remove_dir_all(fs, path);
    }
}

/// Returns a name that no other save gives to its probe.
fn probe_name() -> String {
    format!("{PROBE}{:016x}", nonce())
}

/// Creates the folder, and a file in it by which other ranks recognize it.
fn create(fs: &dyn FileSystem, path: &Path, rank: usize) -> Result<String, CheckpointError> {
    let io = |action: &str, path: &Path, error: io::Error| {
        CheckpointError::io(rank, action, path, &error)
    };
    match fs.list(path) {
        Ok(entries) => {
            if entries.iter().any(|entry| entry.name == MANIFEST) {
                return Err(CheckpointError::Exists { path: path.into() });
            }
            let is_probe = |name: &str| {
                name.strip_prefix(PROBE)
                    .is_some_and(|nonce| nonce.len() == 16)
            };
            let is_ours = |name: &str| {
                rank_of_file(name).is_some() || is_probe(name) || name == "manifest.json.tmp"
            };
            if let Some(other) = entries
                .iter()
                .find(|entry| entry.is_dir || !is_ours(&entry.name))
            {
                return Err(CheckpointError::Occupied {
                    path: path.into(),
                    name: other.name.clone(),
                });
            }
            fs::remove_dir_all(fs, path).map_err(|error| io("remove", path, error))?;
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(io("read", path, error)),
    }
    let parent = parent(path);
    fs.create_dir_all(parent)
        .map_err(|error| io("create", parent, error))?;
    fs.create_dir(path)
        .map_err(|error| io("create", path, error))?;
    let probe = probe_name();
    fs.create(&path.join(&probe))
        .map_err(|error| io("create", path, error))?;
    Ok(probe)
}

/// Returns a number that no other save has, with all likelihood.
fn nonce() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(std::process::id())
}

/// Writes and syncs this rank's file, if it has fragments.
///
/// # Errors
/// The file and the error.
fn write_fragments(
    fs: &dyn FileSystem,
    path: &Path,
    plan: &SavePlan,
    bytes: &mut dyn FragmentBytes,
) -> Result<WrittenFile, (PathBuf, io::Error)> {
    let rank = plan.comm.group().rank();
    let fragments: Vec<_> = plan.fragments_of(rank).collect();
    if fragments.is_empty() {
        return Ok(WrittenFile {
            len: 0,
            chunks: Vec::new(),
        });
    }
    let tensors: Vec<_> = fragments
        .iter()
        .map(|(key, region)| {
            let entry = &plan.manifest.tensors[*key];
            (
                stored_name(key, region, &entry.shape),
                entry.dtype,
                region.shape.clone(),
            )
        })
        .collect();
    let metadata = BTreeMap::from([("format".to_owned(), "burn-dtensor checkpoint".to_owned())]);
    let (head, begins) = header(&tensors, &metadata);
    let file = path.join(file_name(rank));
    let run = || {
        let mut to = fs.create(&file)?;
        to.write_all(&head)?;
        let mut len = head.len() as u64;
        let mut chunks = Vec::with_capacity(fragments.len());
        for ((key, region), begin) in fragments.iter().zip(begins) {
            debug_assert_eq!(begin, len, "chunks follow each other");
            let bytes = bytes.bytes(key, region);
            to.write_all(&bytes)?;
            len += bytes.len() as u64;
            chunks.push((begin, block_checksums(&bytes)));
        }
        to.sync()?;
        Ok(WrittenFile { len, chunks })
    };
    run().map_err(|error| (file.clone(), error))
}

/// The tensors of a state, read when they are written. One at a time is in host memory.
pub(super) struct Live<'a> {
    state: &'a State,
    current: Option<(String, TensorData)>,
}

impl<'a> Live<'a> {
    pub fn new(state: &'a State) -> Self {
        Self {
            state,
            current: None,
        }
    }
}

impl FragmentBytes for Live<'_> {
    fn bytes(&mut self, key: &str, region: &Region) -> Cow<'_, [u8]> {
        let tensor = &self.state.tensors[key];
        if self
            .current
            .as_ref()
            .is_none_or(|(current, _)| current != key)
        {
            self.current = None;
            self.current = Some((key.into(), stored(tensor.local_data())));
        }
        let (_, data) = self.current.as_ref().expect("it was just set");
        let spec = tensor.spec();
        let held = shard_region(spec);
        let element = data.dtype().size();
        let first = held.offset_of(region) * element;
        Cow::Borrowed(&data.as_bytes()[first..first + region.num_elements() * element])
    }
}

/// Converts to what the format stores: booleans have one byte.
fn stored(data: TensorData) -> TensorData {
    match data.dtype() {
        DType::Bool(BoolStore::U32) => data.convert_dtype(DType::Bool(BoolStore::Native)),
        _ => data,
    }
}

/// Returns a digest, the same in all processes.
fn digest(value: &impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}

type Values = (BTreeMap<String, String>, BTreeMap<String, Vec<String>>);

/// Compares the values and steps of all ranks, and collects the values that each has of its own.
fn values(state: &State, comm: &Communicator) -> Result<Values> {
    // Only digests of what all ranks should have: it may be large, as the description of an
    // optimizer is.
    let digests: BTreeMap<_, _> = state
        .values
        .iter()
        .map(|(key, value)| (key.clone(), digest(value)))
        .collect();
    let own = (digest(&digests), state.rank_values.clone(), state.step);
    let of_ranks = comm.all_gather_object(Call::new("checkpoint_values"), &own)?;
    let ranks = comm.group().ranks();
    let (first, first_own, first_step) = &of_ranks[0];
    if let Some(other) = of_ranks.iter().position(|(.., step)| step != first_step) {
        let text = |step: Option<u64>| step.map_or("no step".into(), |step| step.to_string());
        let (found, expected) = (text(of_ranks[other].2), text(*first_step));
        let (rank, of) = (ranks[other], ranks[0]);
        return Err(CheckpointError::Disagree {
            key: "step".into(),
            rank,
            found,
            of,
            expected,
        }
        .into());
    }
    if let Some(other) = of_ranks.iter().position(|(values, ..)| values != first) {
        let by_key = comm.all_gather_object(Call::new("checkpoint_digests"), &digests)?;
        return Err(difference(&by_key[0], &by_key[other], ranks[other], ranks[0], "value").into());
    }
    if let Some(other) = of_ranks
        .iter()
        .position(|(_, values, _)| !values.keys().eq(first_own.keys()))
    {
        let keys =
            |values: &BTreeMap<String, String>| values.keys().map(|key| (key.clone(), 0)).collect();
        let (expected, found) = (keys(first_own), keys(&of_ranks[other].1));
        return Err(difference(
            &expected,
            &found,
            ranks[other],
            ranks[0],
            "value of its own",
        )
        .into());
    }
    let of_key = |key: &String| {
        of_ranks
            .iter()
            .map(|(_, values, _)| values[key].clone())
            .collect()
    };
    let rank_values = first_own
        .keys()
        .map(|key| (key.clone(), of_key(key)))
        .collect();
    Ok((state.values.clone(), rank_values))
}

/// Returns the error for the first key in which the digests of the values of two ranks differ.
fn difference(
    expected: &BTreeMap<String, u64>,
    found: &BTreeMap<String, u64>,
    rank: usize,
    of: usize,
    what: &str,
) -> CheckpointError {
    let mut keys = expected.keys().chain(found.keys());
    let key = keys
        .find(|key| expected.get(*key) != found.get(*key))
        .cloned()
        .unwrap_or_default();
    let describe = |values: &BTreeMap<String, u64>, other: &str| match values.contains_key(&key) {
        true => format!("{other} {what}"),
        false => format!("no {what}"),
    };
    let (found, expected) = (describe(found, "another"), describe(expected, "a"));
    CheckpointError::Disagree {
        key,
        rank,
        found,
        of,
        expected,
    }
}
