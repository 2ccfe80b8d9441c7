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
use super::group_backend::HostGroupBackend;
use super::remote_group::{RecipientData, RemoteGroup};
use super::requests::{CollectiveRequest, OpHandleGuard};
use crate::comm::backend::{CallContext, CallSignature, Completed, PostResult, Request, reshaped};
use crate::comm::control::match_table::{CallData, DataMode, OpHandle};
use crate::comm::control::rendezvous::Matched;
use crate::comm::data::contiguous_layout::ContiguousLayout;
use crate::comm::data::contribution::Contribution;
use crate::comm::data::inputs::CollectiveInputs;
use crate::comm::data::result_buffer::ResultBuffer;
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
    /// Returns true if an all-reduce of `bytes` bytes is faster in two phases in this group, which `remote` connects to
    /// other processes.
    pub(super) fn has_two_phases(&self, remote: &RemoteGroup, bytes: u64) -> bool {
        pay(bytes, self.member.group.size(), remote.processes())
    }

    /// Posts an [`all_reduce`](crate::comm::backend::GroupBackend::all_reduce) in a group of several processes.
    ///
    /// Both phases are posted at once, the first with its data, so that calls match the calls of the other ranks in
    /// order.
    pub(super) fn all_reduce_in_two_phases(
        &self,
        remote: &RemoteGroup,
        post: CallContext,
        tensors: Vec<DispatchTensor>,
        op: ReduceOp,
    ) -> PostResult<Vec<DispatchTensor>> {
        let (backend, group, bytes) = (&self.backend, &self.member.group, post.signature.bytes());
        let shapes: Vec<_> = tensors.iter().map(DispatchTensor::shape).collect();
        let row = |(tensor, shape): (DispatchTensor, &Shape)| reshaped(tensor, Shape::from([shape.num_elements()]));
        let contribution = Contribution::new(tensors.into_iter().zip(&shapes).map(row).collect()).arrived(None);
        self.note_device(&contribution);
        let device = self.member.home(&contribution.tensors);
        let shardings: Vec<_> = shapes.iter().map(|shape| (0, ShardSizes::Chunked(shape.num_elements()))).collect();
        let layout = |(row, (_, sizes)): (&DispatchTensor, &(usize, ShardSizes))| {
            let lengths = (0..group.size()).map(|rank| sizes.range(group.size(), rank).len());
            ContiguousLayout::of_row(row.shape().num_elements(), row.dtype(), lengths)
        };
        let layouts: Vec<_> = contribution.tensors.iter().zip(&shardings).map(layout).collect();
        let data = remote.data(&contribution, RecipientData::Shards(&shardings));
        // All other properties are compared in the first phase.
        let agreed = CallSignature {
            tensors: Arc::new([]),
            names: None,
            global_tensor: None,
            operand_shapes: None,
            digests: None,
            ..post.signature.clone()
        };

        let mut second = self.second.lock();
        let (key, later) = second.get_or_insert_with(|| self.second_phases()).clone();
        let post_first = |signature| backend.rendezvous.post(self.key, group.rank(), signature, contribution);
        let ((first, _), sent) = remote.post(post.signature, data, DataMode::Eager, post_first)?;
        let first = OpHandleGuard::new(backend.clone(), first);
        let post_second = |signature| backend.rendezvous.post(key, group.rank(), signature, CallData::Local(None));
        let nothing = later.same_for_all(Default::default());
        let ((second_op, _), _) = later.post(agreed, nothing, DataMode::Deferred, post_second)?;
        drop(second);

        let sums = remote.receives_in_place(bytes).then_some(layouts);
        let sums = sums.and_then(|layouts| backend.result_buffer(second_op, || Some(layouts)));
        let finish = move |inputs: &CollectiveInputs| {
            let rows = inputs.rows(shapes.len()).into_iter();
            rows.zip(shapes).map(|(row, shape)| reshaped(row, shape)).collect::<Vec<_>>()
        };
        let (handle, own) = (OpHandleGuard::new(backend.clone(), second_op), None);
        let gather = CollectiveRequest { handle, is_deferred: false, own, sent: None, device: device.clone(), finish };
        let mut gather = BackgroundRequest::new(backend, self.member.rank(), false, Box::new(gather));
        if self.completes_in_background(bytes, &device) {
            gather = gather.complete_when_ready(second_op);
        }
        let first_op = first.handle();
        let reduce =
            ReduceScatterPhase { handle: first, second: second_op, remote: later, sent, op, shardings, sums, device };
        let reduce = BackgroundRequest::new(backend, self.member.rank(), true, Box::new(reduce));
        Ok(Box::new(TwoPhaseAllReduce { first: reduce.complete_when_ready(first_op), second: gather }))
    }
}

/// First phase of a rank, until its shard is reduced.
struct ReduceScatterPhase {
    handle: OpHandleGuard,
    /// Handle of the second phase, to which the rank contributes its reduced shard.
    second: OpHandle,
    /// Remote ranks of the group on which the second phase is posted.
    remote: Arc<RemoteGroup>,
    /// Records when the call of the first phase was sent.
    sent: SendStamp,
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
        self.handle.is_complete()
    }

    /// Waits for the other ranks' contributions to the first phase, and contributes this rank's sums to the second.
    fn wait(self: Box<Self>, deadline: Duration) -> Result<Completed<()>, CommError> {
        let Self { mut handle, second, remote, sent, op, shardings, sums, device } = *self;
        let (first, backend) = (handle.take(), &handle.backend);
        let Matched { parts, last } = backend.rendezvous.wait(first, deadline)?;
        let reduced = Completed::timed(|| {
            let inputs = backend.inputs(&parts, first, &device);
            // SAFETY: no other thread uses this rank's region. The second phase is not complete without it.
            let reduce =
                |sums: &Arc<ResultBuffer>| unsafe { inputs.reduce_scatter_into(sums, second.member, &shardings, op) };
            let (data, contribution) = match sums {
                Some(sums) if reduce(&sums) => {
                    // SAFETY: the shard was written, and the result consists of Flex tensors.
                    let data = unsafe { sums.sent(second.member) };
                    (remote.same_for_all(data), Contribution::of_result_buffer(sums))
                }
                _ => {
                    let contribution = Contribution::new(inputs.reduce_scatter(&shardings, op));
                    (remote.data(&contribution, RecipientData::Full), contribution)
                }
            };
            remote.send_data(second.seq, data);
            // While the other contributions are in flight.
            backend.progress();
            backend.provide_data(second, contribution.arrived(None));
        });
        Ok(Completed { last: Some(last), carried: Contribution::timing(&parts, Some(&sent)), ..reduced })
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
