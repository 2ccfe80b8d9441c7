//! Hook that counts memory which does not come from the global allocator: the blocks of large
//! tensors.

use std::sync::OnceLock;

/// Callbacks for blocks of memory.
#[derive(Debug)]
pub struct Counter {
    /// Called with the bytes of a block that is taken. Returns an account of the counter's choice.
    pub taken: fn(usize) -> usize,
    /// Called with the bytes of a block that is returned, and the account that `taken` returned.
    pub given_back: fn(usize, usize),
}

static COUNTER: OnceLock<Counter> = OnceLock::new();

/// Registers the counter for all blocks that are taken from now on. Only the first call has an
/// effect.
pub fn count_blocks(counter: Counter) {
    let _ = COUNTER.set(counter);
}

pub(crate) fn taken(bytes: usize) -> Option<usize> {
    Some((COUNTER.get()?.taken)(bytes))
}

pub(crate) fn given_back(bytes: usize, account: usize) {
    if let Some(counter) = COUNTER.get() {
        (counter.given_back)(bytes, account);
    }
}
