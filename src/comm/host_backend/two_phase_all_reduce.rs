//! All-reduce among processes in two phases: a reduce-scatter, in which every rank reduces its
//! shard for all, and an all-gather of the reduced shards.
//!
//! ```text
//! rank 0, in process 0            rank 1, in process 1
//! tensor  a b        --b-->       tensor  c d             shards of other ranks are sent to them
//!         a+c        <-c--                b+d             each rank reduces its own shard
//!         a+c b+d    <-b+d--  --a+c-->    a+c b+d         and sends it to all
//! ```
//!
//! A process sends less than twice its tensors, for any number of processes. In one phase it would
//! send the full tensors to each process. Both phases are posted at once. No rank has to wait
//! between them, because the first phase is owed to the other ranks, so that the completion thread
//! completes it.

use std::sync::Arc;

use burn::backend::{DispatchTensor, TensorMetadata};
use burn::tensor::Shape;

use super::group_backend::{HostGroupBackend, PreparedCall};
use super::remote_group::RemoteGroup;
use super::request::{HostRequest, OpHandleGuard, PostedCollective};
use crate::comm::backend::{CallContext, CallSignature, PostResult, reshaped};
use crate::comm::control::match_table::{CallData, DataMode};
use crate::comm::data::call::{DataCall, RecipientData};
use crate::comm::data::inputs::CollectiveInputs;
use crate::comm::data::result_buffer::ContiguousLayout;
use crate::comm::{Op, ReduceOp};
use crate::placement::ShardSizes;

/// Number of bytes that are copied in the time that a second message takes.
const MESSAGE: u64 = 1 << 20;

/// Returns true if an all-reduce of `bytes` bytes, of `ranks` ranks in `processes` processes, is
/// faster in two phases: if a process sends and adds enough less.
fn pay(bytes: u64, ranks: usize, processes: usize) -> bool {
    let bytes = u128::from(bytes);
    let n = ranks as u128;
    let p = processes as u128;
    // In one phase, a process sends the tensors of its `n / p` ranks to each other process. In two
    // phases, it sends a shard of `1 / n` of them for each rank there, and the shards of its own
    // sums. It adds half as much or less.
    let less_sent = bytes * (p - 1) * (n * p - n - p) / (p * p);
    less_sent + bytes / 2 > u128::from(MESSAGE)
}

impl HostGroupBackend {
    /// Returns true if an all-reduce of `tensors`, of `bytes` bytes, is faster in two phases in
    /// this group, which `remote` connects to other processes.
    pub(super) fn has_two_phases(
        &self,
        remote: &RemoteGroup,
        bytes: u64,
        tensors: &[DispatchTensor],
    ) -> bool {
        self.plane(Op::AllReduce, &self.member.home(tensors))
            .capabilities()
            .needs_remote_bytes
            && pay(bytes, self.member.group.size(), remote.processes())
    }

    /// Posts an [`all_reduce`](crate::comm::backend::GroupBackend::all_reduce) in a group of
    /// several processes.
    ///
    /// Both phases are posted at once, the first with its data, so that calls match the calls of
    /// the other ranks in order.
    pub(super) fn all_reduce_in_two_phases(
        &self,
        remote: &RemoteGroup,
        call: CallContext,
        tensors: Vec<DispatchTensor>,
        op: ReduceOp,
    ) -> PostResult<Vec<DispatchTensor>> {
        let backend = &self.backend;
        let group = &self.member.group;
        let bytes = call.signature.bytes();
        let shapes: Vec<_> = tensors.iter().map(DispatchTensor::shape).collect();
        let row = |(tensor, shape): (DispatchTensor, &Shape)| {
            reshaped(tensor, Shape::from([shape.num_elements()]))
        };
        let rows = tensors.into_iter().zip(&shapes).map(row).collect();
        let shardings: Vec<_> = shapes
            .iter()
            .map(|shape| (0, ShardSizes::Chunked(shape.num_elements())))
            .collect();
        let needed = RecipientData::Shards(&shardings);
        let PreparedCall {
            plane,
            contribution,
            device,
            ..
        } = self.prepare(&call, needed, None, (Vec::new(), rows));
        let contribution = contribution.arrived(None);
        let layout = |(row, (_, sizes)): (&DispatchTensor, &(usize, ShardSizes))| {
            let lengths = (0..group.size()).map(|rank| sizes.range(group.size(), rank).len());
            ContiguousLayout::new(row.shape(), row.dtype(), 0, lengths)
        };
        let layouts = || {
            contribution
                .tensors
                .iter()
                .zip(&shardings)
                .map(layout)
                .collect::<Option<Vec<_>>>()
        };
        let layouts = remote.receives_in_place(bytes).then(layouts).flatten();
        let data = remote.data(&contribution, needed);
        // All other properties are compared in the first phase.
        let agreed = CallSignature {
            tensors: Arc::new([]),
            names: None,
            global_tensor: None,
            operand_shapes: None,
            digests: None,
            ..call.signature.clone()
        };

        let mut phases = self.second.lock();
        let (key, later) = phases.get_or_insert_with(|| self.second_phases()).clone();
        let ((first, _), sent) =
            remote.post(call.signature, data, DataMode::Eager, |signature| {
                backend
                    .rendezvous
                    .post(self.key, group.rank(), signature, contribution)
            })?;
        let first_handle = OpHandleGuard {
            backend: backend.clone(),
            op: Some(first),
        };
        let post_second = |signature| {
            backend
                .rendezvous
                .post(key, group.rank(), signature, CallData::Local(None))
        };
        let signature = agreed.clone();
        let nothing = later.same_for_all(Default::default());
        let ((second, _), _) = later.post(agreed, nothing, DataMode::Deferred, post_second)?;
        drop(phases);

        let result = layouts.and_then(|layouts| backend.result_buffer(second, || Some(layouts)));
        let rank = self.member.rank();
        let gathering = plane.clone();
        let finish = Box::new(move |inputs: &CollectiveInputs| {
            let rows = gathering.rows(inputs, shapes.len()).into_iter();
            // Remote sums were received into it until now.
            drop(result);
            rows.zip(shapes)
                .map(|(row, shape)| reshaped(row, shape))
                .collect::<Vec<_>>()
        });
        let handle = OpHandleGuard {
            backend: backend.clone(),
            op: Some(second),
        };
        let home = device.clone();
        let gather = PostedCollective {
            handle,
            is_deferred: false,
            own: None,
            sent: None,
            device: home,
            finish,
        };
        let mut gather = HostRequest::new(rank, false, gather);
        if self.completes_in_background(bytes, &device) {
            gather = gather.complete_when_ready(second);
        }
        let this = backend.clone();
        let member = self.member.clone();
        let name = self.name;
        // Contributes this rank's sums to the second phase.
        let finish = Box::new(move |inputs: &CollectiveInputs| {
            let sums = plane.reduce_scatter(inputs, &shardings, op);
            let call = DataCall {
                signature: &signature,
                member: &member,
                name,
                needed: RecipientData::Full,
                plan: None,
                is_distributed: true,
                is_deferred: false,
                is_first_exchange: false,
                peer: None,
            };
            let contribution = plane.contribute(&call, sums, Vec::new());
            let data = later.data(&contribution, RecipientData::Full);
            later.send_data(second.seq, data);
            // While the other contributions are in flight.
            this.progress();
            this.provide_data(second, contribution.arrived(None));
        });
        let handle = first_handle;
        let sent = Some(sent);
        let reduce = PostedCollective {
            handle,
            is_deferred: false,
            own: None,
            sent,
            device,
            finish,
        };
        gather.before = Some(Box::new(
            HostRequest::new(rank, true, reduce).complete_when_ready(first),
        ));
        Ok(Box::new(gather))
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
