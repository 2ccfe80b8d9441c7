//! [`Recorder`]: a file system in memory that shows what a loss of power may leave of it.
//!
//! A recorder keeps its contents as they were at first, and the log of all changes and syncs since.
//! [`Recorder::crashes`] replays the log: after each step some changes are durable by a sync, and
//! the others are pending. It gives a file system for each combination of pending changes that may
//! have reached the disk:
//!
//! ```text
//! log      create a/x   write x   create a/y   sync x   write y   rename a/y to a/z   sync a   ..
//! durable                                      write x                                create, create, rename
//! pending  ---------------------------------------------------------------------      write y
//!                                                              crash: 2^4 combinations and torn writes
//! ```
//!
//! The model is that of ALICE (Pillai et al., "All File Systems Are Not Created Equal", OSDI 2014)
//! without any order between changes: a file system that keeps more of an order gives a subset of
//! these states. Files are inodes, as on a disk: a rename that is durable alone gives the new name
//! to a file whose bytes may be missing.

mod crashes;
mod disk;
mod schedule;
mod tests;

use std::fmt::{self, Debug, Formatter};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use itertools::Itertools;
use parking_lot::Mutex;

pub(crate) use crashes::{Crash, Crashes};
pub(crate) use schedule::Schedule;

use crashes::Replay;
use disk::{Change, Disk, Inode, Node};

use super::{Entry, FileSystem, Links, ReadFile, WriteFile};

/// An entry of the log.
#[derive(Clone)]
enum Step {
    Change(Change),
    Sync(Inode),
    Mark(String),
}

/// One sync of a file or folder, or the rename of one: the n-th, from 0, of that path. Ranks that
/// run at the same time do not change it. In the path, [`settled`] has left out what differs from
/// save to save.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct NthCall {
    pub path: String,
    pub index: usize,
}

impl NthCall {
    /// Returns the next call on this path, after those of `calls`.
    fn next(calls: &[Self], path: &str) -> Self {
        let path = settled(path);
        let index = calls.iter().filter(|call| call.path == path).count();
        Self { path, index }
    }
}

/// Returns the path without the claims of saves and the numbers of removals in it.
pub(super) fn settled(path: &str) -> String {
    let names = path.split('/').map(|name| {
        let end = [".saving-", ".removing-"]
            .into_iter()
            .find_map(|kind| Some(name.find(kind)? + kind.len()));
        &name[..end.unwrap_or(name.len())]
    });
    names.format("/").to_string()
}

/// An error to be met at a call: [`ErrorKind::StorageFull`] by what creates or writes,
/// [`ErrorKind::ReadOnlyFilesystem`] by what changes anything, and others by every call. Half the
/// bytes of a write that fails are written.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Fault {
    /// Index of the first call that may fail, counting all calls from 0.
    pub call: usize,
    /// The error's kind.
    pub kind: ErrorKind,
    /// True for all further calls to fail as well. A process that dies makes no more calls.
    pub lasting: bool,
}

/// Kind of a call, by the errors that it may meet.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Call {
    Reads,
    Changes,
    Writes,
}

impl Fault {
    fn meets(&self, index: usize, call: Call) -> bool {
        let least = match self.kind {
            ErrorKind::StorageFull => Call::Writes,
            ErrorKind::ReadOnlyFilesystem => Call::Changes,
            _ => Call::Reads,
        };
        index >= self.call && call >= least
    }
}

/// The state that a recorder and its open files share.
struct Recording {
    /// Contents when the recording began, with the nodes that were created since, without contents
    /// and names.
    start: Disk,
    /// Contents as they are now.
    now: Disk,
    log: Vec<(Step, String)>,
    syncs: Vec<NthCall>,
    renames: Vec<NthCall>,
    skipped: Skipped,
    /// A rename that was skipped: its new path, and the path at which the file or folder still is.
    in_place: Option<(PathBuf, PathBuf)>,
    calls: usize,
    fault: Option<Fault>,
}

/// A call that does nothing and succeeds.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Skipped {
    #[default]
    Nothing,
    Sync(NthCall),
    /// A rename, after which the new name means what still has the old one: as a program that works
    /// on a folder in its place.
    Rename(NthCall),
}

impl Recording {
    /// Returns the path at which the file or folder is.
    fn resolve(&self, path: &Path) -> PathBuf {
        match &self.in_place {
            Some((new, old)) => match path.strip_prefix(new) {
                Ok(rest) if rest.as_os_str().is_empty() => old.clone(),
                Ok(rest) => old.join(rest),
                Err(_) => path.to_owned(),
            },
            None => path.to_owned(),
        }
    }

    /// Counts a call, which fails if it is its turn.
    fn call(&mut self, call: Call) -> io::Result<()> {
        let index = self.calls;
        self.calls += 1;
        match self.fault {
            Some(fault) if fault.meets(index, call) => {
                if !fault.lasting {
                    self.fault = None;
                }
                Err(fault.kind.into())
            }
            _ => Ok(()),
        }
    }

    fn change(&mut self, change: Change, description: String) {
        self.now.apply(&change);
        self.log.push((Step::Change(change), description));
    }

    fn create(&mut self, path: &Path, node: Node) -> io::Result<Inode> {
        let (folder, name) = self.now.place(path)?;
        if self.now.folder(folder)?.contains_key(&name) {
            return Err(ErrorKind::AlreadyExists.into());
        }
        let inode = self.now.nodes.len();
        self.start.nodes.push(node.clone());
        self.now.nodes.push(node);
        self.change(
            Change::Link {
                folder,
                name,
                inode,
            },
            format!("create {}", path.display()),
        );
        Ok(inode)
    }

    fn rename(&mut self, from: &Path, to: &Path) -> io::Result<()> {
        let from_place = self.now.place(from)?;
        let to_place = self.now.place(to)?;
        let inode = self.now.find(from)?;
        if let Ok(replaced) = self.now.find(to) {
            match (&self.now.nodes[inode], &self.now.nodes[replaced]) {
                (Node::File(_), Node::File(_)) => {}
                (Node::File(_), Node::Folder(_)) => return Err(ErrorKind::IsADirectory.into()),
                (Node::Folder(_), Node::File(_)) => return Err(ErrorKind::NotADirectory.into()),
                (Node::Folder(_), Node::Folder(entries)) if entries.is_empty() => {}
                (Node::Folder(_), Node::Folder(_)) => {
                    return Err(ErrorKind::DirectoryNotEmpty.into());
                }
            }
        }
        let call = NthCall::next(&self.renames, &from.display().to_string());
        let is_skipped = self.skipped == Skipped::Rename(call.clone());
        self.renames.push(call);
        if is_skipped {
            self.in_place = Some((to.to_owned(), from.to_owned()));
            return Ok(());
        }
        let description = format!("rename {} to {}", from.display(), to.display());
        self.change(
            Change::Rename {
                from: from_place,
                to: to_place,
                inode,
            },
            description,
        );
        Ok(())
    }

    fn remove(&mut self, path: &Path, is_folder: bool) -> io::Result<()> {
        let (folder, name) = self.now.place(path)?;
        match &self.now.nodes[self.now.find(path)?] {
            Node::File(_) if is_folder => return Err(ErrorKind::NotADirectory.into()),
            Node::Folder(_) if !is_folder => return Err(ErrorKind::IsADirectory.into()),
            Node::Folder(entries) if !entries.is_empty() => {
                return Err(ErrorKind::DirectoryNotEmpty.into());
            }
            Node::File(_) | Node::Folder(_) => {}
        }
        self.change(
            Change::Unlink { folder, name },
            format!("remove {}", path.display()),
        );
        Ok(())
    }

    fn sync(&mut self, inode: Inode, path: &str) {
        let sync = NthCall::next(&self.syncs, path);
        if self.skipped != Skipped::Sync(sync.clone()) {
            self.log.push((Step::Sync(inode), format!("sync {path}")));
        }
        self.syncs.push(sync);
    }
}

/// A file system in memory that records changes. Clones are the same file system. Paths are
/// absolute or from the root, and there are no links.
#[derive(Clone)]
pub(crate) struct Recorder {
    recording: Arc<Mutex<Recording>>,
    /// The rank that makes the calls, and the schedule that they follow, if they follow one.
    schedule: Option<(usize, Arc<Schedule>)>,
}

impl Recorder {
    /// Returns an empty file system.
    pub(crate) fn new() -> Self {
        Self::of(Disk {
            nodes: vec![Node::folder()],
        })
    }

    fn of(disk: Disk) -> Self {
        let start = disk.clone();
        let now = disk;
        let log = Vec::new();
        let recording = Recording {
            start,
            now,
            log,
            syncs: Vec::new(),
            renames: Vec::new(),
            skipped: Skipped::Nothing,
            in_place: None,
            calls: 0,
            fault: None,
        };
        Self {
            recording: Arc::new(Mutex::new(recording)),
            schedule: None,
        }
    }

    /// Returns the same file system for a rank, whose calls follow the schedule.
    pub(crate) fn scheduled(&self, rank: usize, schedule: &Arc<Schedule>) -> Self {
        Self {
            recording: self.recording.clone(),
            schedule: Some((rank, schedule.clone())),
        }
    }

    /// Returns another file system with the present contents, all of them durable.
    pub(crate) fn durable_copy(&self) -> Self {
        Self::of(self.recording.lock().now.clone())
    }

    /// Returns the file system as it is after the loss of power that loses all pending changes.
    pub(crate) fn lose_pending(&self) -> Self {
        let recording = self.recording.lock();
        let mut replay = Replay::new(recording.start.clone());
        recording
            .log
            .iter()
            .for_each(|(step, description)| replay.step(step, description));
        Self::of(replay.durable)
    }

    /// Returns a hash of the names and contents of all in a folder, or `None` if there is no such
    /// folder or file.
    pub(crate) fn digest(&self, dir: &Path) -> Option<u64> {
        let now = &self.recording.lock().now;
        Some(now.digest(now.find(dir).ok()?))
    }

    /// Notes in the log that the program has come so far. [`Crash::marks`] has the texts of those
    /// before the crash.
    pub(crate) fn mark(&self, text: impl Into<String>) {
        self.recording
            .lock()
            .log
            .push((Step::Mark(text.into()), String::new()));
    }

    /// Plans an error.
    pub(crate) fn fail(&self, fault: Fault) {
        self.recording.lock().fault = Some(fault);
    }

    /// Takes the planned error back. Returns true if there was one that no call has met, or a
    /// lasting one.
    pub(crate) fn heal(&self) -> bool {
        self.recording.lock().fault.take().is_some()
    }

    /// Returns the number of calls.
    pub(crate) fn calls(&self) -> usize {
        self.recording.lock().calls
    }

    /// Makes one call do nothing and succeed.
    pub(crate) fn skip(&self, skipped: Skipped) {
        self.recording.lock().skipped = skipped;
    }

    /// Returns all syncs that were called.
    pub(crate) fn syncs(&self) -> Vec<NthCall> {
        self.recording.lock().syncs.clone()
    }

    /// Returns all renames that were called.
    pub(crate) fn renames(&self) -> Vec<NthCall> {
        self.recording.lock().renames.clone()
    }

    /// Returns the number of changes and syncs that were recorded.
    pub(crate) fn steps(&self) -> usize {
        self.recording
            .lock()
            .log
            .iter()
            .filter(|(step, _)| !matches!(step, Step::Mark(_)))
            .count()
    }

    /// Returns the file systems that a loss of power may leave, before the first recorded step and
    /// after each step.
    ///
    /// Every combination of up to 8 pending changes is tried. Of more: none and all, each alone and
    /// all but it, and all up to it. Each pending write is torn, among others that are done, are
    /// not done, or are done if they were before it. A state that was given since the last mark is
    /// not given again.
    pub(crate) fn crashes(&self) -> Crashes {
        Crashes::new(&self.recording.lock())
    }

    /// Does a call when it is its turn.
    fn in_turn<T>(&self, call: impl FnOnce(&mut Recording) -> T) -> T {
        let call = || call(&mut self.recording.lock());
        match &self.schedule {
            Some((rank, schedule)) => schedule.in_turn(*rank, call),
            None => call(),
        }
    }

    /// Does a call on a path.
    fn on<T>(
        &self,
        call: Call,
        path: &Path,
        body: impl FnOnce(&mut Recording, &Path) -> io::Result<T>,
    ) -> io::Result<T> {
        let done = self.in_turn(|recording| {
            recording.call(call)?;
            let path = recording.resolve(path);
            body(recording, &path)
        });
        done.map_err(|error| named(error, path.display()))
    }
}

fn named(error: io::Error, path: impl fmt::Display) -> io::Error {
    io::Error::new(error.kind(), format!("`{path}`: {error}"))
}

/// The files and folders, with the lengths of files.
impl Debug for Recorder {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let disk = &self.recording.lock().now;
        let line = |(path, inode): &(String, Inode)| match &disk.nodes[*inode] {
            Node::File(contents) => format!("{path} ({} bytes)", contents.bytes.len()),
            Node::Folder(_) => format!("{path}/"),
        };
        write!(f, "{}", disk.walk(0).iter().map(line).format(", "))
    }
}

impl FileSystem for Recorder {
    fn create_dir(&self, dir: &Path) -> io::Result<()> {
        self.on(Call::Writes, dir, |recording, dir| {
            recording.create(dir, Node::folder()).map(drop)
        })
    }

    fn is_dir(&self, path: &Path, _: Links) -> io::Result<bool> {
        self.on(Call::Reads, path, |recording, path| {
            match recording.now.find(path) {
                Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
                found => Ok(matches!(recording.now.nodes[found?], Node::Folder(_))),
            }
        })
    }

    fn create(&self, file: &Path) -> io::Result<Box<dyn WriteFile>> {
        let inode = self.on(Call::Writes, file, |recording, file| {
            recording.create(file, Node::file())
        })?;
        Ok(Box::new(OpenFile {
            recorder: self.clone(),
            path: file.display().to_string(),
            inode,
        }))
    }

    fn open(&self, file: &Path, _: Links) -> io::Result<Arc<dyn ReadFile>> {
        let inode = self.on(Call::Reads, file, |recording, file| {
            let inode = recording.now.find(file)?;
            match &recording.now.nodes[inode] {
                Node::File(_) => Ok(inode),
                Node::Folder(_) => Err(ErrorKind::InvalidInput.into()),
            }
        })?;
        Ok(Arc::new(OpenFile {
            recorder: self.clone(),
            path: file.display().to_string(),
            inode,
        }))
    }

    fn identity(&self, dir: &Path) -> PathBuf {
        let root = format!("/recorder/{:p}", Arc::as_ptr(&self.recording));
        Path::new(&root).join(dir.strip_prefix("/").unwrap_or(dir))
    }

    fn list(&self, dir: &Path) -> io::Result<Vec<Entry>> {
        self.on(Call::Reads, dir, |recording, dir| {
            let now = &recording.now;
            let is_dir = |inode: Inode| matches!(now.nodes[inode], Node::Folder(_));
            let entries = now.folder(now.find(dir)?)?.iter();
            Ok(entries
                .map(|(name, inode)| Entry {
                    name: name.clone(),
                    is_dir: is_dir(*inode),
                })
                .collect())
        })
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        let renamed = self.on(Call::Changes, from, |recording, from| {
            let to = recording.resolve(to);
            recording.rename(from, &to)
        });
        renamed.map_err(|error| named(error, to.display()))
    }

    fn remove_file(&self, file: &Path) -> io::Result<()> {
        self.on(Call::Changes, file, |recording, file| {
            recording.remove(file, false)
        })
    }

    fn remove_dir(&self, dir: &Path) -> io::Result<()> {
        self.on(Call::Changes, dir, |recording, dir| {
            recording.remove(dir, true)
        })
    }

    fn sync_dir(&self, dir: &Path) -> io::Result<()> {
        let path = dir.display().to_string();
        self.on(Call::Changes, dir, |recording, dir| {
            let inode = recording.now.find(dir)?;
            recording.now.folder(inode)?;
            recording.sync(inode, &path);
            Ok(())
        })
    }
}

/// A file that is open for reading or writing.
#[derive(Debug)]
struct OpenFile {
    recorder: Recorder,
    path: String,
    inode: Inode,
}

impl WriteFile for OpenFile {
    fn write_all(&mut self, bytes: &[u8]) -> io::Result<()> {
        let written = self.recorder.in_turn(|recording| {
            let called = recording.call(Call::Writes);
            let bytes = if called.is_ok() {
                bytes
            } else {
                &bytes[..bytes.len() / 2]
            };
            let at = recording.now.file(self.inode).len();
            if !bytes.is_empty() {
                let description = format!("write {} bytes at {at} of {}", bytes.len(), self.path);
                recording.change(
                    Change::Write {
                        file: self.inode,
                        at,
                        bytes: bytes.into(),
                    },
                    description,
                );
            }
            called
        });
        written.map_err(|error| named(error, &self.path))
    }

    fn sync(&mut self) -> io::Result<()> {
        self.recorder
            .on(Call::Writes, Path::new(&self.path), |recording, _| {
                recording.sync(self.inode, &self.path);
                Ok(())
            })
    }
}

impl ReadFile for OpenFile {
    fn len(&self) -> io::Result<u64> {
        self.recorder
            .on(Call::Reads, Path::new(&self.path), |recording, _| {
                Ok(recording.now.file(self.inode).len() as u64)
            })
    }

    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.recorder
            .on(Call::Reads, Path::new(&self.path), |recording, _| {
                let bytes = recording.now.file(self.inode);
                let range = offset as usize..offset as usize + buffer.len();
                buffer.copy_from_slice(bytes.get(range).ok_or(ErrorKind::UnexpectedEof)?);
                Ok(())
            })
    }
}
