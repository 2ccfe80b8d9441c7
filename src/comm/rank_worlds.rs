//! [`RankWorlds`]: the worlds of which a rank was a member: that of its launch, and those in which it
//! [continued](Backend::shrink).
//!
//! A rank has a number in each of its worlds: after rank 1 of three was lost, rank 2 of the launch
//! is rank 1.
//!
//! | type | one for each | number of the rank |
//! |---|---|---|
//! | [`RankContext`](super::rank_context) | rank of a launch, on its threads | in the launch |
//! | [`RankWorlds`] | rank of a launch | in the launch; of each world by [`iter`](RankWorlds::iter) |
//! | [`RankOutcome`](super::rank_outcome) | rank of a launch, when its program ends | in each world, when it reports |
//! | [`ActiveLaunch`](super::active_launch) | launch of the process, while it runs | |
//! | [`Backend`] | world of a process | in that world |
//! | [`Rank`](super::rank), [`World`](super::World), [`Communicator`](super::Communicator) | rank of a world | in that world |

use std::path::PathBuf;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::comm::StartError;
use crate::comm::backend::Backend;
use crate::comm::observe::Ledger;
use crate::comm::observe::flight::{LaunchStart, Recorder};

/// The worlds of which one rank of a launch was a member, in the order in which it joined them, and
/// its ledgers there.
#[derive(Debug)]
pub(in crate::comm) struct RankWorlds {
    /// Backend of the launch.
    pub backend: Arc<dyn Backend>,
    /// Rank in the launch.
    pub rank: usize,
    /// Folder of the flight recorders' files, if they have files.
    folder: Option<PathBuf>,
    ledgers: Mutex<Vec<Arc<Ledger>>>,
}

impl RankWorlds {
    pub fn new(backend: Arc<dyn Backend>, rank: usize, folder: Option<PathBuf>) -> Arc<Self> {
        Arc::new(Self {
            backend,
            rank,
            folder,
            ledgers: Mutex::default(),
        })
    }

    /// Creates the ledger of rank `rank` in a world with this start.
    pub fn open(&self, rank: usize, start: &LaunchStart) -> Result<Arc<Ledger>, StartError> {
        let ledger = Arc::new(Ledger::new(Recorder::new(
            rank,
            start,
            self.folder.as_deref(),
        )?));
        self.ledgers.lock().push(ledger.clone());
        Ok(ledger)
    }

    /// Returns the ledger of the rank's current world, if it has one.
    pub fn ledger(&self) -> Option<Arc<Ledger>> {
        self.ledgers.lock().last().cloned()
    }

    /// Iterates over the worlds, each with the rank's number there.
    pub fn iter(&self) -> impl Iterator<Item = (Arc<dyn Backend>, usize)> {
        std::iter::successors(
            Some((self.backend.clone(), self.rank)),
            |(backend, rank)| {
                let successor = backend.successor()?;
                let place = successor.new_rank_of(*rank)?;
                Some((successor.backend, place))
            },
        )
    }

    /// Iterates over the worlds in which the rank has a ledger.
    pub fn with_ledgers(&self) -> impl Iterator<Item = (Arc<dyn Backend>, usize, Arc<Ledger>)> {
        let ledgers = self.ledgers.lock().clone();
        self.iter()
            .zip(ledgers)
            .map(|((backend, rank), ledger)| (backend, rank, ledger))
    }

    /// Returns the rank's number in the world of `backend`, if it was a member.
    pub fn rank_in(&self, backend: &Arc<dyn Backend>) -> Option<usize> {
        self.iter()
            .find(|(other, _)| Arc::ptr_eq(other, backend))
            .map(|(_, rank)| rank)
    }
}

/// Returns the last world in which ranks of this process continued, starting from the world of
/// `backend`; the same world if they did not.
pub(in crate::comm) fn last(backend: Arc<dyn Backend>) -> Arc<dyn Backend> {
    std::iter::successors(Some(backend), |backend| {
        backend.successor().map(|successor| successor.backend)
    })
    .last()
    .expect("the first world always exists")
}
