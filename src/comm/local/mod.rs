//! Ranks as threads of one process: tensors change hands by reference.
//!
//! A collective has two halves. Issuing it deposits references to the rank's tensors, with a
//! fingerprint, and never blocks. Waiting blocks until all deposits of that sequence number are
//! there; then the rank builds its own result straight from its peers' memory. So any number of
//! collectives can be under way, in any order of waiting, and a result never shares memory with
//! another rank's tensor.

mod arguments;
mod board;
mod communicator;
mod data;
mod fingerprint;
#[cfg(feature = "flex")]
mod flex;
mod generic;
mod pending;
mod ranges;
mod rendezvous;
mod sync;

use std::sync::OnceLock;
use std::thread::ThreadId;
use std::time::Duration;

pub(super) use board::Failure;
pub(super) use communicator::LocalCommunicator;

/// What the ranks of one [`launch`](super::launch) share.
pub(super) struct LocalWorld {
    pub rendezvous: rendezvous::Rendezvous<fingerprint::Print, data::Deposit>,
    pub size: usize,
    /// How long one wait may last.
    pub deadline: Duration,
    /// The thread that each rank's program runs on.
    threads: Box<[OnceLock<ThreadId>]>,
}

/// About 20 microseconds, which is what it takes to sleep and be woken.
const SPINS: u32 = 500;

impl LocalWorld {
    pub fn new(size: usize, deadline: Duration) -> Self {
        let threads = (0..size).map(|_| OnceLock::new()).collect();
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let spins = if size <= cores { SPINS } else { 0 };
        Self { rendezvous: rendezvous::Rendezvous::new(size, spins), size, deadline, threads }
    }

    /// Remembers whether `rank` communicates from more than one thread, see [`board`].
    fn note_thread(&self, rank: usize) {
        let current = std::thread::current().id();
        if *self.threads[rank].get_or_init(|| current) != current {
            self.rendezvous.threaded(rank);
        }
    }
}

impl std::fmt::Debug for LocalWorld {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LocalWorld").field("size", &self.size).field("deadline", &self.deadline).finish()
    }
}
