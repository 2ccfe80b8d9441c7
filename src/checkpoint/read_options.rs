//! [`ReadOptions`]: memory, threads and over-reading of a load.

use std::thread;

/// Memory, threads and over-reading of a load.
///
/// ```
/// use burn_dtensor::checkpoint::ReadOptions;
///
/// let options = ReadOptions::new().with_memory(256 << 20).with_threads(2);
/// # assert_eq!((options.memory, options.threads, options.max_over_read), (256 << 20, 2, 1.1));
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct ReadOptions {
    /// Bytes of memory for what is being read, on each rank, next to the shards that were read. One
    /// shard at a time is read if a shard is larger.
    pub memory: usize,
    /// Number of threads that read, on each rank.
    pub threads: usize,
    /// Most bytes that may be read for each byte that is needed, to have fewer and longer reads. It
    /// applies where runs of needed bytes have at least 16 KiB, without the rest of blocks that are
    /// read to verify them.
    pub max_over_read: f64,
}

impl Default for ReadOptions {
    fn default() -> Self {
        let threads = thread::available_parallelism().map_or(1, |threads| threads.get().min(8));
        Self {
            memory: 1 << 30,
            threads,
            max_over_read: 1.1,
        }
    }
}

impl ReadOptions {
    /// Returns the default: 1 GiB, a thread for each core but at most 8, and at most 1.1 bytes for
    /// each that is needed.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the bytes of memory.
    #[must_use]
    pub fn with_memory(self, memory: usize) -> Self {
        Self { memory, ..self }
    }

    /// Sets the number of threads. At least one reads.
    #[must_use]
    pub fn with_threads(self, threads: usize) -> Self {
        Self { threads, ..self }
    }

    /// Sets how many bytes may be read for each that is needed. Less than 1 counts as 1.
    #[must_use]
    pub fn with_max_over_read(self, max_over_read: f64) -> Self {
        Self {
            max_over_read,
            ..self
        }
    }
}
