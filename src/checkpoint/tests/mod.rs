//! Checkpoints on a file system that forgets what was not synced, and that fails.

mod faults;
mod power_loss;
mod states;
