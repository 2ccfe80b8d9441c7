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
//! phase is a [`BackgroundRequest`], which the completion thread completes.

use std::sync::Arc;
use std::time::{Duration, Instant};

use burn::backend::{DispatchTensor, TensorMetadata};
use burn::tensor::{Device, Shape};

use super::background::BackgroundRequest;
use super::channel::HostGroupBackend;
use super::contribution::{CollectiveInputs, Contribution};
use super::match_table::OpHandle;
use super::remote_group::{DataMode, RecipientData, RemoteGroup};
use super::rendezvous::Matched;
use super::requests::{CollectiveRequest, OpHandleGuard};
use crate::comm::backend::{CallContext, CallSignature, Completed, PostResult, Request, reshaped};
use crate::comm::process::contiguous_layout::ContiguousLayout;
use crate::comm::process::result_buffer::ResultBuffer;
use crate::comm::transport::SendStamp;
use crate::comm::{CommError, ReduceOp, TransferTiming};
use crate::placement::ShardSizes;

/// Number of bytes that are copied in the time that a second message takes.
const MESSAGE: u64 = 1 << 20;

/// Returns true if an all-reduce of `bytes` bytes, of `ranks` ranks in `processes` processes, is faster in two
/// phases: if a process sends and adds enough less.
fn pay(bytes: u64, ranks: usize, processes: usize) -> bool {
    let (bytes, n, p) = (u128::from(bytes), ranks as u128, processes as u128);
    // In one phase, a process sends the tensors of its `n / p` ranks to each other process. In two phases, it sends
    // a shard of `1 / n` of them for each rank there, and the shards of its own sums. It adds half as much or less.
    let less_sent = bytes * (p - 1) * (n * p - n - p) / (p * p);
    less_sent + bytes / 2 > u128::from(MESSAGE)
}

impl HostGroupBackend {
    /// Returns true if an all-reduce of `bytes` bytes is faster in two phases in this group, which `outlet` connects to
    /// other processes.
    pub(super) fn has_two_phases(&self, outlet: &RemoteGroup, bytes: u64) -> bool {
        pay(bytes, self.member.group.size(), outlet.processes())
    }

    /// Posts an [`all_reduce`](crate::comm::backend::GroupBackend::all_reduce) in a group of several processes.
    pub(super) fn all_reduce_in_two_phases(
        &self,
        outlet: &Arc<RemoteGroup>,
        post: CallContext,
        tensors: Vec<DispatchTensor>,
        op: ReduceOp,
    ) -> PostResult<Vec<DispatchTensor>> {
        let (engine, ranks, bytes) = (&self.engine, self.member.group.size(), post.print.bytes());
        let shapes: Vec<_> = tensors.iter().map(DispatchTensor::shape).collect();
        let row = |(tensor, shape): (DispatchTensor, &Shape)| reshaped(tensor, Shape::from([shape.num_elements()]));
        let deposit = Contribution::new(tensors.into_iter().zip(&shapes).map(row).collect()).there(None);
        self.note(&deposit);
        let device = self.member.home(&deposit.tensors);
        let shardings: Vec<_> = shapes.iter().map(|shape| (0, ShardSizes::Chunked(shape.num_elements()))).collect();
        let layout = |(row, (_, sizes)): (&DispatchTensor, &(usize, ShardSizes))| {
            let lengths = (0..ranks).map(|rank| sizes.range(ranks, rank).len());
            ContiguousLayout::of_row(row.shape().num_elements(), row.dtype(), lengths)
        };
        let layouts = deposit.tensors.iter().zip(&shardings).map(layout);
        let sums = outlet.lands(bytes).then(|| ResultBuffer::new(layouts.collect(), &engine.others().memory));

        let (first, second, taken, later) = self.post_phases(outlet, post, deposit, &shardings)?;
        if let Some(sums) = &sums {
            engine.place(second, sums);
        }
        let seat = |ticket| OpHandleGuard::new(engine.clone(), ticket, false);
        let finish = move |exchange: &CollectiveInputs| {
            let rows = exchange.joined(shapes.len()).into_iter();
            rows.zip(shapes).map(|(row, shape)| reshaped(row, shape)).collect::<Vec<_>>()
        };
        let gathered =
            Box::new(CollectiveRequest { seat: seat(second), own: None, taken: None, device: device.clone(), finish });
        let gathered = BackgroundRequest::new(engine, self.member.rank(), gathered);
        let gathered = match self.completes_in_background(bytes, &device) {
            true => gathered.complete_when_ready(second),
            false => gathered,
        };
        let reduced =
            ReduceScatterPhase { seat: seat(first), second, outlet: later, taken, op, shardings, sums, device };
        let reduced = BackgroundRequest::owed(engine, self.member.rank(), Box::new(reduced)).complete_when_ready(first);
        Ok(Box::new(TwoPhaseAllReduce { first: reduced, second: gathered }))
    }

    /// Posts both phases, the first with its data. Returns their handles, the time at which the first was sent, and
    /// the remote ranks of the group on which the second is posted. Both are posted at once, so that calls match the
    /// calls of the other ranks in order.
    fn post_phases(
        &self,
        outlet: &RemoteGroup,
        post: CallContext,
        deposit: Contribution,
        shardings: &[(usize, ShardSizes)],
    ) -> Result<(OpHandle, OpHandle, SendStamp, Arc<RemoteGroup>), CommError> {
        let shares = outlet.shares(&deposit, RecipientData::Parts(shardings));
        // All other properties are compared in the first phase.
        let agreed = CallSignature {
            tensors: Arc::new([]),
            names: None,
            global_tensor: None,
            operand_shapes: None,
            digests: None,
            ..post.print.clone()
        };
        let mut second = self.second.lock();
        let (key, later) = second.get_or_insert_with(|| self.second_phases());
        let (member, rendezvous) = (self.member.group.rank(), &self.engine.rendezvous);
        let join = |print| rendezvous.post(self.key, member, print, deposit);
        let (first, taken) = outlet.joined(post.print, shares, DataMode::Eager, join)?;
        let join = |print| rendezvous.join_late(*key, member, print);
        let joined = later.joined(agreed, later.nothing(), DataMode::Deferred, join);
        let (second, _) = joined.inspect_err(|_| rendezvous.release(first))?;
        Ok((first, second, taken, later.clone()))
    }
}

/// First phase of a rank, until its shard is reduced.
struct ReduceScatterPhase {
    seat: OpHandleGuard,
    /// Handle of the second phase, to which the rank contributes its reduced shard.
    second: OpHandle,
    /// Remote ranks of the group on which the second phase is posted.
    outlet: Arc<RemoteGroup>,
    /// Records when the call of the first phase was sent.
    taken: SendStamp,
    op: ReduceOp,
    /// Dimension and shard sizes by which the ranks shard each tensor.
    shardings: Vec<(usize, ShardSizes)>,
    /// Result buffer for the sums, into which remote shards are also received; `None` if the rank reduces into
    /// separate memory.
    sums: Option<Arc<ResultBuffer>>,
    device: Device,
}

impl Request<()> for ReduceScatterPhase {
    fn is_complete(&self) -> bool {
        self.seat.is_complete()
    }

    /// Waits for the other ranks' contributions to the first phase, and contributes this rank's sums to the second.
    fn wait(self: Box<Self>, deadline: Duration) -> Result<Completed<()>, CommError> {
        let Self { mut seat, second, outlet, taken, op, shardings, sums, device } = *self;
        let (ticket, engine) = (seat.take(), &seat.engine);
        let Matched { parts, last } = engine.rendezvous.wait(ticket, deadline)?;
        let reduced = Completed::timed(|| {
            let exchange = CollectiveInputs::new(&parts, engine, ticket, &device);
            // SAFETY: no other thread uses this rank's region. The second phase is not complete without it.
            let reduce =
                |sums: &Arc<ResultBuffer>| unsafe { exchange.reduce_into(sums, second.member, &shardings, op) };
            let (shares, deposit) = match sums {
                Some(sums) if reduce(&sums) => {
                    // SAFETY: the shard was written, and the result consists of Flex tensors.
                    let share = unsafe { sums.sent(second.member) };
                    (outlet.same_for_all(share), Contribution::of_result_buffer(sums))
                }
                _ => {
                    let part = |(index, (dim, sizes)): (usize, &(usize, ShardSizes))| {
                        exchange.reduce_part(index, *dim, sizes, op)
                    };
                    let deposit = Contribution::new(shardings.iter().enumerate().map(part).collect());
                    (outlet.shares(&deposit, RecipientData::Full), deposit)
                }
            };
            outlet.bring(second.seq, shares);
            // While the other contributions are in flight.
            engine.carry();
            engine.fill_and_finish(second, deposit.there(None));
        });
        Ok(Completed { last: Some(last), carried: Contribution::carried(&parts, Some(&taken)), ..reduced })
    }
}

/// An all-reduce that this rank has posted.
struct TwoPhaseAllReduce {
    first: BackgroundRequest<()>,
    second: BackgroundRequest<Vec<DispatchTensor>>,
}

impl Request<Vec<DispatchTensor>> for TwoPhaseAllReduce {
    fn is_complete(&self) -> bool {
        self.second.is_complete()
    }

    fn wait(self: Box<Self>, deadline: Duration) -> Result<Completed<Vec<DispatchTensor>>, CommError> {
        let (start, Self { first, second }) = (Instant::now(), *self);
        // Taken now, so that the thread that completes the first phase wakes no other thread for the second.
        let second = second.claim();
        let first = Box::new(first).wait(deadline)?;
        let second = second.wait(deadline.saturating_sub(start.elapsed()))?;
        let complete =
            |(first, second): (TransferTiming, TransferTiming)| TransferTiming { complete: second.complete, ..first };
        let carried = first.carried.zip(second.carried).map(complete);
        Ok(Completed { moving: first.moving + second.moving, last: first.last, carried, ..second })
    }
}

#[cfg(test)]
mod tests {
    use super::pay;

    const KIB: u64 = 1 << 10;

    #[test]
    fn two_phases_pay_for_large_tensors_and_many_processes() {
        let least = |ranks, processes| (1..1 << 14).find(|kib| pay(kib * KIB, ranks, processes));
        assert_eq!(least(2, 2), Some(2049));
        assert_eq!(least(4, 2), Some(1025));
        assert_eq!(least(4, 4), Some(513));
        assert_eq!(least(64, 64), Some(17));
        assert!(pay(1 << 44, 1 << 20, 1 << 20));
    }
}
