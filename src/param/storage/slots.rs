//! [`Storage`]: memory of gathered weights that is taken back under its views.

use std::fmt::Debug;

use burn::backend::DispatchTensor;

/// Memory of gathered weights, there or not.
pub(super) trait Storage: Debug + Send + Sync {
    /// Takes back what forward gathered, under every view.
    fn release(&self);

    /// Gives memory back, with the same values: that of `whole`, which nobody writes to. A slot that was filled
    /// again stays as it is.
    fn fill(&self, full: DispatchTensor);

    #[cfg(feature = "testing")]
    fn is_full(&self) -> bool;
}

/// Fills slots that are read while empty.
pub(super) trait Refill: Send + Sync {
    /// Fills every slot of the unit.
    fn refill(&self);
}
