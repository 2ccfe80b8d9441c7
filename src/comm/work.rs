//! [`Work`]: a collective under way.

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

/// A collective under way; its result is defined only after [`wait`](Self::wait).
///
/// Progress is promise 6 of a [backend](super::backend): of thread ranks, the rank that waits copies
/// its own data. Works may be waited for in any order. Dropping one without waiting is allowed, and does not block: the
/// rank has taken part, and the others get their results.
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

/// A collective's place in the queue of its rank, which it leaves when this is dropped; its span ends then.
pub(super) struct InFlightGuard {
    rank: Arc<Rank>,
    span: Span,
    charge: Charge,
    posted: Instant,
    /// The flight recorder has noted how it ended.
    is_over: Cell<bool>,
    /// Whether the ledger counts it when its result is taken.
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

    /// The flight recorder notes how it is over.
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

    /// Whether [`wait`](Self::wait) would return without blocking on other ranks.
    pub fn is_complete(&self) -> bool {
        match &self.0 {
            WorkState::Ended(_) => true,
            WorkState::UnderWay(work) => work.pending.is_complete(),
        }
    }

    /// Has a collective that was posted [ahead](super::Call::with_deferred) of need begin to move, where the engine
    /// moves data while ranks compute. Does not block; [`wait`](Self::wait) does as much by itself.
    pub fn start(&mut self) {
        if let WorkState::UnderWay(work) = &mut self.0 {
            work.pending.start();
        }
    }

    /// Blocks until every rank has taken part, and returns this rank's result: tensors that may be used in stream
    /// order. Where a device computes on its own, it may still be busy with them; `Device::sync` waits for that.
    ///
    /// # Errors
    /// See [`Communicator`](super::Communicator).
    pub fn wait(self) -> Result<T, CommError> {
        self.wait_with_timing().map(|(value, _)| value)
    }

    /// The same, and how it went, where there was something to move.
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

    /// [`wait`](Self::wait), for no longer than `deadline`, whatever the communicator's is. To have waited so long is a
    /// failure of the world, as of any collective.
    ///
    /// # Errors
    /// See [`Communicator`](super::Communicator).
    pub fn wait_timeout(mut self, deadline: Duration) -> Result<T, CommError> {
        if let WorkState::UnderWay(work) = &mut self.0 {
            work.place.deadline = deadline;
        }
        self.wait()
    }

    /// The work whose result is `map` of this one's, which runs on the thread that waits.
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
