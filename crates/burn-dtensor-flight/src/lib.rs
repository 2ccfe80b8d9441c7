//! Flight files of [burn-dtensor](https://docs.rs/burn-dtensor): the last operations of every rank,
//! and which rank is at fault.
//!
//! A program whose launch has a flight recorder (`Launch::with_flight_recorder`, or the environment
//! variable `BURN_DTENSOR_FLIGHT`) keeps the last 1024 collectives and messages of each rank in a
//! file, which remains however the process ends. [`LaunchTrace::read`] combines the files of a
//! folder and determines which rank is [at fault](LaunchTrace::fault). The program `flight` does
//! the same on the command line:
//!
//! ```console
//! $ cargo install burn-dtensor-flight
//! $ flight flights
//! launch 0 of process 0: 3 ranks, begun 1.284 ms ago
//!   at fault: rank 1 returned, but rank 0 waits for it in barrier #1 `step` on ranks [0, 1, 2]
//!   rank 0 waits in barrier #1 `step` on ranks [0, 1, 2] for ranks [1], since 310.441 us
//!   ..
//! ```
//!
//! Only files are read, so neither burn nor burn-dtensor is needed. burn-dtensor depends on this
//! crate, because its recorder writes the [`format`](mod@format).
//!
//! | file | content |
//! |---|---|
//! | `op`, `launch_id` | kinds and names of operations, and identity of launches |
//! | `format` | the recorder's memory, which is also the format of a file: encoding and decoding |
//! | `read`, `operation`, `process_state` | the trace of one rank |
//! | `merge`, `fault`, `text`, `json` | the traces of all ranks of a launch |
#![warn(missing_docs)]

mod fault;
pub mod format;
mod json;
mod launch_id;
mod merge;
mod op;
mod operation;
mod process_state;
mod read;
#[cfg(test)]
mod tests;
mod text;

pub use fault::{Fault, FaultKind};
pub use format::{DecodeError, ExitKind, FirstFailure, OpOutcome, ProgramExit, Tensor};
pub use launch_id::LaunchId;
pub use merge::{BlockedWait, CollectiveTrace, LaunchTrace};
pub use op::{CollectiveId, Op, Phase};
pub use operation::Operation;
pub use process_state::ProcessState;
pub use read::{FlightError, GroupTrace, RankTrace};
