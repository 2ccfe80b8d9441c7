#[path = "../../../../src/param/storage/gathered.rs"]
pub mod gathered;
#[path = "../../../../src/param/storage/slot.rs"]
pub mod slot;
mod sync;

/// As in `src/param/storage/mod.rs`.
pub trait Refill: Send + Sync {
    fn refill(&self);
}
