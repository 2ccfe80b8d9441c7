//! What sharded models hold in memory: this binary has nothing else in it.

mod bookkeeping;
mod chain;
#[cfg(feature = "wgpu")]
mod cube;
mod full;
mod live;
mod order;
mod tables;
