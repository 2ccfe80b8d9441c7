//! [`Rank`]: what the communicators of one rank share.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use burn::tensor::Device;

use super::backend::{Backend, Failure};
use super::ledger_history::LedgerHistory;
use super::rank_context::RankContext;
use super::{CommError, Ledger, Op};

/// One rank of a launch.
#[derive(Debug)]
pub(super) struct Rank {
    pub rank: usize,
    pub device: Device,
    pub ledger: Arc<Ledger>,
    /// Of all worlds that it has been in.
    pub books: Arc<LedgerHistory>,
    pub engine: Arc<dyn Backend>,
    /// The launch that made its thread, and the rank that it is there.
    pub home: (u64, usize),
    /// How many things it runs alone, one inside the other.
    pub alone: AtomicUsize,
}

impl Rank {
    /// Ends every wait of every rank. Returns the error that counts.
    pub fn fail(&self, error: CommError) -> CommError {
        self.engine.fail(Failure::Collective(error))
    }

    /// Fails the world if the calling thread is known to be another rank's: what it calls on, or waits for, came to it
    /// with something of this rank's.
    pub fn check_thread(&self, op: Op, label: &str) -> Result<(), CommError> {
        let (launch, own) = self.home;
        match RankContext::rank_in(launch) {
            Some(rank) if rank != own => {
                let (owner, label) = (self.rank, label.to_string());
                Err(self.fail(CommError::ForeignRankObject { rank, owner, op, label }))
            }
            _ => Ok(()),
        }
    }

    /// Whether it runs what the other ranks do not.
    pub fn is_alone(&self) -> bool {
        self.alone.load(Ordering::Relaxed) > 0
    }

    /// Runs what the other ranks do not: until it ends, or unwinds, the rank joins nothing.
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
