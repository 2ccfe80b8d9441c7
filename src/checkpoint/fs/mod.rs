//! [`FileSystem`]: all access of checkpoints to files.
//!
//! It has what a checkpoint needs to survive a loss of power, and no more, so that tests can put a
//! file system in its place that forgets what was not synced or that fails at a chosen call. The
//! rules are the strictest that POSIX allows:
//!
//! 1. Bytes of a file are durable after [`WriteFile::sync`] of the file.
//! 2. An entry of a folder (a new file or folder, a rename, a removal) is durable after
//!    [`FileSystem::sync_dir`] of that folder. A sync of the file does not do it.
//! 3. Until then each write and each entry may or may not be on the disk, in any combination; a
//!    write may be there in part, or be zeros. A rename is all or nothing.

mod real;

#[cfg(test)]
mod contract;
#[cfg(test)]
pub(crate) mod recorder;

use std::fmt::Debug;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Name of the file that makes a checkpoint complete.
pub(crate) const MANIFEST: &str = "manifest.json";

/// A symbolic link's treatment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Links {
    /// A path that ends in a link is not opened.
    Refuse,
    /// The file or folder that the link names is opened.
    Follow,
}

/// One entry of a folder.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Entry {
    /// Name in its folder.
    pub name: String,
    /// True for a folder; false for a file, and for a link to a folder.
    pub is_dir: bool,
}

/// The operations on files and folders. Errors name the path.
pub(crate) trait FileSystem: Send + Sync + Debug {
    /// Creates a folder. The error is `AlreadyExists` if there is an entry of that name.
    fn create_dir(&self, dir: &Path) -> io::Result<()>;

    /// Returns true if there is a folder at the path.
    fn is_dir(&self, path: &Path, links: Links) -> io::Result<bool>;

    /// Creates a file for writing. The error is `AlreadyExists` if there is an entry of that name,
    /// even a link.
    fn create(&self, file: &Path) -> io::Result<Box<dyn WriteFile>>;

    /// Opens a file for reading. The error is `InvalidInput` if it is not a regular file.
    fn open(&self, file: &Path, links: Links) -> io::Result<Arc<dyn ReadFile>>;

    /// Returns a path that is the same for all paths by which this process names the folder, if it
    /// exists.
    fn identity(&self, dir: &Path) -> PathBuf;

    /// Returns the entries of a folder, sorted by name. Of a name that is not UTF-8, which is not
    /// that of a file of a checkpoint, other bytes are replaced by U+FFFD.
    fn list(&self, dir: &Path) -> io::Result<Vec<Entry>>;

    /// Renames a file or a folder. A file replaces a file named `to`, and a folder an empty folder.
    /// The error is `DirectoryNotEmpty` if it has entries.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;

    /// Removes a file, or a link.
    fn remove_file(&self, file: &Path) -> io::Result<()>;

    /// Removes an empty folder.
    fn remove_dir(&self, dir: &Path) -> io::Result<()>;

    /// Makes the entries of a folder durable, as far as the system can.
    fn sync_dir(&self, dir: &Path) -> io::Result<()>;

    /// Creates a folder and those above it that are missing, and makes their entries durable.
    ///
    /// The entry of a folder that exists is synced as well: the process that created it may have
    /// been killed before its sync, or be another rank that has not come to it yet.
    fn create_dir_all(&self, dir: &Path) -> io::Result<()> {
        let above = parent(dir);
        if above == dir {
            return Ok(());
        }
        let existed = self.is_dir(dir, Links::Follow)?;
        if !existed {
            self.create_dir_all(above)?;
            match self.create_dir(dir) {
                Err(error)
                    if error.kind() == ErrorKind::AlreadyExists
                        && self.is_dir(dir, Links::Follow)? => {}
                created => created?,
            }
        }
        match self.sync_dir(above) {
            // Folders far above may be readable by their owner alone, such as `/home` of some
            // systems.
            Err(error) if existed && error.kind() == ErrorKind::PermissionDenied => Ok(()),
            synced => synced,
        }
    }
}

/// A file that is being written, from its first byte on.
pub(crate) trait WriteFile: Send {
    /// Appends bytes.
    fn write_all(&mut self, bytes: &[u8]) -> io::Result<()>;

    /// Makes the bytes that were written durable.
    fn sync(&mut self) -> io::Result<()>;
}

/// A file that is open for positioned reads, from any number of threads.
pub(crate) trait ReadFile: Send + Sync + Debug {
    /// Returns the file's length in bytes.
    fn len(&self) -> io::Result<u64>;

    /// Fills the buffer with the bytes from `offset` on. The error is `UnexpectedEof` if the file
    /// has fewer.
    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()>;
}

/// Returns the operating system's file system.
pub(crate) fn real() -> Arc<dyn FileSystem> {
    Arc::new(real::RealFs)
}

/// Returns the folder that holds the path's entry: `.` for a bare name; and the path itself for `/`
/// and `.`.
pub(crate) fn parent(path: &Path) -> &Path {
    match path.parent() {
        Some(above) if above.as_os_str().is_empty() => Path::new("."),
        Some(above) => above,
        None => path,
    }
}

/// Writes a file by way of `FILE.tmp` and a rename: after a crash there are the old contents or the
/// new. Durable on return.
pub(crate) fn write_atomically(fs: &dyn FileSystem, file: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut temporary = file.as_os_str().to_owned();
    temporary.push(".tmp");
    let temporary = Path::new(&temporary);
    let written = (|| {
        let mut writer = create_or_replace(fs, temporary)?;
        writer.write_all(bytes)?;
        writer.sync()?;
        drop(writer);
        fs.rename(temporary, file)?;
        fs.sync_dir(parent(file))
    })();
    if written.is_err() {
        drop(fs.remove_file(temporary));
    }
    written
}

/// Creates a file in place of one that an interrupted call may have left.
pub(crate) fn create_or_replace(
    fs: &dyn FileSystem,
    file: &Path,
) -> io::Result<Box<dyn WriteFile>> {
    if_exists(fs.remove_file(file))?;
    fs.create(file)
}

/// Reads a file. The error is `FileTooLarge`, before any allocation, if it has more than `limit`
/// bytes.
pub(crate) fn read_all(
    fs: &dyn FileSystem,
    file: &Path,
    links: Links,
    limit: u64,
) -> io::Result<Vec<u8>> {
    let reader = fs.open(file, links)?;
    let len = reader.len()?;
    let Some(len) = usize::try_from(len).ok().filter(|_| len <= limit) else {
        let reason = format!(
            "`{}` has {len} bytes; at most {limit} are read",
            file.display()
        );
        return Err(io::Error::new(ErrorKind::FileTooLarge, reason));
    };
    let mut bytes = vec![0; len];
    reader.read_exact_at(&mut bytes, 0)?;
    Ok(bytes)
}

/// Removes a folder and all in it, in any order: it must not have the name of a checkpoint any
/// more. Links are removed and not followed; a link in place of the folder is an error. The error
/// is `NotFound` if another program removes it at the same time.
pub(crate) fn remove_dir_all(fs: &dyn FileSystem, dir: &Path) -> io::Result<()> {
    check_no_link(fs, dir)?;
    for Entry { name, is_dir } in fs.list(dir)? {
        let path = dir.join(name);
        if is_dir {
            remove_dir_all(fs, &path)?
        } else {
            fs.remove_file(&path)?
        }
    }
    fs.remove_dir(dir)
}

/// Returns an error if the path is a link to a folder.
pub(crate) fn check_no_link(fs: &dyn FileSystem, path: &Path) -> io::Result<()> {
    // Another program may create a folder in between.
    let is_dir = || fs.is_dir(path, Links::Refuse);
    if !is_dir()? && fs.is_dir(path, Links::Follow)? && !is_dir()? {
        let reason = format!("`{}` is a link to a folder", path.display());
        return Err(io::Error::new(ErrorKind::InvalidInput, reason));
    }
    Ok(())
}

/// Takes a missing file for removed.
fn if_exists(removed: io::Result<()>) -> io::Result<()> {
    match removed {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}
