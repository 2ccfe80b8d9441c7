//! What sharded models hold in memory: this binary has nothing else in it.

mod addresses;
mod bookkeeping;
mod bounds;
mod chain;
mod checkpointed;
#[cfg(feature = "cube")]
mod cube;
mod failed;
mod full;
#[path = "../suite/fsdp/hook.rs"]
mod hook;
mod lazy;
mod live;
mod loaded;
mod muon;
mod order;
mod replicated;
mod stepped;
mod tables;
mod undifferentiated;

/// Whether everything is tried, as `.ci/long` has time for.
fn is_long() -> bool {
    std::env::var_os("LONG_TESTS").is_some()
}
