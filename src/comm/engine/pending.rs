//! [`Pending`]: what an engine does to finish a call.

use std::time::{Duration, Instant};

use crate::comm::{TransferTiming, CommError};

/// A call that an engine has begun.
pub trait Pending<T>: Send {
    /// Whether [`wait`](Self::wait) would return without waiting for other ranks.
    fn is_complete(&self) -> bool;

    /// Has what was posted [ahead](super::Post::ahead) begin to move, where something moves before it is waited for.
    /// Returns at once.
    fn start(&mut self) {}

    /// Blocks until the result is there, the world has failed, or `deadline` has passed, which is a failure.
    fn wait(self: Box<Self>, deadline: Duration) -> Result<Waited<T>, CommError>;
}

/// A result, and how long it took to make once all ranks had come.
#[derive(Debug)]
pub struct Waited<T> {
    /// The result.
    pub value: T,
    /// Copies and reductions on the thread that waited.
    pub moving: Duration,
    /// The global rank that was the last to join, if the engine knows.
    pub last: Option<usize>,
    /// When it moved, if another thread than the one that waited has moved it.
    pub carried: Option<TransferTiming>,
}

impl<T> Waited<T> {
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

impl<T, U, F: FnOnce(T) -> U + Send> Pending<U> for Mapped<Box<dyn Pending<T>>, F> {
    fn is_complete(&self) -> bool {
        self.pending.is_complete()
    }

    fn start(&mut self) {
        self.pending.start();
    }

    fn wait(self: Box<Self>, deadline: Duration) -> Result<Waited<U>, CommError> {
        let Self { pending, map } = *self;
        let Waited { value, moving, last, carried } = pending.wait(deadline)?;
        let mapped = Waited::timed(|| map(value));
        Ok(Waited { moving: moving + mapped.moving, last, carried, ..mapped })
    }
}
