//! Checkpoints on a file system that forgets what was not synced, that fails, and that others have
//! written to.

mod checker;
mod faults;
pub(super) mod folder;
mod hostile;
mod in_flight;
mod power_loss;
#[cfg(feature = "mpi")]
mod process_death;
mod states;
mod two_savers;
