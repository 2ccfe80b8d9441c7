//! [`Words`]: memory of a flight recorder, private to the process or mapped from a file.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::Path;
use std::sync::atomic::AtomicU64;

use burn_dtensor_flight::format::WORDS;
use memmap2::{MmapOptions, MmapRaw};

/// The 64-bit words of a recorder, initially zero. If they are mapped from a file, a stored value
/// is in the file immediately, however the process ends.
#[derive(Debug)]
pub(super) struct Words(MmapRaw);

/// Number of bytes of the words.
const BYTES: usize = WORDS * size_of::<u64>();

impl Words {
    /// Allocates private memory. Pages that are never written use no physical memory.
    pub fn in_memory() -> io::Result<Self> {
        Ok(Self(MmapOptions::new().len(BYTES).map_anon()?.into()))
    }

    /// Creates a file, and its folder if necessary, and maps it.
    pub fn in_file(path: &Path) -> io::Result<Self> {
        fs::create_dir_all(path.parent().unwrap_or(Path::new("")))?;
        Ok(Self(MmapOptions::new().len(BYTES).map_raw(&zeros(path)?)?))
    }

    /// Returns all words.
    pub fn all(&self) -> &[AtomicU64] {
        // SAFETY: a mapping is page-aligned, and valid for as long as `self`. Every bit pattern is
        // a valid number. This process accesses the mapping only here, with atomic operations;
        // other processes only read the file.
        unsafe { std::slice::from_raw_parts(self.0.as_ptr().cast(), WORDS) }
    }
}

/// Creates a file of zeros. An existing file of this name is only unlinked, because the process of
/// another run may still write it.
fn zeros(path: &Path) -> io::Result<File> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut file = OpenOptions::new()
        .read(true)
        .write(true)
        .create_new(true)
        .open(path)?;
    // The zeros are written, instead of only setting the size, so that a full disk causes an error
    // here and not a signal later.
    file.write_all(&vec![0; BYTES])?;
    Ok(file)
}
