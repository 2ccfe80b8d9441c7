//! Flight recorder: shows the last operations of every rank and which ranks wait for which, after a
//! crash or while the program runs.
//!
//! Each rank keeps its last 1024 collectives and messages in memory. If a folder is named, this
//! memory is a memory-mapped file of the rank, `launch-0-process-0-rank-3.flight`, or
//! `launch-0-rank-3.flight` if several processes make the launch together. The program can name the
//! folder with [`Launch::with_flight_recorder`](crate::comm::Launch::with_flight_recorder), and the
//! user with the environment variable `BURN_DTENSOR_FLIGHT`. What a rank has recorded remains in
//! the file however its process ends, also after SIGKILL. If ranks run on several hosts, use a
//! folder that all of them can access.
//!
//! The program `flight` combines the files of a folder and names the rank at fault:
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
//! The crate [`burn_dtensor_flight`] does the same for a program, and defines the
//! [format](burn_dtensor_flight::format) of a file. The trace of one rank is available here:
//! [`Ledger::flight`](crate::comm::Ledger::flight) returns that of a running rank, and
//! [`RankTrace::read`] reads a file.
//!
//! ```
//! use burn_dtensor::comm::flight::{ExitKind, RankTrace};
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
//! let trace = RankTrace::read(folder.join("launch-0-process-0-rank-1.flight"))?;
//! assert_eq!(trace.operations[0].to_string(), "barrier #0 `start` on ranks [0, 1, 2]");
//! assert_eq!(trace.ending.map(|ending| ending.how), Some(ExitKind::Returned));
//! # std::fs::remove_dir_all(&folder).unwrap();
//! # Ok::<_, burn_dtensor::Error>(())
//! ```

mod call;
mod recorder;
#[cfg(test)]
mod tests;
mod words;

pub use burn_dtensor_flight::{
    DecodeError, ExitKind, FirstFailure, FlightError, GroupTrace, LaunchId, OpOutcome, Operation,
    ProcessState, ProgramExit, RankTrace, Tensor,
};

pub(in crate::comm) use recorder::{LaunchStart, RecordedCall, Recorder, Sequence};
