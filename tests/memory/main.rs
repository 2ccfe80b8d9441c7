//! What sharded models hold in memory: this binary has nothing else in it.

mod addresses;
mod bookkeeping;
mod bounds;
mod chain;
mod checkpointed;
#[cfg(feature = "wgpu")]
mod cube;
mod failed;
mod full;
#[path = "../suite/fsdp/hook.rs"]
mod hook;
mod lazy;
mod live;
mod muon;
mod order;
mod tables;
