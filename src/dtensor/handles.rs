//! [`Handles`]: what a tensor was already brought to.

use std::sync::Arc;

use burn::tensor::Tensor;
use parking_lot::Mutex;
use smallvec::SmallVec;

use crate::placement::Layout;

/// Mesh dimensions, ascending, without those of size 1.
pub(super) type Dims = SmallVec<[usize; 3]>;

/// What one tensor was already brought to, kept until backward or while it or a clone of it lives.
#[derive(Debug, Default)]
pub(super) struct Handles<const D: usize> {
    pub(super) made: Mutex<SmallVec<[Handle<D>; 1]>>,
    /// For the tensor as it is laid out, varying: made by an owner who sums its gradient.
    pub(super) given: Option<Given<D>>,
}

/// Made by an owner, each time.
pub(super) struct Given<const D: usize> {
    pub(super) varying: Dims,
    pub(super) make: Arc<dyn Fn() -> Tensor<D> + Send + Sync>,
}

impl<const D: usize> std::fmt::Debug for Given<D> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Given").field("varying", &self.varying).finish_non_exhaustive()
    }
}

/// One layout that it was brought to.
#[derive(Debug)]
pub(super) struct Handle<const D: usize> {
    pub(super) layout: Layout,
    pub(super) varying: Dims,
    pub(super) kept: Arc<Kept<D>>,
}

/// A tensor, until backward has run its node: that is spent, and with it the memory is let go. One
/// that is not tracked stays.
pub(super) type Kept<const D: usize> = Mutex<Option<Tensor<D>>>;

impl<const D: usize> Handles<D> {
    /// What it was brought to in this layout, if that is still there.
    pub(super) fn find(&self, layout: &Layout, varying: &[usize]) -> Option<Tensor<D>> {
        let mut made = self.made.lock();
        made.retain(|handle| handle.kept.lock().is_some());
        let found = made.iter().find(|handle| *handle.varying == *varying && handle.layout == *layout);
        found.and_then(|handle| handle.kept.lock().clone())
    }
}
