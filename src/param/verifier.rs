//! [`Verifier`]: how far a unit is with comparing what several ranks hold alike, which [`verify`](super::verify) does.

use std::sync::OnceLock;
use std::sync::atomic::AtomicU64;

use parking_lot::Mutex;

use crate::comm::Digests;

/// What a unit counts and remembers.
#[derive(Debug)]
pub(super) struct Verifier {
    /// Passes so far that train a parameter: of the unit, and of each parameter alone.
    pub(super) passes: Box<[AtomicU64]>,
    /// Of gradients that have not been compared.
    pub(super) gradients: Mutex<Carried>,
}

impl Verifier {
    /// Of a unit of so many parameters.
    pub(super) fn new(params: usize) -> Self {
        Self { passes: (0..=params).map(|_| AtomicU64::new(0)).collect(), gradients: Mutex::default() }
    }
}

/// A pass of which all that is alike is compared.
#[derive(Debug)]
pub(super) struct Due {
    /// Its number: 1, 2, ..
    pub(super) step: u64,
    /// Digests of the gathered weights that are cut.
    pub(super) gathered: OnceLock<Vec<Option<u64>>>,
}

/// What the reductions of a pass compare.
#[derive(Debug, Default)]
pub(super) struct Carried {
    /// The number of the pass, if its gradients are compared later.
    pub(super) due: Option<u64>,
    /// Over the ranks that shard.
    pub(super) shard: Vec<Digests>,
    /// Over those that replicate.
    pub(super) replicate: Vec<Digests>,
}
