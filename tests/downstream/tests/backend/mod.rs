//! A backend and a transport of another crate, over threads and across processes.

mod conformance;
mod failure;
mod training;
#[cfg(unix)]
mod two_processes;
