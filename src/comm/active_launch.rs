//! What is noted when the process ends while launches are under way: by [`exit`](std::process::exit) on any thread, or by a
//! return from `main` or a panic there. Nothing unwinds then, so that [`End`](super::rank_outcome::RankOutcome) never
//! comes.
//!
//! Every rank of the process whose program runs [has exited](ExitKind::Exited), by its flight recorder. Other processes
//! are told afterwards: who looks into the files because it was told finds it there.

use std::ffi::c_int;
use std::sync::{Arc, Once};

use parking_lot::Mutex;

use super::backend::{Backend, worlds};
use super::flight::{ExitKind, FirstFailure, ProgramExit};
use super::ledger_history::LedgerHistory;
use super::rank_context;
use super::rank_outcome::first;

unsafe extern "C" {
    /// Of C's standard library: calls `function` on the thread that ends the process, while all others run.
    safe fn atexit(function: extern "C" fn()) -> c_int;
}

/// Has `function` called when the process ends by itself.
pub(super) fn at_exit(function: extern "C" fn()) {
    assert_eq!(atexit(function), 0, "the C library has room for at least 32 functions called at exit");
}

static LAUNCHES: Mutex<Vec<Arc<LocalRanks>>> = Mutex::new(Vec::new());

/// The ranks of a launch that are in this process.
struct LocalRanks {
    engine: Arc<dyn Backend>,
    books: Vec<(usize, Arc<LedgerHistory>)>,
}

/// A launch under way, for as long as this is there.
pub(super) struct ActiveLaunch(Arc<LocalRanks>);

impl ActiveLaunch {
    /// Of the ranks that have these books.
    pub fn new(engine: Arc<dyn Backend>, books: impl Iterator<Item = (usize, Arc<LedgerHistory>)>) -> Self {
        static REGISTERED: Once = Once::new();
        REGISTERED.call_once(|| at_exit(note));
        let ranks = Arc::new(LocalRanks { engine, books: books.collect() });
        LAUNCHES.lock().push(ranks.clone());
        Self(ranks)
    }
}

impl Drop for ActiveLaunch {
    fn drop(&mut self) {
        LAUNCHES.lock().retain(|ranks| !Arc::ptr_eq(ranks, &self.0));
    }
}

/// Notes that the calling thread ends the process. Whoever tells other processes calls it before.
pub(super) extern "C" fn note() {
    let launches = LAUNCHES.lock().clone();
    let by = rank_context::launch_and_rank();
    for ranks in launches {
        let by = by.filter(|(launch, _)| *launch == ranks.engine.launch());
        ranks.note(by.map(|(_, rank)| rank));
    }
}

impl LocalRanks {
    /// In every world that they were in. `by` is the rank whose program has ended the process, if one has.
    fn note(&self, by: Option<usize>) {
        for (rank, books) in &self.books {
            for ((engine, place), ledger) in worlds(self.engine.clone(), *rank).zip(books.all()) {
                let by =
                    by.and_then(|by| worlds(self.engine.clone(), by).find(|(other, _)| Arc::ptr_eq(other, &engine)));
                let (text, by_another) = match by {
                    None => ("its process has ended".into(), None),
                    Some((_, by)) if by == place => ("its program has ended the process".into(), None),
                    Some((_, rank)) => {
                        let text = format!("the program of rank {rank} has ended their process");
                        (text.clone(), Some(FirstFailure { rank, is_own: false, is_difference: false, text }))
                    }
                };
                let failure = engine.failure().map(|failure| first(&failure, place)).or(by_another);
                ledger.recorder().ended(|at| ProgramExit { how: ExitKind::Exited, at, text, failure });
            }
        }
    }
}
