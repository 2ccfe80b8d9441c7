//! Records the end of a process that exits while launches are running: by
//! [`exit`](std::process::exit) on any thread, by a return from `main`, or by a panic there. No
//! thread unwinds then, so a rank has no [`RankOutcome`](super::rank_outcome::RankOutcome).
//!
//! The flight recorder of every rank whose program was running records that it
//! [exited](ExitKind::Exited). Other processes are notified afterwards, so that a process that
//! reads the files because of the notification finds the record.

use std::ffi::c_int;
use std::sync::{Arc, Once};

use parking_lot::Mutex;

use super::flight::{ExitKind, FirstFailure, ProgramExit};
use super::rank_context;
use super::rank_outcome::first;
use super::rank_worlds::RankWorlds;

unsafe extern "C" {
    /// Function of C's standard library: registers `function` to be called on the thread that ends
    /// the process, while all other threads keep running.
    safe fn atexit(function: extern "C" fn()) -> c_int;
}

/// Registers `function` to be called when the process exits.
pub(super) fn at_exit(function: extern "C" fn()) {
    assert_eq!(
        atexit(function),
        0,
        "the C library can register at least 32 functions with `atexit`"
    );
}

/// Ranks of a launch that run in this process.
type LocalRanks = Vec<Arc<RankWorlds>>;

/// Running launches, by number.
static LAUNCHES: Mutex<Vec<(u64, LocalRanks)>> = Mutex::new(Vec::new());

/// Registration of a running launch. Dropping it removes the registration.
pub(super) struct ActiveLaunch(u64);

impl ActiveLaunch {
    /// Registers a launch with its ranks in this process.
    pub fn new(launch: u64, ranks: LocalRanks) -> Self {
        static REGISTERED: Once = Once::new();
        REGISTERED.call_once(|| at_exit(note));
        LAUNCHES.lock().push((launch, ranks));
        Self(launch)
    }
}

impl Drop for ActiveLaunch {
    fn drop(&mut self) {
        LAUNCHES.lock().retain(|(launch, _)| *launch != self.0);
    }
}

/// Records that the calling thread ends the process. A transport that notifies other processes must
/// call this first.
pub(super) extern "C" fn note() {
    let launches = LAUNCHES.lock().clone();
    let by = rank_context::launch_and_rank();
    for (launch, ranks) in launches {
        // The rank whose program has ended the process, if one did.
        let by = by.filter(|(of, _)| *of == launch);
        let by = by.and_then(|(_, by)| ranks.iter().find(|worlds| worlds.rank == by));
        for (backend, place, ledger) in ranks.iter().flat_map(|worlds| worlds.with_ledgers()) {
            let (text, by_another) = match by.and_then(|by| by.rank_in(&backend)) {
                None => ("its process has ended".into(), None),
                Some(by) if by == place => ("its program has ended the process".into(), None),
                Some(rank) => {
                    let text = format!("the program of rank {rank} has ended the process");
                    (
                        text.clone(),
                        Some(FirstFailure {
                            rank,
                            is_own: false,
                            is_difference: false,
                            text,
                        }),
                    )
                }
            };
            let failure = backend
                .failure()
                .map(|failure| first(&failure, place))
                .or(by_another);
            ledger.recorder().ended(|at| ProgramExit {
                how: ExitKind::Exited,
                at,
                text,
                failure,
            });
        }
    }
}
