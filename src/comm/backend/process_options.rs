//! [`ProcessOptions`]: how ranks of a process live together.

/// How the ranks of a process live together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProcessOptions {
    /// A rank may call and wait on several threads at once:
    /// [`Launch::with_multithreaded_ranks`](crate::comm::Launch::with_multithreaded_ranks).
    pub multithreaded: bool,
    /// No rank has memory in common with another:
    /// [`Launch::with_separate_memory`](crate::comm::Launch::with_separate_memory).
    pub separate_memory: bool,
}

impl Default for ProcessOptions {
    /// One thread after another, and memory in common; but where a sanitizer is to see who uses memory that its rank has given
    /// back.
    fn default() -> Self {
        Self { multithreaded: false, separate_memory: cfg!(sanitized) }
    }
}
