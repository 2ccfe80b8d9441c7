//! [`ProcessOptions`]: threading and memory sharing of the ranks of a process.

/// Threading and memory sharing of the ranks of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProcessOptions {
    /// True if several threads of a rank may call and wait at the same time:
    /// [`Launch::with_multithreaded_ranks`](crate::comm::Launch::with_multithreaded_ranks).
    pub multithreaded: bool,
    /// True if ranks must not share memory for results:
    /// [`Launch::with_separate_memory`](crate::comm::Launch::with_separate_memory).
    pub separate_memory: bool,
}

impl Default for ProcessOptions {
    /// Returns the default: one thread of a rank at a time, and shared memory. In builds with a sanitizer the
    /// memory is separate, so that the sanitizer detects uses of memory that its rank has released.
    fn default() -> Self {
        Self { multithreaded: false, separate_memory: cfg!(sanitized) }
    }
}
