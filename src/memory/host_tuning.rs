//! [`HostTuning`]: the sizes by which the host data plane divides work and keeps memory.
#![cfg_attr(
    not(feature = "flex"),
    allow(
        dead_code,
        reason = "without a CPU backend, only memory of results is here"
    )
)]

use std::sync::LazyLock;

/// Sizes that change how long an operation takes, never its result.
///
/// Those that depend on the machine are derived from its page size and caches. The others stand for
/// costs of the same order on all machines: waking a thread takes some 10 µs, in which a core
/// copies some 100 KiB.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct HostTuning {
    /// Granularity of the sizes of pooled blocks: bytes of a page.
    pub page: usize,
    /// Minimum bytes of memory that is pooled: 16 pages. The page faults of less take no longer
    /// than the pool.
    pub min_pooled_bytes: usize,
    /// Minimum bytes that a task reads, for which it is worth a thread.
    pub task_bytes: usize,
    /// Number of tasks for each thread, or for each rank where ranks share work. With several, one
    /// that is slow or late delays the others little.
    pub tasks_per_worker: usize,
    /// Minimum bytes of an operation that several threads or ranks perform together: those of two
    /// tasks.
    pub shared_bytes: usize,
    /// Minimum bytes that a task of a reduction writes: 4 pages.
    pub task_output_bytes: usize,
    /// Number of elements that are reduced at a time. Four partial results of 8 bytes fit in the
    /// first-level cache.
    pub strip: usize,
    /// Minimum elements of the runs of a block that are reduced in place. Shorter runs are first
    /// copied to adjacent memory: a call of the reduction takes as long as some tens of elements.
    pub reduced_run: usize,
}

impl HostTuning {
    /// Number of half-precision elements that are converted at a time. Constant, because it is a
    /// length in types.
    pub const CONVERTED: usize = 64;

    /// Granularity in elements at which a run is split: a cache line or more, whatever the size of
    /// elements.
    pub const SPLIT: usize = 64;

    /// Minimum elements of runs that are split. Tasks are uneven by less than a sixteenth of such a
    /// run.
    pub const SPLIT_RUN: usize = 16 * Self::SPLIT;

    /// Returns the values for this machine.
    pub fn get() -> &'static Self {
        static OF_MACHINE: LazyLock<HostTuning> = LazyLock::new(|| {
            #[cfg(all(target_os = "linux", target_env = "gnu"))]
            let [page, cache] = [libc::_SC_PAGESIZE, libc::_SC_LEVEL1_DCACHE_SIZE].map(|name| {
                // SAFETY: `sysconf` reads a value that the system has, and has no other effect.
                usize::try_from(unsafe { libc::sysconf(name) })
                    .ok()
                    .filter(|bytes| *bytes > 0)
            });
            #[cfg(not(all(target_os = "linux", target_env = "gnu")))]
            let [page, cache] = [None; 2];
            HostTuning::new(page.unwrap_or(4 << 10), cache.unwrap_or(32 << 10))
        });
        &OF_MACHINE
    }

    /// Returns the values for a machine with pages of `page` bytes and first-level caches of
    /// `cache` bytes.
    fn new(page: usize, cache: usize) -> Self {
        let task_bytes = 512 << 10;
        Self {
            page,
            min_pooled_bytes: 16 * page,
            task_bytes,
            tasks_per_worker: 4,
            shared_bytes: 2 * task_bytes,
            task_output_bytes: 4 * page,
            strip: (cache / (4 * size_of::<f64>())).max(Self::CONVERTED),
            reduced_run: 64,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_follow_pages_and_caches() {
        let small = HostTuning::new(4 << 10, 32 << 10);
        assert_eq!(
            (small.min_pooled_bytes, small.task_output_bytes, small.strip),
            (64 << 10, 16 << 10, 1024)
        );
        let large = HostTuning::new(64 << 10, 64 << 10);
        assert_eq!(
            (large.min_pooled_bytes, large.task_output_bytes, large.strip),
            (1 << 20, 256 << 10, 2048)
        );
        assert!(HostTuning::get().page.is_power_of_two());
    }
}
