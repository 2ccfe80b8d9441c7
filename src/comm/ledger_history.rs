//! [`LedgerHistory`]: the ledgers of one rank, of each world that it has been in.

use std::path::PathBuf;
use std::sync::Arc;

use parking_lot::Mutex;

use super::backend::Backend;
use super::flight::{LaunchStart, Recorder};
use super::{Ledger, StartError};

/// The ledgers of one rank of a launch, in the order in which it came to their worlds.
#[derive(Debug)]
pub(super) struct LedgerHistory {
    /// Where flight recorders have their files, if anywhere.
    folder: Option<PathBuf>,
    ledgers: Mutex<Vec<Arc<Ledger>>>,
}

impl LedgerHistory {
    pub fn new(folder: Option<PathBuf>) -> Arc<Self> {
        Arc::new(Self { folder, ledgers: Mutex::default() })
    }

    /// The ledger of what is rank `rank` of `engine`'s world, which begins now.
    pub fn open(&self, rank: usize, engine: &dyn Backend) -> Result<Arc<Ledger>, StartError> {
        self.open_at(rank, &LaunchStart::new(engine.size(), engine.launch()))
    }

    /// The same of a world that has begun.
    pub fn open_at(&self, rank: usize, start: &LaunchStart) -> Result<Arc<Ledger>, StartError> {
        let ledger = Arc::new(Ledger::new(Recorder::new(rank, start, self.folder.as_deref())?));
        self.ledgers.lock().push(ledger.clone());
        Ok(ledger)
    }

    /// That of the world that it is in.
    pub fn last(&self) -> Arc<Ledger> {
        self.ledgers.lock().last().expect("a rank has one before it has a world").clone()
    }

    /// All of them.
    pub fn all(&self) -> Vec<Arc<Ledger>> {
        self.ledgers.lock().clone()
    }
}
