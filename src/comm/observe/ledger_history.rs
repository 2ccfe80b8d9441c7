//! [`LedgerHistory`]: the ledgers of one rank, one for each world of which it was a member.

use std::path::PathBuf;
use std::sync::Arc;

use parking_lot::Mutex;

use super::Ledger;
use super::flight::{LaunchStart, Recorder};
use crate::comm::StartError;
use crate::comm::backend::Backend;

/// The ledgers of one rank of a launch, in the order in which it joined their worlds.
#[derive(Debug)]
pub(in crate::comm) struct LedgerHistory {
    /// Folder of the flight recorders' files, if they have files.
    folder: Option<PathBuf>,
    ledgers: Mutex<Vec<Arc<Ledger>>>,
}

impl LedgerHistory {
    pub fn new(folder: Option<PathBuf>) -> Arc<Self> {
        Arc::new(Self { folder, ledgers: Mutex::default() })
    }

    /// Creates the ledger of rank `rank` in the world of `engine`, which starts now.
    pub fn open(&self, rank: usize, engine: &dyn Backend) -> Result<Arc<Ledger>, StartError> {
        self.open_at(rank, &LaunchStart::new(engine.size(), engine.launch_id()))
    }

    /// Like [`open`](Self::open), for a world that has already started.
    pub fn open_at(&self, rank: usize, start: &LaunchStart) -> Result<Arc<Ledger>, StartError> {
        let ledger = Arc::new(Ledger::new(Recorder::new(rank, start, self.folder.as_deref())?));
        self.ledgers.lock().push(ledger.clone());
        Ok(ledger)
    }

    /// Returns the ledger of the rank's current world.
    pub fn last(&self) -> Arc<Ledger> {
        self.ledgers.lock().last().expect("a rank has a ledger before it has a world").clone()
    }

    /// Returns all ledgers.
    pub fn all(&self) -> Vec<Arc<Ledger>> {
        self.ledgers.lock().clone()
    }
}
