#[path = "../../../../src/fsdp/storage/ahead.rs"]
pub mod ahead;
#[path = "../../../../src/fsdp/storage/slot.rs"]
pub mod slot;
mod sync;

/// As in `src/fsdp/storage/mod.rs`.
pub trait Refill: Send + Sync {
    fn refill(&self);
}
