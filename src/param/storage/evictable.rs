//! [`Storage`]: memory of gathered weights that can be freed while views of it exist.

use std::fmt::Debug;

use burn::backend::DispatchTensor;

/// Memory of gathered weights, present or evicted.
pub(crate) trait Storage: Debug + Send + Sync {
    /// Frees the memory that forward gathered, under every view.
    fn release(&self);

    /// Restores the memory from `full`, which has the same values and to which no other handle
    /// writes. Does nothing if it was restored before.
    fn fill(&self, full: DispatchTensor);

    #[cfg(feature = "testing")]
    fn is_full(&self) -> bool;
}

/// Restores evicted storage when a view of it is read.
pub(crate) trait Refill: Send + Sync {
    /// Restores all evicted storage of the unit.
    fn refill(&self);
}
