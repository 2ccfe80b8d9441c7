//! [`Work`]: a collective under way.

use burn::backend::DispatchTensor;
use burn::tensor::{Tensor, kind};

use super::CommError;

/// What a backend implements to hand out a [`Work`].
pub trait Pending<T>: Send {
    /// Whether [`wait`](Self::wait) would return without blocking on other ranks.
    fn is_complete(&self) -> bool;
    /// Blocks until the result is there.
    fn wait(self: Box<Self>) -> Result<T, CommError>;
}

/// A collective under way; its result is defined only after [`wait`](Self::wait).
///
/// Dropping a `Work` without waiting is allowed: the rank has taken part, and the others get
/// their results.
#[must_use = "a collective's result is defined only after `wait`"]
pub struct Work<T>(Box<dyn Pending<T>>);

impl<T> Work<T> {
    /// Wraps a backend's pending operation.
    pub fn new(pending: impl Pending<T> + 'static) -> Self {
        Self(Box::new(pending))
    }

    /// Whether [`wait`](Self::wait) would return without blocking on other ranks.
    pub fn is_complete(&self) -> bool {
        self.0.is_complete()
    }

    /// Blocks until every rank has taken part, and returns this rank's result.
    ///
    /// # Errors
    /// See [`Communicator`](super::Communicator).
    pub fn wait(self) -> Result<T, CommError> {
        self.0.wait()
    }
}

impl Work<Vec<DispatchTensor>> {
    /// [`wait`](Self::wait)s for a collective on one tensor.
    pub(crate) fn single<const D: usize, K: kind::Autodiff>(self) -> Result<Tensor<D, K>, CommError> {
        let tensor = self.wait()?.pop().expect("a collective returns as many tensors as it takes");
        Ok(Tensor::from_dispatch(tensor))
    }
}

impl<T> std::fmt::Debug for Work<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Work").field("complete", &self.is_complete()).finish()
    }
}
