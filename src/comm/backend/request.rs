//! [`Request`]: an operation in flight in a backend.

use std::time::{Duration, Instant};

use crate::comm::{CommError, TransferTiming};

/// An operation that a backend has begun (MPI: request).
pub trait Request<T>: Send {
    /// Returns true if [`wait`](Self::wait) would return without waiting for other ranks.
    fn is_complete(&self) -> bool;

    /// Starts the transfer of a [deferred](super::CallContext::is_deferred) call, if the backend can transfer data
    /// before the rank waits for it. Returns at once.
    fn start(&mut self) {}

    /// Blocks until the result is ready, the world has failed, or `deadline` has passed, which is a failure.
    fn wait(self: Box<Self>, deadline: Duration) -> Result<Completed<T>, CommError>;
}

/// Result of an operation, with its timing.
#[derive(Debug)]
pub struct Completed<T> {
    /// The result.
    pub value: T,
    /// Time spent on copies and reductions by the thread that waited.
    pub moving: Duration,
    /// Global rank that joined last, if the backend knows it.
    pub last: Option<usize>,
    /// Timestamps of the transfer, if another thread than the one that waited made it.
    pub carried: Option<TransferTiming>,
}

impl<T> Completed<T> {
    /// Runs `make` and measures its time. The last rank and the timestamps of the transfer are unknown.
    pub fn timed(make: impl FnOnce() -> T) -> Self {
        let start = Instant::now();
        Self { value: make(), moving: start.elapsed(), last: None, carried: None }
    }
}

/// A request whose result is mapped by a function.
pub(crate) struct Mapped<P, F> {
    pub pending: P,
    pub map: F,
}

impl<T, U, F: FnOnce(T) -> U + Send> Request<U> for Mapped<Box<dyn Request<T>>, F> {
    fn is_complete(&self) -> bool {
        self.pending.is_complete()
    }

    fn start(&mut self) {
        self.pending.start();
    }

    fn wait(self: Box<Self>, deadline: Duration) -> Result<Completed<U>, CommError> {
        let Self { pending, map } = *self;
        let Completed { value, moving, last, carried } = pending.wait(deadline)?;
        let mapped = Completed::timed(|| map(value));
        Ok(Completed { moving: moving + mapped.moving, last, carried, ..mapped })
    }
}
