#[path = "../../../../src/param/buffer/gathered.rs"]
pub mod gathered;
#[path = "../../../../src/param/buffer/slot.rs"]
pub mod slot;
mod sync;

/// As in `src/param/buffer/mod.rs`.
pub trait Refill: Send + Sync {
    fn refill(&self);
}
