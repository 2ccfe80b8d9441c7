//! Checkpoints on a file system that forgets what was not synced, and that fails.

mod checker;
mod faults;
mod in_flight;
mod power_loss;
#[cfg(feature = "mpi")]
mod process_death;
mod states;
