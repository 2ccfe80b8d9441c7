//! The flight recorder: what every rank did last, and who waits for whom, after a crash or while the program runs.
//!
//! Each rank keeps its last 1024 collectives and messages in memory. Where a folder is named, by
//! [`Launch::with_flight_recorder`](super::Launch::with_flight_recorder) or, by who does not own the program, in the
//! environment as `BURN_DTENSOR_FLIGHT`, that memory is a file of the rank, `launch-0-rank-3.flight`: what was noted is
//! there whatever becomes of the process, also by SIGKILL. Ranks of several hosts take a folder that all of them see.
//!
//! [`LaunchTrace::read`] puts the files of a folder together, and says which rank is [at fault](LaunchTrace::fault):
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
//! //   at fault: rank 1 returned, and barrier #1 `step` on ranks [0, 1, 2], which rank 0 waits in, still needs it
//! //   rank 0 waits in barrier #1 `step` on ranks [0, 1, 2] for ranks [1], from 310.441 us on
//! //   ..
//! println!("{}", flights[0]);
//! # std::fs::remove_dir_all(&folder).unwrap();
//! # Ok::<_, burn_dtensor::Error>(())
//! ```
//!
//! `cargo run --example flight -- FOLDER` is this as a command.
//!
//! | file | what it holds |
//! |---|---|
//! | `layout`, `words` | where things lie, and the memory they lie in |
//! | `record`, `shapes`, `channels`, `identity`, `ending` | what is kept, and how it is written and read |
//! | `recorder`, `file` | who writes it |
//! | `read`, `operation`, `life` | one rank |
//! | `merge`, `fault`, `text`, `json` | all ranks |

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
