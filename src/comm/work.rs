//! [`Work`]: a collective in flight.

use std::cell::Cell;
use std::sync::Arc;
use std::time::{Duration, Instant};

use burn::backend::DispatchTensor;
use burn::tensor::{Tensor, kind};
use tracing::Span;

use super::backend::{Completed, Mapped, Request};
use super::flight::OpOutcome;
use super::ledger::Charge;
use super::rank::Rank;
use super::{CommError, OpTiming, TransferTiming, trace};

/// A collective in flight. Its result is available only after [`wait`](Self::wait).
///
/// For the progress of a collective, see guarantee 6 of a [backend](super::backend): if ranks are threads, the rank
/// that waits copies its own data. Works may be waited for in any order. A work may be dropped without waiting,
/// which does not block: the rank has taken part, and the other ranks receive their results.
#[must_use = "a collective's result is defined only after `wait`"]
pub struct Work<T>(WorkState<T>);

enum WorkState<T> {
    Ended(Result<T, CommError>),
    UnderWay(InFlightOp<T>),
}

struct InFlightOp<T> {
    pending: Box<dyn Request<T>>,
    place: InFlightGuard,
}

/// Guard that ends the accounting of a collective in flight: its place in the queue depth, its flight record and
/// its span.
pub(super) struct InFlightGuard {
    rank: Arc<Rank>,
    span: Span,
    charge: Charge,
    posted: Instant,
    /// True if the flight recorder has already recorded the outcome.
    is_over: Cell<bool>,
    /// True if the ledger counts the collective only when its result is requested.
    is_deferred: bool,
    deadline: Duration,
}

impl InFlightGuard {
    pub fn new(
        rank: Arc<Rank>,
        span: Span,
        charge: Charge,
        posted: Instant,
        is_deferred: bool,
        deadline: Duration,
    ) -> Self {
        rank.ledger.posted();
        Self { rank, span, charge, posted, is_over: Cell::new(false), is_deferred, deadline }
    }

    /// Records the outcome in the flight recorder.
    fn over(&self, at: Instant, over: OpOutcome) {
        self.is_over.set(true);
        self.rank.ledger.recorder().over(self.charge.noted, at.saturating_duration_since(self.posted), over);
    }
}

impl Drop for InFlightGuard {
    fn drop(&mut self) {
        if !self.is_over.get() {
            self.over(Instant::now(), OpOutcome::Dropped);
        }
        self.rank.ledger.ended();
    }
}

impl<T> Work<T> {
    pub(super) fn done(value: T) -> Self {
        Self(WorkState::Ended(Ok(value)))
    }

    pub(crate) fn failed(error: CommError) -> Self {
        Self(WorkState::Ended(Err(error)))
    }

    pub(super) fn under_way(pending: Box<dyn Request<T>>, place: InFlightGuard) -> Self {
        Self(WorkState::UnderWay(InFlightOp { pending, place }))
    }

    /// Returns true if [`wait`](Self::wait) would return without waiting for other ranks.
    pub fn is_complete(&self) -> bool {
        match &self.0 {
            WorkState::Ended(_) => true,
            WorkState::UnderWay(work) => work.pending.is_complete(),
        }
    }

    /// Starts the transfer of a [deferred](super::Call::with_deferred) collective, if the backend transfers data
    /// while ranks compute. Does not block. [`wait`](Self::wait) also starts it.
    pub fn start(&mut self) {
        if let WorkState::UnderWay(work) = &mut self.0 {
            work.pending.start();
        }
    }

    /// Blocks until the collective is complete, and returns this rank's result. The tensors can be used in stream
    /// order. A device that computes asynchronously may not have finished them; `Device::sync` waits for that.
    ///
    /// # Errors
    /// See [`Communicator`](super::Communicator).
    pub fn wait(self) -> Result<T, CommError> {
        self.wait_with_timing().map(|(value, _)| value)
    }

    /// Like [`wait`](Self::wait), but also returns the timing, or `None` if there was nothing to transfer.
    ///
    /// # Errors
    /// See [`Communicator`](super::Communicator).
    pub fn wait_with_timing(self) -> Result<(T, Option<OpTiming>), CommError> {
        let InFlightOp { pending, place } = match self.0 {
            WorkState::Ended(result) => return result.map(|value| (value, None)),
            WorkState::UnderWay(work) => work,
        };
        let InFlightGuard { rank, span, charge, posted, is_deferred, deadline, .. } = &place;
        rank.check_thread(charge.op, &charge.label)?;
        if *is_deferred {
            rank.ledger.record(charge);
        }
        let _inside = span.enter();
        let start = Instant::now();
        rank.ledger.recorder().waited(charge.noted, start.saturating_duration_since(*posted));
        let waited = pending.wait(*deadline);
        let end = Instant::now();
        place.over(end, waited.as_ref().map_or(OpOutcome::Failed, |waited| OpOutcome::Done(waited.last)));
        let Completed { value, moving, last, carried } = waited?;
        let waiting = end.saturating_duration_since(start).saturating_sub(moving);
        rank.ledger.waited(waiting, moving, last.filter(|last| *last != rank.rank));
        trace::waited(span, waiting, moving, last);
        let here =
            || TransferTiming { taken: Some(*posted), begun: end.checked_sub(moving).unwrap_or(start), complete: end };
        let carried = carried.unwrap_or_else(here);
        Ok((value, Some(OpTiming { posted: *posted, carried, wanted: start })))
    }

    /// Like [`wait`](Self::wait), but with `deadline` instead of the communicator's deadline. As with any
    /// collective, exceeding the deadline is a failure of the world.
    ///
    /// # Errors
    /// See [`Communicator`](super::Communicator).
    pub fn wait_timeout(mut self, deadline: Duration) -> Result<T, CommError> {
        if let WorkState::UnderWay(work) = &mut self.0 {
            work.place.deadline = deadline;
        }
        self.wait()
    }

    /// Returns a work whose result is `map` applied to the result of this one. `map` runs on the thread that waits.
    pub fn then<U>(self, map: impl FnOnce(T) -> U + Send + 'static) -> Work<U>
    where
        T: 'static,
    {
        Work(match self.0 {
            WorkState::Ended(result) => WorkState::Ended(result.map(map)),
            WorkState::UnderWay(InFlightOp { pending, place }) => {
                WorkState::UnderWay(InFlightOp { pending: Box::new(Mapped { pending, map }), place })
            }
        })
    }
}

impl Work<Vec<DispatchTensor>> {
    /// [`wait`](Self::wait)s for a collective on one tensor, and returns the tensor.
    pub(crate) fn single<const D: usize, K: kind::Autodiff>(self) -> Result<Tensor<D, K>, CommError> {
        let tensor = self.wait()?.pop().expect("a collective returns as many tensors as were passed");
        Ok(Tensor::from_dispatch(tensor))
    }
}

impl<T> std::fmt::Debug for Work<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Work").field("complete", &self.is_complete()).finish()
    }
}
