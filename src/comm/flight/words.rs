//! [`Words`]: memory of a flight recorder, private to the process or mapped from a file.

use std::fs::File;
use std::io;
use std::sync::atomic::AtomicU64;

use memmap2::{MmapOptions, MmapRaw};

/// A fixed number of 64-bit words, initially zero. If they are mapped from a file, a stored value is in the file
/// immediately, however the process ends.
#[derive(Debug)]
pub(super) struct Words(MmapRaw);

/// Number of bytes of a word.
pub(super) const WORD: usize = size_of::<u64>();

impl Words {
    /// Allocates private memory. Pages that are never written use no physical memory.
    pub fn in_memory(count: usize) -> io::Result<Self> {
        Ok(Self(MmapOptions::new().len(count * WORD).map_anon()?.into()))
    }

    /// Maps the first `count` words of a file, which must have at least as many.
    pub fn in_file(file: &File, count: usize) -> io::Result<Self> {
        Ok(Self(MmapOptions::new().len(count * WORD).map_raw(file)?))
    }

    /// Returns all words.
    pub fn all(&self) -> &[AtomicU64] {
        // SAFETY: a mapping is page-aligned, and valid for as long as `self`. Every bit pattern is a valid number.
        // This process accesses the mapping only here, with atomic operations; other processes only read the file.
        unsafe { std::slice::from_raw_parts(self.0.as_ptr().cast(), self.0.len() / WORD) }
    }
}
