#[path = "../../../../src/param/storage/slot.rs"]
pub mod slot;
mod sync;
#[path = "../../../../src/param/storage/unshard_state.rs"]
pub mod unshard_state;

/// As in `src/param/storage/placing.rs`.
pub trait Refill: Send + Sync {
    fn refill(&self);
}
