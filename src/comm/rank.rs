//! [`Rank`]: state shared by the communicators of one rank.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use burn::tensor::Device;

use super::backend::{Backend, Failure};
use super::rank_context::RankContext;
use super::rank_worlds::RankWorlds;
use super::{CommError, Ledger, Op};

/// One rank of a world.
#[derive(Debug)]
pub(super) struct Rank {
    pub rank: usize,
    pub device: Device,
    pub ledger: Arc<Ledger>,
    pub worlds: Arc<RankWorlds>,
    pub backend: Arc<dyn Backend>,
    /// Number of nested [`alone`](Self::alone) calls that are running.
    pub alone: AtomicUsize,
    /// True if replicated values are compared when a program passes them.
    pub checks_replicas: bool,
}

impl Rank {
    /// Ends every wait of every rank. Returns the error of the first failure, which may be an
    /// earlier one.
    pub fn fail(&self, error: CommError) -> CommError {
        self.backend.fail(Failure::Collective(error))
    }

    /// Fails the world if the calling thread is known to belong to another rank, because it then
    /// uses an object of this rank.
    pub fn check_thread(&self, op: Op, label: &str) -> Result<(), CommError> {
        // Of the launch that created the rank's threads: after a shrink, `rank` may differ.
        let launch = self.worlds.backend.launch();
        let own = self.worlds.rank;
        match RankContext::rank_in(launch) {
            Some(rank) if rank != own => {
                let owner = self.rank;
                let label = label.to_string();
                Err(self.fail(CommError::ForeignRankObject {
                    rank,
                    owner,
                    op,
                    label,
                }))
            }
            _ => Ok(()),
        }
    }

    /// Returns true while the rank runs code that the other ranks do not run.
    pub fn is_alone(&self) -> bool {
        self.alone.load(Ordering::Relaxed) > 0
    }

    /// Runs code that the other ranks do not run. Until it returns or unwinds, collectives of the
    /// rank fail.
    pub fn alone<T>(&self, program: impl FnOnce() -> T) -> T {
        struct Alone<'a>(&'a AtomicUsize);
        impl Drop for Alone<'_> {
            fn drop(&mut self) {
                self.0.fetch_sub(1, Ordering::Relaxed);
            }
        }
        self.alone.fetch_add(1, Ordering::Relaxed);
        let _alone = Alone(&self.alone);
        program()
    }
}
