//! All-reduce among processes in two phases: a reduce-scatter, in which every rank reduces its shard for all, and
//! an all-gather of the reduced shards.
//!
//! ```text
//! rank 0, in process 0            rank 1, in process 1
//! tensor  a b        --b-->       tensor  c d             shards of other ranks are sent to them
//!         a+c        <-c--                b+d             each rank reduces its own shard
//!         a+c b+d    <-b+d--  --a+c-->    a+c b+d         and sends it to all
//! ```
//!
//! A process sends less than twice its tensors, for any number of processes. In one phase it would send the full
//! tensors to each process. Both phases are posted at once. No rank has to wait between them, because the first
//! phase is a [`SharedRequest`], which the completion thread completes.
//!
//! Large tensors are reduced in [segments](super::segments), each in two phases. These are also posted at once, so
//! that all ranks post them in the same order. A rank contributes to the first phase of a segment when an earlier
//! segment is reduced:
//!
//! ```text
//! segment 0   shards --> sums --> second phase
//! segment 1   shards ..........-> sums --> second phase
//! segment 2                 shards ........-> sums --> second phase
//! ```

use std::sync::Arc;
use std::time::{Duration, Instant};

use burn::backend::DispatchTensor;
use burn::tensor::Device;

use super::HostBackend;
use super::contribution::{CollectiveInputs, Contribution};
use super::match_table::OpHandle;
use super::remote_group::{RecipientData, RemoteGroup};
use super::rendezvous::Matched;
use super::requests::OpHandleGuard;
use super::segments::Segment;
use super::shared_request::{Left, SharedRequest};
use crate::comm::backend::{Completed, Request};
use crate::comm::process::result_buffer::ResultBuffer;
use crate::comm::transport::SendStamp;
use crate::comm::{CommError, ReduceOp, TransferTiming};
use crate::placement::ShardSizes;

/// Number of bytes that are copied in the time that a second message takes.
const MESSAGE: u64 = 1 << 20;

/// Returns true if an all-reduce of `bytes` bytes, of `ranks` ranks in `processes` processes, is faster in two
/// phases: if a process sends and adds enough less.
pub(super) fn pay(bytes: u64, ranks: usize, processes: usize) -> bool {
    let (bytes, n, p) = (u128::from(bytes), ranks as u128, processes as u128);
    // In one phase, a process sends the tensors of its `n / p` ranks to each other process. In two phases, it sends
    // a shard of `1 / n` of them for each rank there, and the shards of its own sums. It adds half as much or less.
    let less_sent = bytes * (p - 1) * (n * p - n - p) / (p * p);
    less_sent + bytes / 2 > u128::from(MESSAGE)
}

/// First phase of a rank, until its shard is reduced.
#[derive(Debug)]
pub(super) struct ReduceScatterPhase {
    pub seat: OpHandleGuard,
    /// Handle of the second phase, to which the rank contributes its reduced shard.
    pub second: OpHandle,
    /// Remote ranks of the group on which both phases are posted. The very first phase is posted on the group
    /// itself.
    pub outlet: Arc<RemoteGroup>,
    /// Records when the call was sent; for the first segment only.
    pub taken: Option<SendStamp>,
    pub op: ReduceOp,
    /// Dimension and shard sizes by which the ranks shard each row.
    pub shardings: Vec<(usize, ShardSizes)>,
    /// Result buffer for the sums, into which remote shards are also received; `None` if the rank reduces into
    /// separate memory.
    pub sums: Option<Arc<ResultBuffer>>,
    pub device: Device,
    /// Contribution to a later segment, which is made after this phase.
    pub next: Option<DeferredContribution>,
}

impl Request<()> for ReduceScatterPhase {
    fn is_complete(&self) -> bool {
        self.seat.is_complete()
    }

    /// Waits for the other ranks' contributions to the first phase, and contributes this rank's sums to the second.
    fn wait(self: Box<Self>, deadline: Duration) -> Result<Completed<()>, CommError> {
        let Self { mut seat, second, outlet, taken, op, shardings, sums, device, next } = *self;
        let (ticket, engine) = (seat.take(), &seat.engine);
        let Matched { parts, last } = engine.rendezvous.wait(ticket, deadline)?;
        let reduced = Completed::timed(|| {
            let exchange = CollectiveInputs::new(&parts, engine, ticket, &device);
            let part =
                |(index, (dim, sizes)): (usize, &(usize, ShardSizes))| exchange.reduce_part(index, *dim, sizes, op);
            let parts = || shardings.iter().enumerate().map(part).collect::<Vec<_>>();
            // SAFETY: no other thread uses this rank's region. The second phase is not complete without it.
            let reduce =
                |window: &Arc<ResultBuffer>| unsafe { exchange.reduce_into(window, second.member, &shardings, op) };
            let (shares, deposit) = match sums {
                Some(window) if reduce(&window) => {
                    // SAFETY: the shard was written, and the result consists of Flex tensors.
                    let share = unsafe { window.sent(second.member) };
                    (outlet.same_for_all(share), Contribution::of_result_buffer(window))
                }
                _ => {
                    let deposit = Contribution::new(parts());
                    (outlet.shares(&deposit, RecipientData::Full), deposit)
                }
            };
            outlet.bring(second.seq, shares);
            // While the other contributions are in flight.
            engine.carry();
            engine.fill_and_finish(second, deposit.there(None));
            if let Some(next) = next {
                next.bring(engine, &outlet);
            }
        });
        Ok(Completed { last: Some(last), carried: Contribution::carried(&parts, taken.as_ref()), ..reduced })
    }
}

/// Contribution to a first phase that the rank has posted without data.
#[derive(Debug)]
pub(super) struct DeferredContribution {
    pub ticket: OpHandle,
    /// Rows of which it is a segment.
    pub rows: Arc<[DispatchTensor]>,
    pub segment: Segment,
}

impl DeferredContribution {
    pub fn bring(self, engine: &HostBackend, outlet: &RemoteGroup) {
        let deposit = Contribution::new(self.segment.segments_of(&self.rows)).there(None);
        outlet.bring(self.ticket.seq, outlet.shares(&deposit, RecipientData::Parts(&self.segment.shardings())));
        engine.fill_and_finish(self.ticket, deposit);
    }
}

/// An all-reduce that this rank has posted.
pub(super) struct TwoPhaseAllReduce<F> {
    /// First phases. They are completed even if this request is dropped, because the other ranks need the
    /// contributions.
    pub firsts: Vec<Arc<SharedRequest<()>>>,
    pub seconds: Vec<Left<Vec<DispatchTensor>>>,
    /// Builds the result from the results of the second phases.
    pub finish: F,
}

impl<F> Request<Vec<DispatchTensor>> for TwoPhaseAllReduce<F>
where
    F: FnOnce(Vec<Vec<DispatchTensor>>) -> Vec<DispatchTensor> + Send,
{
    fn is_complete(&self) -> bool {
        self.seconds.iter().all(Left::is_complete)
    }

    fn wait(self: Box<Self>, deadline: Duration) -> Result<Completed<Vec<DispatchTensor>>, CommError> {
        let Self { firsts, seconds, finish } = *self;
        let start = Instant::now();
        let left = || deadline.saturating_sub(start.elapsed());
        // All at once: the thread that completes them then wakes no other thread for it.
        let seconds: Vec<_> = seconds.iter().map(|second| (second.0.take(), &second.0)).collect();
        let firsts: Vec<_> = firsts.iter().map(|first| (first.take(), first)).collect();
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
