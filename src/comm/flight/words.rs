//! [`Words`]: the memory of a flight recorder, of this process alone or of a file.

use std::fs::File;
use std::io;
use std::sync::atomic::AtomicU64;

use memmap2::{MmapOptions, MmapRaw};

/// As many 64-bit words, zero at first. Of a file they are its bytes: what is stored in one is the file's as soon as it is
/// stored, whatever becomes of the process.
#[derive(Debug)]
pub(super) struct Words(MmapRaw);

/// Bytes of a word.
pub(super) const WORD: usize = size_of::<u64>();

impl Words {
    /// Of this process. Those that are never touched take no memory.
    pub fn in_memory(count: usize) -> io::Result<Self> {
        Ok(Self(MmapOptions::new().len(count * WORD).map_anon()?.into()))
    }

    /// The first `count` of a file, which has so many.
    pub fn in_file(file: &File, count: usize) -> io::Result<Self> {
        Ok(Self(MmapOptions::new().len(count * WORD).map_raw(file)?))
    }

    pub fn all(&self) -> &[AtomicU64] {
        // SAFETY: a mapping begins at a page, so is aligned, and is there for as long as `self`. Any bits are a number.
        // This process touches it through here alone, by atomic operations; others only read the file.
        unsafe { std::slice::from_raw_parts(self.0.as_ptr().cast(), self.0.len() / WORD) }
    }
}
