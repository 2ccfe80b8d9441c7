//! Flight recorder: shows the last operations of every rank and which ranks wait for which, after a crash or while
//! the program runs.
//!
//! Each rank keeps its last 1024 collectives and messages in memory. If a folder is named, this memory is a
//! memory-mapped file of the rank, `launch-0-rank-3.flight`. The program can name the folder with
//! [`Launch::with_flight_recorder`](super::Launch::with_flight_recorder), and the user with the environment
//! variable `BURN_DTENSOR_FLIGHT`. What a rank has recorded remains in the file however its process ends, also
//! after SIGKILL. If ranks run on several hosts, use a folder that all of them can access.
//!
//! [`LaunchTrace::read`] combines the files of a folder and determines which rank is [at
//! fault](LaunchTrace::fault):
//!
//! ```
//! use burn_dtensor::comm::flight::{LaunchTrace, FaultKind};
//! use burn_dtensor::comm::{Launch, launch};
//!
//! # let folder = std::env::temp_dir().join(format!("burn-dtensor-flight-{}", std::process::id()));
//! let failed = launch(Launch::threads(3).with_flight_recorder(&folder), |world| {
//!     world.barrier("start")?;
//!     if world.rank() == 1 {
//!         return Ok(());
//!     }
//!     world.barrier("step")
//! });
//! assert!(failed.is_err());
//! let flights = LaunchTrace::read(&folder)?;
//! let fault = flights[0].fault().expect("a rank is at fault");
//! assert_eq!((fault.rank, fault.why), (1, FaultKind::Left));
//! // launch 0 of 3 ranks, begun 1.284 ms ago
//! //   at fault: rank 1 returned, but rank 0 waits for it in barrier #1 `step` on ranks [0, 1, 2]
//! //   rank 0 waits in barrier #1 `step` on ranks [0, 1, 2] for ranks [1], since 310.441 us
//! //   ..
//! println!("{}", flights[0]);
//! # std::fs::remove_dir_all(&folder).unwrap();
//! # Ok::<_, burn_dtensor::Error>(())
//! ```
//!
//! `cargo run --example flight -- FOLDER` does the same on the command line.
//!
//! | file | content |
//! |---|---|
//! | `layout`, `words` | layout of the recorder's memory, and the memory itself |
//! | `record`, `shapes`, `channels`, `identity`, `program_exit` | recorded data, and its encoding |
//! | `recorder`, `file` | writing |
//! | `read`, `operation`, `process_state` | reading the trace of one rank |
//! | `merge`, `fault`, `text`, `json` | combining the traces of all ranks |

mod bytes;
mod channels;
mod fault;
mod file;
mod fold;
mod identity;
mod json;
mod layout;
mod merge;
mod operation;
mod process_state;
mod program_exit;
mod read;
mod record;
mod recorder;
mod shapes;
#[cfg(test)]
mod tests;
mod text;
mod words;

pub use fault::{Fault, FaultKind};
pub use merge::{BlockedWait, CollectiveTrace, LaunchTrace};
pub use operation::Operation;
pub use process_state::ProcessState;
pub use program_exit::{ExitKind, FirstFailure, ProgramExit};
pub use read::{FlightError, GroupTrace, RankTrace};
pub use record::OpOutcome;
pub(super) use record::{Peer, Posting};
pub(super) use recorder::{LaunchStart, Recorder, Sequence};
pub use shapes::Tensor;
