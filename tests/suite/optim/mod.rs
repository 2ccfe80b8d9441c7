//! burn's optimizers on DTensors, and their state by path, beside burn's own on one device.

mod alone;
mod average;
mod empty_shards;
mod errors;
mod factors;
mod fused;
mod in_backward;
mod lists;
mod models;
mod muon;
mod no_gradients;
mod own;
mod random;
mod refused;
mod sharded;
