//! [`RealFs`]: the operating system's file system.

use std::fs::Metadata;
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use fs_err::{File, OpenOptions};

use super::{Entry, FileSystem, Links, ReadFile, WriteFile};

/// The operating system's file system.
#[derive(Debug)]
pub(super) struct RealFs;

impl FileSystem for RealFs {
    fn create_dir(&self, dir: &Path) -> io::Result<()> {
        fs_err::create_dir(dir)
    }

    fn is_dir(&self, path: &Path, links: Links) -> io::Result<bool> {
        match metadata(path, links).map_err(removed_elsewhere) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
            found => Ok(found?.is_dir()),
        }
    }

    fn create(&self, file: &Path) -> io::Result<Box<dyn WriteFile>> {
        Ok(Box::new(RealWriter(File::create_new(file)?)))
    }

    fn open(&self, file: &Path, links: Links) -> io::Result<Arc<dyn ReadFile>> {
        // A pipe would be waited for.
        check_regular(&metadata(file, links)?, file)?;
        let mut options = OpenOptions::new();
        options.read(true);
        // The path may name another file by now.
        #[cfg(target_os = "linux")]
        {
            use fs_err::os::unix::fs::OpenOptionsExt;
            let links = if links == Links::Refuse {
                libc::O_NOFOLLOW
            } else {
                0
            };
            options.custom_flags(libc::O_NONBLOCK | links);
        }
        let opened = options.open(file)?;
        check_regular(&opened.metadata()?, file)?;
        Ok(Arc::new(RealReader {
            file: opened,
            #[cfg(not(unix))]
            position: parking_lot::Mutex::new(()),
        }))
    }

    fn identity(&self, dir: &Path) -> PathBuf {
        let path = fs_err::canonicalize(dir).or_else(|_| std::path::absolute(dir));
        path.unwrap_or_else(|_| dir.to_owned())
    }

    fn list(&self, dir: &Path) -> io::Result<Vec<Entry>> {
        let mut entries = Vec::new();
        for entry in fs_err::read_dir(dir).map_err(removed_elsewhere)? {
            let entry = entry.map_err(removed_elsewhere)?;
            let kind = match entry.file_type() {
                // Some file systems look it up now, and another program has removed it.
                Err(error) if error.kind() == ErrorKind::NotFound => continue,
                kind => kind?,
            };
            entries.push(Entry {
                name: entry.file_name().to_string_lossy().into_owned(),
                is_dir: kind.is_dir(),
            });
        }
        entries.sort();
        Ok(entries)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs_err::rename(from, to).map_err(|error| match error.kind() {
            // POSIX has both for a folder with entries.
            ErrorKind::AlreadyExists => io::Error::new(ErrorKind::DirectoryNotEmpty, error),
            _ => error,
        })
    }

    fn remove_file(&self, file: &Path) -> io::Result<()> {
        fs_err::remove_file(file)
    }

    fn remove_dir(&self, dir: &Path) -> io::Result<()> {
        fs_err::remove_dir(dir)
    }

    /// Does nothing to a folder on systems apart from Unix, which have no such operation.
    fn sync_dir(&self, dir: &Path) -> io::Result<()> {
        if !fs_err::metadata(dir)?.is_dir() {
            return Err(io::Error::new(
                ErrorKind::NotADirectory,
                format!("`{}` is not a folder", dir.display()),
            ));
        }
        #[cfg(unix)]
        match File::open(dir)?.sync_all() {
            // From file systems that have no such operation; PostgreSQL's `fsync_fname_ext` ignores
            // it, too.
            Err(error)
                if [ErrorKind::InvalidInput, ErrorKind::Unsupported].contains(&error.kind()) => {}
            synced => synced?,
        }
        Ok(())
    }
}

/// Takes what another host has removed from a network file system for missing.
fn removed_elsewhere(error: io::Error) -> io::Error {
    match error.kind() {
        ErrorKind::StaleNetworkFileHandle => io::Error::new(ErrorKind::NotFound, error),
        _ => error,
    }
}

fn metadata(path: &Path, links: Links) -> io::Result<Metadata> {
    match links {
        Links::Refuse => fs_err::symlink_metadata(path),
        Links::Follow => fs_err::metadata(path),
    }
}

fn check_regular(found: &Metadata, file: &Path) -> io::Result<()> {
    if found.is_file() {
        return Ok(());
    }
    let kind = match found {
        _ if found.is_symlink() => "a symbolic link",
        _ if found.is_dir() => "a folder",
        _ => "a device, pipe or socket",
    };
    Err(io::Error::new(
        ErrorKind::InvalidInput,
        format!("`{}` is {kind}, not a regular file", file.display()),
    ))
}

struct RealWriter(File);

impl WriteFile for RealWriter {
    fn write_all(&mut self, bytes: &[u8]) -> io::Result<()> {
        Write::write_all(&mut self.0, bytes)
    }

    fn sync(&mut self) -> io::Result<()> {
        self.0.sync_all()
    }
}

#[derive(Debug)]
struct RealReader {
    file: File,
    /// Held by the thread that reads: without positioned reads, the position is the file's.
    #[cfg(not(unix))]
    position: parking_lot::Mutex<()>,
}

impl ReadFile for RealReader {
    fn len(&self) -> io::Result<u64> {
        Ok(self.file.metadata()?.len())
    }

    #[cfg(unix)]
    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        fs_err::os::unix::fs::FileExt::read_exact_at(&self.file, buffer, offset)
    }

    #[cfg(not(unix))]
    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        use std::io::{Read, Seek, SeekFrom};

        let _held = self.position.lock();
        let mut file = &self.file;
        file.seek(SeekFrom::Start(offset))?;
        file.read_exact(buffer).map_err(|error| {
            io::Error::new(
                error.kind(),
                format!("`{}`: {error}", self.file.path().display()),
            )
        })
    }
}
