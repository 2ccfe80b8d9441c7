//! Checkpoints on a file system that forgets what was not synced, that fails, and that others have written to.

mod faults;
pub(super) mod folder;
mod hostile;
mod power_loss;
mod states;
