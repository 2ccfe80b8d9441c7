//! An all-reduce among processes, in two halves: every rank reduces its part for all, and the parts are gathered.
//!
//! ```text
//! rank 0, in process 0            rank 1, in process 1
//! tensor  a b        --b-->       tensor  c d             the parts of others go to them
//!         a+c        <-c--                b+d             each rank reduces its own part
//!         a+c b+d    <-b+d--  --a+c-->    a+c b+d         which goes to all
//! ```
//!
//! A process sends less than twice its tensors, however many there are, where whole tensors would go to each. Both halves
//! are called at once; between them no rank need wait: the first half is left [`SharedRequest`].
//!
//! Ranks of one host that have the result [in common](super::shared_memory) put their sums there, and send none.
//!
//! Large tensors are reduced in [segments](super::segments), each in two halves. These, too, are called at once, so that all
//! ranks call them in one order; what a rank brings to a first half it brings when one before is reduced:
//!
//! ```text
//! segment 0   parts --> sums --> second half
//! segment 1   parts ..........-> sums --> second half
//! segment 2                 parts ........-> sums --> second half
//! ```

use std::sync::Arc;
use std::time::{Duration, Instant};

use burn::backend::DispatchTensor;
use burn::tensor::Device;

use super::HostBackend;
use super::contribution::{CollectiveInputs, Contribution};
use super::deferred_gather::DeferredGather;
use super::match_table::OpHandle;
use super::remote_group::{RecipientData, RemoteGroup};
use super::rendezvous::Matched;
use super::requests::OpHandleGuard;
use super::segments::Segment;
use super::shared_memory::SharedMemoryResult;
use super::shared_request::{Left, SharedRequest};
use crate::comm::backend::{Completed, Request};
use crate::comm::process::header::SharedMemoryMessage;
use crate::comm::process::result_buffer::ResultBuffer;
use crate::comm::transport::SendStamp;
use crate::comm::{CommError, ReduceOp, TransferTiming};
use crate::placement::ShardSizes;

/// What is copied in the time that a second message takes, in bytes.
const MESSAGE: u64 = 1 << 20;

/// Whether an all-reduce of so many `bytes`, of `ranks` ranks in `processes` processes, takes less time in halves: as what
/// a process sends and adds less shows.
pub(super) fn pay(bytes: u64, ranks: usize, processes: usize) -> bool {
    let (bytes, n, p) = (u128::from(bytes), ranks as u128, processes as u128);
    // Of whole tensors a process sends `n / p` to each other; in halves, a part of `1 / n` of these for each rank there,
    // and of its own sums. It adds half as much or less.
    let less_sent = bytes * (p - 1) * (n * p - n - p) / (p * p);
    less_sent + bytes / 2 > u128::from(MESSAGE)
}

/// A rank's first half, until its part is reduced.
#[derive(Debug)]
pub(super) struct ReduceScatterPhase {
    pub seat: OpHandleGuard,
    /// The second half, to which the rank owes its part.
    pub second: OpHandle,
    /// Where both are called, but for the first one.
    pub outlet: Arc<RemoteGroup>,
    /// Noted when other processes are told, of the first one.
    pub taken: Option<SendStamp>,
    pub op: ReduceOp,
    /// How the rows are cut over the ranks.
    pub shardings: Vec<(usize, ShardSizes)>,
    pub sums: ReductionTarget,
    pub device: Device,
    /// What is brought next.
    pub next: Option<DeferredContribution>,
}

/// Where the sums of a segment are put.
#[derive(Debug, Clone)]
pub(super) enum ReductionTarget {
    /// Each rank's in memory of its own.
    Apart,
    /// In the result, where what others send lands.
    Window(Arc<ResultBuffer>),
    /// In results that ranks have in common.
    Common(Arc<SharedMemoryResult>, Segment),
}

impl ReductionTarget {
    /// Where they are put, as ranks have `said` in the call of `ticket`.
    fn find(
        &self,
        engine: &HostBackend,
        ticket: OpHandle,
        said: &[Contribution],
    ) -> Result<Option<Arc<ResultBuffer>>, CommError> {
        Ok(match self {
            Self::Apart => None,
            Self::Window(window) => Some(window.clone()),
            Self::Common(results, segment) => {
                Some(results.find(engine, ticket, said)?.window(segment.ranges(), said.len()))
            }
        })
    }

    /// Where they were put.
    pub fn found(self, ranks: usize) -> Option<Arc<ResultBuffer>> {
        match self {
            Self::Apart => None,
            Self::Window(window) => Some(window),
            Self::Common(results, segment) => Some(results.found().window(segment.ranges(), ranks)),
        }
    }
}

impl Request<()> for ReduceScatterPhase {
    fn is_complete(&self) -> bool {
        self.seat.is_complete()
    }

    /// Waits for the other ranks' parts of the first half, and brings this rank's to the second.
    fn wait(self: Box<Self>, deadline: Duration) -> Result<Completed<()>, CommError> {
        let Self { mut seat, second, outlet, taken, op, shardings, sums, device, next } = *self;
        let (ticket, engine) = (seat.take(), &seat.engine);
        let Matched { parts, last } = engine.rendezvous.wait(ticket, deadline)?;
        let window = sums.find(engine, ticket, &parts)?;
        let reduced = Completed::timed(|| {
            let exchange = CollectiveInputs::new(&parts, engine, ticket, &device);
            let part =
                |(index, (dim, sizes)): (usize, &(usize, ShardSizes))| exchange.reduce_part(index, *dim, sizes, op);
            let parts = || shardings.iter().enumerate().map(part).collect::<Vec<_>>();
            // SAFETY: the place of this rank's part, which nobody has: the second half is complete only with it.
            let reduce =
                |window: &Arc<ResultBuffer>| unsafe { exchange.reduce_into(window, second.member, &shardings, op) };
            let (shares, deposit) = match window {
                Some(window) if window.are_common() => {
                    if !reduce(&window) {
                        // SAFETY: as above.
                        unsafe { window.put(second.member, &parts(), || engine.carry()) };
                    }
                    (outlet.nothing(), Contribution::of_result_buffer(window))
                }
                Some(window) if reduce(&window) => {
                    // SAFETY: it was written; of Flex tensors the result is one.
                    let share = unsafe { window.sent(second.member) };
                    (outlet.same_for_all(share), Contribution::of_result_buffer(window))
                }
                _ => {
                    let deposit = Contribution::new(parts());
                    (outlet.shares(&deposit, RecipientData::Full), deposit)
                }
            };
            outlet.bring(second.seq, shares);
            // While the others' parts are on their way.
            engine.carry();
            engine.fill_and_finish(second, deposit.there(None));
            if let Some(next) = next {
                next.bring(engine, &outlet);
            }
        });
        Ok(Completed { last: Some(last), carried: Contribution::carried(&parts, taken.as_ref()), ..reduced })
    }
}

/// What a rank owes to a first half that it has joined for later.
#[derive(Debug)]
pub(super) struct DeferredContribution {
    pub ticket: OpHandle,
    /// Of which it is a segment.
    pub rows: Arc<[DispatchTensor]>,
    pub segment: Segment,
    /// What the rank says of results in common.
    pub common: Option<SharedMemoryMessage>,
}

impl DeferredContribution {
    pub fn bring(self, engine: &HostBackend, outlet: &RemoteGroup) {
        let deposit = Contribution::new(self.segment.segments_of(&self.rows)).saying(self.common).there(None);
        outlet.bring(self.ticket.seq, outlet.shares(&deposit, RecipientData::Parts(&self.segment.shardings())));
        engine.fill_and_finish(self.ticket, deposit);
    }
}

/// An all-reduce, or a gather [in common](super::shared_memory), that this rank has joined.
pub(super) struct TwoPhaseAllReduce<F> {
    /// If the rank may not want it yet.
    pub deferred: Option<DeferredGather>,
    /// Given up by nobody: the others need them.
    pub firsts: Vec<Arc<SharedRequest<()>>>,
    pub seconds: Vec<Left<Vec<DispatchTensor>>>,
    /// Makes the result of what the second halves give.
    pub finish: F,
}

impl<F> Request<Vec<DispatchTensor>> for TwoPhaseAllReduce<F>
where
    F: FnOnce(Vec<Vec<DispatchTensor>>) -> Vec<DispatchTensor> + Send,
{
    fn is_complete(&self) -> bool {
        self.deferred.as_ref().is_some_and(DeferredGather::is_all) || self.seconds.iter().all(Left::is_complete)
    }

    fn start(&mut self) {
        self.deferred.iter().for_each(DeferredGather::begin);
    }

    fn wait(self: Box<Self>, deadline: Duration) -> Result<Completed<Vec<DispatchTensor>>, CommError> {
        let Self { deferred, firsts, seconds, finish } = *self;
        let start = Instant::now();
        let left = || deadline.saturating_sub(start.elapsed());
        // All at once: what completes them then wakes nobody else for it.
        let seconds: Vec<_> = seconds.iter().map(|second| (second.0.take(), &second.0)).collect();
        let firsts: Vec<_> = firsts.iter().map(|first| (first.take(), first)).collect();
        deferred.iter().for_each(DeferredGather::begin);
        let (mut moving, mut last, mut carried, mut parts) = (Duration::ZERO, None, None, Vec::new());
        for (own, first) in firsts {
            let first = own.map_or_else(|| first.taken_by_hands(), |own| own.wait(left()))?;
            moving += first.moving;
            last = last.or(first.last);
            carried = carried.or(first.carried);
        }
        for (own, second) in seconds {
            let second = own.map_or_else(|| second.taken_by_hands(), |own| own.wait(left()))?;
            moving += second.moving;
            let complete = |(first, second): (TransferTiming, TransferTiming)| TransferTiming {
                complete: second.complete,
                ..first
            };
            carried = carried.zip(second.carried).map(complete);
            parts.push(second.value);
        }
        let carried = carried.map(|carried| deferred.as_ref().map_or(carried, |deferred| deferred.seen(carried)));
        let finished = Completed::timed(|| finish(parts));
        Ok(Completed { moving: moving + finished.moving, last, carried, ..finished })
    }
}

#[cfg(test)]
mod tests {
    use super::pay;

    const KIB: u64 = 1 << 10;

    #[test]
    fn halves_pay_for_large_tensors_and_many_processes() {
        let least = |ranks, processes| (1..1 << 14).find(|kib| pay(kib * KIB, ranks, processes));
        assert_eq!(least(2, 2), Some(2049));
        assert_eq!(least(4, 2), Some(1025));
        assert_eq!(least(4, 4), Some(513));
        assert_eq!(least(64, 64), Some(17));
        assert!(pay(1 << 44, 1 << 20, 1 << 20));
    }
}
