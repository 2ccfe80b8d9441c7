//! [`Work`]: a collective in flight.

use std::sync::Arc;
use std::time::Duration;

use burn::backend::DispatchTensor;
use burn::tensor::{Tensor, kind};

use super::CommError;
use super::backend::{Mapped, OpTiming, Request};
use super::observe::ObservedCall;
use super::rank::Rank;

/// A collective in flight. Its result is available only after [`wait`](Self::wait).
///
/// For the progress of a collective, see guarantee 6 of a [backend](super::backend): if ranks are
/// threads, the rank that waits copies its own data. Works may be waited for in any order. A work
/// may be dropped without waiting, which does not block: the rank has taken part, and the other
/// ranks receive their results.
#[must_use = "a collective's result is defined only after `wait`"]
pub struct Work<T>(WorkState<T>);

enum WorkState<T> {
    Ended(Result<T, CommError>),
    InFlight {
        pending: Box<dyn Request<T>>,
        rank: Arc<Rank>,
        call: ObservedCall,
        deadline: Duration,
    },
}

/// Local: the call was posted before, and its ranks may wait for their works in different orders.
impl<T> Work<T> {
    pub(super) fn done(value: T) -> Self {
        Self(WorkState::Ended(Ok(value)))
    }

    pub(crate) fn failed(error: CommError) -> Self {
        Self(WorkState::Ended(Err(error)))
    }

    pub(super) fn under_way(
        pending: Box<dyn Request<T>>,
        rank: Arc<Rank>,
        call: ObservedCall,
        deadline: Duration,
    ) -> Self {
        Self(WorkState::InFlight {
            pending,
            rank,
            call,
            deadline,
        })
    }

    /// Returns true if [`wait`](Self::wait) would return without waiting for other ranks.
    pub fn is_complete(&self) -> bool {
        match &self.0 {
            WorkState::Ended(_) => true,
            WorkState::InFlight { pending, .. } => pending.is_complete(),
        }
    }

    /// Starts the transfer of a [deferred](super::Call::with_deferred) collective, if the backend
    /// transfers data while ranks compute. Does not block. [`wait`](Self::wait) also starts it.
    pub fn start(&mut self) {
        if let WorkState::InFlight { pending, .. } = &mut self.0 {
            pending.start();
        }
    }

    /// Blocks until the collective is complete, and returns this rank's result. The tensors can be
    /// used in stream order. A device that computes asynchronously may not have finished them;
    /// `Device::sync` waits for that.
    ///
    /// # Errors
    /// See [`Communicator`](super::Communicator).
    pub fn wait(self) -> Result<T, CommError> {
        self.wait_with_timing().map(|(value, _)| value)
    }

    /// Like [`wait`](Self::wait), but also returns the timing, or `None` if there was nothing to
    /// transfer.
    ///
    /// # Errors
    /// See [`Communicator`](super::Communicator).
    pub fn wait_with_timing(self) -> Result<(T, Option<OpTiming>), CommError> {
        match self.0 {
            WorkState::Ended(result) => result.map(|value| (value, None)),
            WorkState::InFlight {
                pending,
                rank,
                call,
                deadline,
            } => {
                rank.check_thread(call.info.op, &call.info.label)?;
                call.wait(|| pending.wait(deadline))
                    .map(|(value, timing)| (value, Some(timing)))
            }
        }
    }

    /// Like [`wait`](Self::wait), but with `deadline` instead of the communicator's deadline. As
    /// with any collective, exceeding the deadline is a failure of the world.
    ///
    /// # Errors
    /// See [`Communicator`](super::Communicator).
    pub fn wait_timeout(mut self, deadline: Duration) -> Result<T, CommError> {
        if let WorkState::InFlight {
            deadline: of_group, ..
        } = &mut self.0
        {
            *of_group = deadline;
        }
        self.wait()
    }

    /// Returns a work whose result is `map` applied to the result of this one. `map` runs on the
    /// thread that waits.
    pub fn then<U>(self, map: impl FnOnce(T) -> U + Send + 'static) -> Work<U>
    where
        T: 'static,
    {
        Work(match self.0 {
            WorkState::Ended(result) => WorkState::Ended(result.map(map)),
            WorkState::InFlight {
                pending,
                rank,
                call,
                deadline,
            } => WorkState::InFlight {
                pending: Box::new(Mapped { pending, map }),
                rank,
                call,
                deadline,
            },
        })
    }
}

impl Work<Vec<DispatchTensor>> {
    /// [`wait`](Self::wait)s for a collective on one tensor, and returns the tensor.
    pub(crate) fn single<const D: usize, K: kind::Autodiff>(
        self,
    ) -> Result<Tensor<D, K>, CommError> {
        let tensor = self
            .wait()?
            .pop()
            .expect("a collective returns as many tensors as were passed");
        Ok(Tensor::from_dispatch(tensor))
    }
}

impl<T> std::fmt::Debug for Work<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Work")
            .field("complete", &self.is_complete())
            .finish()
    }
}
