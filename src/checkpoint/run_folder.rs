//! [`RunFolder`]: what is in the folder of a run, and which of its checkpoints is the latest.
//!
//! | name | content |
//! |---|---|
//! | `step-N` | the checkpoint of step N, complete from the moment at which it has this name |
//! | `step-N.saving-CLAIM` | a save, or what a killed process has left of one ([`Claim`]) |
//! | `step-N.removing-NONCE` | what is being removed, or was when a process was killed |
//! | `step-N.set-aside`, `step-N.set-aside-2` | a checkpoint after the step to which the run was set back |
//! | `latest` | of runs of earlier versions: the name of the latest checkpoint |
//!
//! A folder `step-N` without a manifest is what a save of an earlier version has left: those wrote
//! into a folder of the final name, and the manifest last.

use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use super::CheckpointError;
use super::claim::{Claim, Liveness, nonce};
use super::fs::{self, FileSystem, Links, MANIFEST, check_no_link, parent};
use super::load::read_manifest;
use super::manifest::FileEntry;
use super::save_plan::rank_of_file;

/// File of earlier versions with the name of the latest checkpoint.
const LATEST: &str = "latest";

/// Most bytes that are read of it.
const LATEST_LIMIT: u64 = 64;

/// Times that a folder is read whose checkpoints are removed meanwhile.
const MAX_READS: usize = 1000;

const SAVING: &str = ".saving-";
const REMOVING: &str = ".removing-";
const SET_ASIDE: &str = ".set-aside";

/// Contents of a run's folder.
#[derive(Debug, Default)]
pub(super) struct RunFolder {
    /// False if there is no such folder.
    pub exists: bool,
    /// Steps of the complete checkpoints, ascending.
    pub complete: Vec<u64>,
    /// Steps whose folder has no manifest and no files but those of a save, ascending.
    pub interrupted: Vec<u64>,
    /// Names of folders into which a save writes, or wrote, with their steps and claims.
    pub saving: Vec<(String, u64, Claim)>,
    /// Names of folders that are being removed, or were.
    pub removing: Vec<String>,
}

impl RunFolder {
    /// Reads the folder, in which other programs may save and remove checkpoints meanwhile.
    pub fn read(fs: &dyn FileSystem, path: &Path) -> io::Result<Self> {
        let mut was_empty = false;
        for attempt in 0..MAX_READS {
            if attempt > 10 {
                // A network file system lists what is removed for some time.
                thread::sleep(Duration::from_millis(20));
            }
            let Some(found) = Self::read_once(fs, path)? else {
                continue;
            };
            // While the folder is listed, a checkpoint may get its name and the one before it be
            // removed, so that neither is listed.
            if was_empty || !found.complete.is_empty() || !found.exists {
                return Ok(found);
            }
            was_empty = true;
        }
        let reason = format!(
            "`{}` lists folders that are not there, or changes whenever it is read",
            path.display()
        );
        Err(io::Error::other(reason))
    }

    /// Reads the folder. Returns `None` if a checkpoint was removed since it was listed: then there
    /// is a later one, which may not be listed.
    fn read_once(fs: &dyn FileSystem, path: &Path) -> io::Result<Option<Self>> {
        let entries = match fs.list(path) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Some(Self::default())),
            entries => entries?,
        };
        let mut found = Self {
            exists: true,
            ..Self::default()
        };
        for entry in entries {
            let name = entry.name;
            if let Some((step, claim)) = of_run(&name, SAVING) {
                if let Some(claim) = Claim::parse(claim).filter(|_| entry.is_dir) {
                    found.saving.push((name, step, claim));
                }
            } else if let Some((_, number)) = of_run(&name, REMOVING) {
                let is_ours = entry.is_dir && is_number(number);
                found.removing.extend(is_ours.then_some(name));
            } else if let Some(step) = step_of(&name) {
                let is_dir = entry.is_dir || fs.is_dir(&path.join(&name), Links::Follow)?;
                if !is_dir {
                    continue;
                }
                match content(fs, &path.join(&name))? {
                    Some(Content::Checkpoint) => found.complete.push(step),
                    Some(Content::Interrupted) => found.interrupted.push(step),
                    Some(Content::Other) => {}
                    None => return Ok(None),
                }
            }
        }
        found.complete.sort_unstable();
        found.interrupted.sort_unstable();
        Ok(Some(found))
    }

    /// Returns the step of the newest complete checkpoint.
    pub fn newest(&self) -> Option<u64> {
        self.complete.last().copied()
    }
}

/// Content of a folder that has the name of a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Content {
    /// A complete checkpoint.
    Checkpoint,
    /// Nothing, or files of a save without a manifest.
    Interrupted,
    /// Files of others.
    Other,
}

/// Returns what is in the folder; `None` if there is no such folder any more.
fn content(fs: &dyn FileSystem, path: &Path) -> io::Result<Option<Content>> {
    match fs.list(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        files => Ok(Some(match foreign(&files?) {
            None => Content::Interrupted,
            Some(MANIFEST) => Content::Checkpoint,
            Some(_) => Content::Other,
        })),
    }
}

/// Returns the manifest's name if there is a manifest, or the first name that a save does not give
/// to its files.
pub(super) fn foreign(files: &[fs::Entry]) -> Option<&str> {
    if files.iter().any(|file| file.name == MANIFEST) {
        return Some(MANIFEST);
    }
    // Saves of earlier versions had a probe and wrote the manifest under another name first.
    let is_ours = |file: &fs::Entry| {
        let name = &file.name;
        let is_probe = name.strip_prefix("probe-").is_some_and(|n| n.len() == 16);
        !file.is_dir && (rank_of_file(name).is_some() || is_probe || name == "manifest.json.tmp")
    };
    let other = files.iter().find(|file| !is_ours(file));
    other.map(|file| file.name.as_str())
}

/// Returns the name of the folder of a step's checkpoint.
pub(super) fn name(step: u64) -> String {
    format!("step-{step}")
}

/// Returns the step whose checkpoint has this name.
pub(super) fn step_of(text: &str) -> Option<u64> {
    let step = text.strip_prefix("step-")?.parse().ok()?;
    (name(step) == text).then_some(step)
}

/// Splits a name into the step of its checkpoint, and what follows `kind`.
fn of_run<'a>(name: &'a str, kind: &str) -> Option<(u64, &'a str)> {
    let (checkpoint, rest) = name.split_once(kind)?;
    Some((step_of(checkpoint)?, rest))
}

/// Returns true if the text is a number as removals have it. A person may give a folder another name
/// that looks like theirs.
fn is_number(text: &str) -> bool {
    let is_digit = |digit: u8| matches!(digit, b'0'..=b'9' | b'a'..=b'f');
    text.len() == 16 && text.bytes().all(is_digit)
}

/// Returns the folder into which a save with this claim writes the checkpoint `path`.
pub(super) fn saving(path: &Path, claim: Claim) -> PathBuf {
    with_suffix(path, &format!("{SAVING}{claim}"))
}

/// Returns the folders next to the checkpoint `path` into which saves of ended processes wrote it,
/// and the rest of removals of it.
pub(super) fn abandoned(fs: &dyn FileSystem, path: &Path) -> io::Result<Vec<PathBuf>> {
    let Some(name) = path.file_name() else {
        return Ok(Vec::new());
    };
    let name = name.to_string_lossy();
    let is_abandoned = |other: &str| {
        let Some(rest) = other.strip_prefix(&*name) else {
            return false;
        };
        let claim = rest.strip_prefix(SAVING).and_then(Claim::parse);
        claim.is_some_and(|claim| claim.liveness() == Liveness::Ended)
            || rest.strip_prefix(REMOVING).is_some_and(is_number)
    };
    let parent = parent(path);
    let entries = fs.list(parent)?.into_iter();
    Ok(entries
        .filter(|entry| entry.is_dir && is_abandoned(&entry.name))
        .map(|entry| parent.join(entry.name))
        .collect())
}

/// Gives folders to be removed other names, so that nothing finds them as checkpoints any more,
/// and then removes them. Returns an error for each that remains.
///
/// The new names are durable before anything is removed: after a loss of power a checkpoint is
/// there in full, or not at all. A folder that another program removes at the same time is removed.
pub(super) fn remove_all(
    fs: &dyn FileSystem,
    folders: impl IntoIterator<Item = PathBuf>,
) -> Vec<(PathBuf, io::Error)> {
    let mut renamed = Vec::new();
    let mut errors = Vec::new();
    for folder in folders {
        match rename_away(fs, &folder) {
            Ok(Some(away)) => renamed.push((folder, away)),
            Ok(None) => {}
            Err(error) => errors.push((folder, error)),
        }
    }
    let Some((_, away)) = renamed.first() else {
        return errors;
    };
    if let Err(error) = fs.sync_dir(parent(away)) {
        errors.push((away.clone(), error));
        return errors;
    }
    for (folder, away) in renamed {
        match fs::remove_dir_all(fs, &away) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                // A checkpoint of which nothing can be removed stays one, such as one that is
                // protected from writing.
                let named = original(&folder);
                let stays = is_complete(fs, &away)
                    && fs.rename(&away, &named).is_ok()
                    && fs.sync_dir(parent(&named)).is_ok();
                errors.push((if stays { named } else { away }, error));
            }
            _ => {}
        }
    }
    errors
}

/// Returns the path that a folder had before it got the name of a removal.
fn original(folder: &Path) -> PathBuf {
    let name = folder.file_name().unwrap_or_default().to_string_lossy();
    match name.rsplit_once(REMOVING) {
        Some((checkpoint, number)) if is_number(number) => parent(folder).join(checkpoint),
        _ => folder.into(),
    }
}

/// Returns true if the folder has a manifest and all its files.
fn is_complete(fs: &dyn FileSystem, folder: &Path) -> bool {
    let (Ok((manifest, _)), Ok(entries)) = (read_manifest(fs, folder, 0), fs.list(folder)) else {
        return false;
    };
    let is_there = |file: &FileEntry| entries.iter().any(|entry| entry.name == file.name);
    manifest.files.iter().all(is_there)
}

/// Renames a folder that is to be removed. Returns its new path, or `None` if it is not there or is
/// complete by now.
fn rename_away(fs: &dyn FileSystem, folder: &Path) -> io::Result<Option<PathBuf>> {
    let name = folder.file_name().unwrap_or_default().to_string_lossy();
    if name
        .rsplit_once(REMOVING)
        .is_some_and(|(_, number)| is_number(number))
    {
        return Ok(Some(folder.into()));
    }
    check_no_link(fs, folder)?;
    let has_manifest = |folder: &Path| {
        let found = content(fs, folder)?;
        Ok::<_, io::Error>(found == Some(Content::Checkpoint))
    };
    let was_complete = has_manifest(folder)?;
    // `step-7.saving-CLAIM` becomes `step-7.removing-NONCE`.
    let checkpoint = name.split_once(SAVING).map_or(&*name, |(name, _)| name);
    let away = parent(folder).join(format!("{checkpoint}{REMOVING}{:016x}", nonce()));
    match fs.rename(folder, &away) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        renamed => renamed?,
    }
    // A save of an earlier version may have completed it since it was looked at.
    if !was_complete && step_of(&name).is_some() && has_manifest(&away)? {
        fs.rename(&away, folder)?;
        return Ok(None);
    }
    Ok(Some(away))
}

/// Checks that the file `latest` of earlier versions, if there is one, names the newest complete
/// checkpoint.
///
/// # Errors
/// [`CheckpointError::LatestFile`], and [`CheckpointError::Io`].
pub(super) fn check_latest(
    fs: &dyn FileSystem,
    path: &Path,
    newest: Option<u64>,
    rank: usize,
) -> Result<(), CheckpointError> {
    let file = path.join(LATEST);
    let content = match fs::read_all(fs, &file, Links::Refuse, LATEST_LIMIT) {
        Ok(bytes) => format!("`{}`", String::from_utf8_lossy(&bytes).trim()),
        Err(error) => match error.kind() {
            ErrorKind::NotFound => return Ok(()),
            ErrorKind::FileTooLarge => format!("more than {LATEST_LIMIT} bytes"),
            ErrorKind::InvalidInput => "no text, because it is not a file".into(),
            _ => return Err(CheckpointError::io(rank, "read", &file, &error)),
        },
    };
    if newest.is_some_and(|step| content == format!("`{}`", name(step))) {
        return Ok(());
    }
    Err(CheckpointError::LatestFile {
        path: file,
        content,
        newest,
    })
}

/// Removes the file `latest` of earlier versions, durably.
pub(super) fn remove_latest(fs: &dyn FileSystem, path: &Path) -> io::Result<()> {
    match fs.remove_file(&path.join(LATEST)) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        removed => removed.and_then(|()| fs.sync_dir(path)),
    }
}

/// Sets the checkpoints after `step` aside, the newest first, and returns their new folders.
///
/// If it is interrupted, the newest of those that remain is the latest; call it again.
///
/// # Errors
/// [`CheckpointError::Incomplete`] if the step has no complete checkpoint, and
/// [`CheckpointError::Io`].
pub(super) fn set_back(
    fs: &dyn FileSystem,
    path: &Path,
    step: u64,
    rank: usize,
) -> Result<Vec<PathBuf>, CheckpointError> {
    let io = |action: &'static str, path: &Path| {
        let path = path.to_owned();
        move |error| CheckpointError::io(rank, action, &path, &error)
    };
    let run = RunFolder::read(fs, path).map_err(io("read", path))?;
    if !run.complete.contains(&step) {
        return Err(CheckpointError::Incomplete {
            path: path.join(name(step)),
        });
    }
    let mut aside = Vec::new();
    for later in run.complete.iter().rev().take_while(|later| **later > step) {
        let folder = path.join(name(*later));
        match set_aside(fs, &folder) {
            // Another program sets the run back, too, or has removed it.
            Err(error) if error.kind() == ErrorKind::NotFound => continue,
            renamed => aside.push(renamed.map_err(io("rename", &folder))?),
        }
        // In this order on the disk, too: after a loss of power no step is there without those
        // between.
        fs.sync_dir(path).map_err(io("sync", path))?;
    }
    // Until all are aside, `latest` may say that a person wants to go back.
    remove_latest(fs, path).map_err(io("remove", &path.join(LATEST)))?;
    Ok(aside)
}

/// Renames a checkpoint to the first name that is free, and returns it.
fn set_aside(fs: &dyn FileSystem, folder: &Path) -> io::Result<PathBuf> {
    let mut count = 1_usize;
    loop {
        let suffix = match count {
            1 => SET_ASIDE.to_owned(),
            count => format!("{SET_ASIDE}-{count}"),
        };
        let aside = with_suffix(folder, &suffix);
        match fs.rename(folder, &aside) {
            Err(error) if error.kind() == ErrorKind::DirectoryNotEmpty => count += 1,
            renamed => return renamed.map(|()| aside),
        }
    }
}

/// Returns the path next to `path` whose name has this suffix.
fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(suffix);
    parent(path).join(name)
}
