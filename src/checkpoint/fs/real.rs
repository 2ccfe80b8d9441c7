//! [`RealFs`]: the operating system's file system.

use std::fs::Metadata;
use std::io::{self, ErrorKind, Write};
use std::path::Path;
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
        match metadata(path, links) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
            found => Ok(found?.is_dir()),
        }
    }

    fn create(&self, file: &Path) -> io::Result<Box<dyn WriteFile>> {
        Ok(Box::new(Writer(File::create_new(file)?)))
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
            let links = if links == Links::Refuse { libc::O_NOFOLLOW } else { 0 };
            options.custom_flags(libc::O_NONBLOCK | links);
        }
        let opened = options.open(file)?;
        check_regular(&opened.metadata()?, file)?;
        Ok(Arc::new(Reader::new(opened)))
    }

    fn list(&self, dir: &Path) -> io::Result<Vec<Entry>> {
        let not_utf8 = |name| {
            let reason = format!("the name {name:?} in `{}` is not UTF-8", dir.display());
            io::Error::new(ErrorKind::InvalidData, reason)
        };
        let entries = fs_err::read_dir(dir)?.map(|entry| {
            let entry = entry?;
            let name = entry.file_name().into_string().map_err(not_utf8)?;
            Ok(Entry { name, is_dir: entry.file_type()?.is_dir() })
        });
        let mut entries: Vec<Entry> = entries.collect::<io::Result<_>>()?;
        entries.sort();
        Ok(entries)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs_err::rename(from, to)
    }

    fn remove_file(&self, file: &Path) -> io::Result<()> {
        fs_err::remove_file(file)
    }

    fn remove_dir(&self, dir: &Path) -> io::Result<()> {
        fs_err::remove_dir(dir)
    }

    #[cfg(unix)]
    fn sync_dir(&self, dir: &Path) -> io::Result<()> {
        if !fs_err::metadata(dir)?.is_dir() {
            return Err(io::Error::new(ErrorKind::NotADirectory, format!("`{}` is not a folder", dir.display())));
        }
        match File::open(dir)?.sync_all() {
            // From file systems that have no such operation; PostgreSQL's `fsync_fname_ext` ignores it, too.
            Err(error) if [ErrorKind::InvalidInput, ErrorKind::Unsupported].contains(&error.kind()) => Ok(()),
            synced => synced,
        }
    }

    /// Does nothing: the systems apart from Unix have no such operation.
    #[cfg(not(unix))]
    fn sync_dir(&self, _dir: &Path) -> io::Result<()> {
        Ok(())
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
    Err(io::Error::new(ErrorKind::InvalidInput, format!("`{}` is {kind}, not a regular file", file.display())))
}

struct Writer(File);

impl WriteFile for Writer {
    fn write_all(&mut self, bytes: &[u8]) -> io::Result<()> {
        Write::write_all(&mut self.0, bytes)
    }

    fn sync(&mut self) -> io::Result<()> {
        self.0.sync_all()
    }
}

#[cfg(unix)]
mod positioned {
    use std::io;

    use fs_err::File;
    use fs_err::os::unix::fs::FileExt;

    use super::ReadFile;

    /// A file to read.
    pub(super) struct Reader(File);

    impl Reader {
        pub(super) fn new(file: File) -> Self {
            Self(file)
        }
    }

    impl ReadFile for Reader {
        fn len(&self) -> io::Result<u64> {
            Ok(self.0.metadata()?.len())
        }

        fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
            self.0.read_exact_at(buffer, offset)
        }
    }
}

#[cfg(not(unix))]
mod positioned {
    use std::io::{self, Read, Seek, SeekFrom};

    use fs_err::File;
    use parking_lot::Mutex;

    use super::ReadFile;

    /// A file to read, by one thread at a time: its position is part of it.
    pub(super) struct Reader(Mutex<File>);

    impl Reader {
        pub(super) fn new(file: File) -> Self {
            Self(Mutex::new(file))
        }
    }

    impl ReadFile for Reader {
        fn len(&self) -> io::Result<u64> {
            Ok(self.0.lock().metadata()?.len())
        }

        fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
            let mut file = self.0.lock();
            file.seek(SeekFrom::Start(offset))?;
            file.read_exact(buffer)
        }
    }
}

use positioned::Reader;
