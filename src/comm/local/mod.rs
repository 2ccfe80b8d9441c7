//! Ranks as threads of one process: tensors change hands by reference.
//!
//! A collective has two halves. Issuing it deposits references to the rank's tensors, with a
//! fingerprint, and never blocks. Waiting blocks until all deposits of that sequence number are
//! there; then the rank builds its own result straight from its peers' memory. So any number of
//! collectives can be under way, in any order of waiting, and a result never shares memory with
//! another rank's tensor.
//!
//! On Cube devices a list of tensors goes through one flat buffer a rank, `cube`, which kernels fill and read.

mod arguments;
mod board;
mod communicator;
#[cfg(feature = "cube")]
mod cube;
mod data;
mod fingerprint;
#[cfg(feature = "flex")]
mod flex;
mod generic;
mod pending;
mod ranges;
mod rendezvous;
mod sync;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

pub(super) use board::Failure;
pub(super) use communicator::LocalCommunicator;

use super::home::Home;
use super::{Call, CommError, Op};

/// What the ranks of one [`launch`](super::launch) share.
pub(super) struct LocalWorld {
    pub rendezvous: rendezvous::Rendezvous<fingerprint::Print, data::Deposit>,
    pub size: usize,
    /// How long one wait may last.
    pub deadline: Duration,
    /// Tells the launches of a process apart: 0, 1, ..
    pub launch: u64,
    finished: AtomicBool,
}

/// About 20 microseconds, which is what it takes to sleep and be woken.
const SPINS: u32 = 500;

static LAUNCHES: AtomicU64 = AtomicU64::new(0);

impl LocalWorld {
    pub fn new(size: usize, deadline: Duration, multithreaded: bool) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let spins = if size <= cores { SPINS } else { 0 };
        Self {
            rendezvous: rendezvous::Rendezvous::new(size, spins, multithreaded),
            size,
            deadline,
            launch: LAUNCHES.fetch_add(1, Ordering::Relaxed),
            finished: AtomicBool::new(false),
        }
    }

    /// Fails the world if the calling thread is known to be another rank's than `owner`'s: what it calls
    /// on, or waits for, came to it with something of that rank's.
    fn check_thread(&self, owner: usize, op: Op, call: &Call) -> Result<(), CommError> {
        match Home::rank_in(self.launch) {
            Some(rank) if rank != owner => {
                let error = CommError::OtherRank { rank, owner, op, label: call.label.to_string() };
                Err(self.rendezvous.fail(Failure::Collective(error)))
            }
            _ => Ok(()),
        }
    }

    /// No rank's program runs any more.
    pub fn finish(&self) {
        self.finished.store(true, Ordering::Relaxed);
    }

    pub fn is_finished(&self) -> bool {
        self.finished.load(Ordering::Relaxed)
    }
}

impl std::fmt::Debug for LocalWorld {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LocalWorld").field("size", &self.size).field("deadline", &self.deadline).finish()
    }
}
