//! [`Request`]: what an engine does to finish a call.

use std::time::{Duration, Instant};

use crate::comm::{CommError, TransferTiming};

/// A call that an engine has begun.
pub trait Request<T>: Send {
    /// Whether [`wait`](Self::wait) would return without waiting for other ranks.
    fn is_complete(&self) -> bool;

    /// Has what was posted [ahead](super::CallContext::is_deferred) begin to move, where something moves before it is
    /// waited for. Returns at once.
    fn start(&mut self) {}

    /// Blocks until the result is there, the world has failed, or `deadline` has passed, which is a failure.
    fn wait(self: Box<Self>, deadline: Duration) -> Result<Completed<T>, CommError>;
}

/// A result, and how long it took to make once all ranks had come.
#[derive(Debug)]
pub struct Completed<T> {
    /// The result.
    pub value: T,
    /// Copies and reductions on the thread that waited.
    pub moving: Duration,
    /// The global rank that was the last to join, if the engine knows.
    pub last: Option<usize>,
    /// When it moved, if another thread than the one that waited has moved it.
    pub carried: Option<TransferTiming>,
}

impl<T> Completed<T> {
    /// What `make` returns, timed; of who came last, and what moved before, it says nothing.
    pub fn timed(make: impl FnOnce() -> T) -> Self {
        let start = Instant::now();
        Self { value: make(), moving: start.elapsed(), last: None, carried: None }
    }
}

/// A call whose result becomes another.
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
