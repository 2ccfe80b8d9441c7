//! Ranks as threads of one process: tensors change hands by reference.
//!
//! A collective has two halves. Issuing it deposits references to the rank's tensors, with a
//! fingerprint, and never blocks. Waiting blocks until all deposits of that sequence number are
//! there; then the rank builds its own result straight from its peers' memory. So any number of
//! collectives can be under way, in any order of waiting, and a result never shares memory with
//! another rank's tensor.
//!
//! On Cube devices a list of tensors goes through one flat buffer a rank, `cube`, which kernels fill and read.

mod board;
mod channel;
#[cfg(feature = "cube")]
mod cube;
mod data;
#[cfg(feature = "flex")]
mod flex;
mod pending;
mod rendezvous;
mod sync;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use super::engine::{Channel, Engine, Failure, Member, Print, launch_number};
use super::{CommError, Op};

/// What the ranks of one [`launch`](super::launch) share.
pub(super) struct LocalEngine {
    rendezvous: rendezvous::Rendezvous<Print, data::Deposit>,
    size: usize,
    /// Tells the launches of a process apart: 0, 1, ..
    launch: u64,
    /// Ranks whose programs are over.
    left: AtomicUsize,
    this: Weak<Self>,
}

/// About 20 microseconds, which is what it takes to sleep and be woken.
const SPINS: u32 = 500;

impl LocalEngine {
    pub fn new(size: usize, multithreaded: bool) -> Arc<Self> {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let spins = if size <= cores { SPINS } else { 0 };
        Arc::new_cyclic(|this| Self {
            rendezvous: rendezvous::Rendezvous::new(size, spins, multithreaded),
            size,
            launch: launch_number(),
            left: AtomicUsize::new(0),
            this: this.clone(),
        })
    }
}

impl Engine for LocalEngine {
    fn size(&self) -> usize {
        self.size
    }

    fn here(&self) -> Vec<usize> {
        (0..self.size).collect()
    }

    fn launch(&self) -> u64 {
        self.launch
    }

    fn channel(&self, member: Member, name: &'static str) -> Arc<dyn Channel> {
        let this = self.this.upgrade().expect("whoever calls has it");
        Arc::new(channel::LocalChannel::new(this, member, name))
    }

    fn fail(&self, failure: Failure) -> CommError {
        self.rendezvous.fail(failure)
    }

    fn failure(&self) -> Option<Failure> {
        self.rendezvous.failure()
    }

    fn leave(&self, rank: usize) {
        self.rendezvous.returned(rank);
        self.left.fetch_add(1, Ordering::Relaxed);
    }

    fn doing(&self, rank: usize) -> String {
        self.rendezvous.doing(rank)
    }

    fn is_finished(&self) -> bool {
        self.left.load(Ordering::Relaxed) == self.size
    }
}

impl board::Fingerprint for Print {
    fn op(&self) -> Op {
        self.op()
    }

    fn label(&self) -> Arc<str> {
        self.label().clone()
    }

    fn difference(&self, other: &Self) -> Option<String> {
        self.difference(other)
    }

    fn refusal(&self, sent: &Self) -> Option<String> {
        self.refusal(sent)
    }

    fn is_of_pairs(&self) -> bool {
        self.is_of_pairs()
    }
}

impl std::fmt::Debug for LocalEngine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LocalEngine").field("launch", &self.launch).field("size", &self.size).finish()
    }
}
