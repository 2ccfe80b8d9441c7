//! How far units are with comparing what several ranks hold alike, which [`verify`](super::verify) does.

use std::sync::OnceLock;
use std::sync::atomic::AtomicU64;

use parking_lot::Mutex;

use crate::comm::Digests;

/// How often units compare, and what their next reduction does.
#[derive(Debug)]
pub(crate) struct ReplicaCheck {
    pub(super) every: u64,
    pub(super) gradients: Mutex<PendingDigests>,
}

/// What the reductions of a pass compare.
#[derive(Debug, Default)]
pub(super) struct PendingDigests {
    /// The number of the pass, if its gradients are compared next.
    pub(super) due: Option<u64>,
    /// Over the ranks that shard.
    pub(super) shard: Vec<Digests>,
    /// Over those that replicate.
    pub(super) replicate: Vec<Digests>,
}

impl ReplicaCheck {
    /// In every so-manieth pass of a unit; never if 0.
    pub(crate) fn every(passes: u64) -> Self {
        Self { every: passes, gradients: Mutex::default() }
    }

    pub(crate) fn passes(&self) -> u64 {
        self.every
    }
}

/// How many passes there were that train a parameter: of the unit, and of each of its parameters alone.
#[derive(Debug)]
pub(super) struct Passed(pub(super) Box<[AtomicU64]>);

impl Passed {
    /// Of a unit of so many parameters.
    pub(super) fn new(params: usize) -> Self {
        Self((0..=params).map(|_| AtomicU64::new(0)).collect())
    }
}

/// A pass of which all that is alike is compared.
#[derive(Debug)]
pub(super) struct CheckedPass {
    /// Its number: 1, 2, ..
    pub(super) step: u64,
    /// Digests of the gathered weights that are cut.
    pub(super) gathered: OnceLock<Vec<Option<u64>>>,
}
