//! Who counts memory that is no allocator's: the blocks of large tensors.

use std::sync::OnceLock;

/// Told of blocks of memory.
#[derive(Debug)]
pub struct Counter {
    /// So many bytes are taken, for an account that the counter names.
    pub taken: fn(usize) -> usize,
    /// So many are given back, which were taken for this account.
    pub given_back: fn(usize, usize),
}

static COUNTER: OnceLock<Counter> = OnceLock::new();

/// Has all blocks counted, of those that are taken from now on. The first counter stays.
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
