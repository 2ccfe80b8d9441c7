//! [`HostGroupBackend`]: the collectives of a group, as a local rank calls them.

use std::mem;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use burn::backend::{DispatchTensor, TensorMetadata};
use burn::tensor::{Device, Shape};
use parking_lot::{Mutex, MutexGuard};

use super::HostBackend;
use super::exchanged::{ExchangedCall, ExchangedRequest};
use super::exchanged_messages::{MessageBody, MessageReceiver, SentMessage};
use super::recv_request::RecvRequest;
use super::remote_group::RemoteGroup;
use super::request::{self, HostRequest, OpHandleGuard, OwnShards, PostedCollective};
use crate::comm::backend::{
    CallContext, CallSignature, Completed, GroupBackend, GroupMember, PostResult, ReceivedTensors,
    rows_for_each,
};
use crate::comm::communicator::PRIVATE;
use crate::comm::control::match_table::{DataMode, GroupKey, OpHandle, P2pMessage};
use crate::comm::data::call::{DataCall, MessagePeer, RecipientData};
use crate::comm::data::contribution::{Contribution, addressed};
use crate::comm::data::inputs::CollectiveInputs;
use crate::comm::data::plane::DataPlane;
use crate::comm::data::result_buffer::ContiguousLayout;
use crate::comm::data::shard;
use crate::comm::transport::SendStamp;
use crate::comm::transport::peer_processes::PayloadData;
use crate::comm::{
    Capabilities, CollectiveId, CollectivePlan, CommError, Op, ReduceOp, ShardedTensor, TensorMeta,
};
use crate::memory;
use crate::placement::ShardSizes;

/// Handle of one rank on one group.
#[derive(Debug)]
pub(super) struct HostGroupBackend {
    pub backend: Arc<HostBackend>,
    pub member: GroupMember,
    pub key: GroupKey,
    pub name: &'static str,
    /// Remote ranks of the group, if there are any.
    remote: Option<Arc<RemoteGroup>>,
    /// Plane of calls with tensors on the rank's device.
    plane: Arc<dyn DataPlane>,
    /// Plane of calls with tensors in host memory.
    host_plane: Arc<dyn DataPlane>,
    /// Number of the group's ranks in this process.
    local_members: usize,
    /// True if a call was posted whose tensors are exchanged. Locked while such a call is prepared
    /// and posted, so that a plane prepares the calls of a channel in their order.
    has_exchanged: Mutex<bool>,
    /// True once the rank has the result of such a call, so that all ranks have connected. Follows
    /// from what its program did.
    is_connected: Arc<AtomicBool>,
    /// Group on which the second phases of all-reduces are posted, once there was one.
    pub second: Mutex<Option<(GroupKey, Arc<RemoteGroup>)>>,
}

/// Contribution of a rank to a collective that it is about to post.
pub(super) struct PreparedCall<'a> {
    /// Lock of a call whose tensors are exchanged, until it is posted.
    exchange: Option<MutexGuard<'a, bool>>,
    pub plane: Arc<dyn DataPlane>,
    pub contribution: Contribution,
    /// Data that other processes need.
    needed: RecipientData<'a>,
    /// Device of the result.
    pub device: Device,
    /// True if the result is needed later.
    is_deferred: bool,
}

impl HostGroupBackend {
    pub fn new(backend: Arc<HostBackend>, member: GroupMember, name: &'static str) -> Self {
        let key = backend.rendezvous.group(member.group.ranks(), name);
        let remote = RemoteGroup::new(&backend, &member, name.into()).map(Arc::new);
        let local_members = backend.local_members(member.group.ranks()).count();
        let plane = backend.planes.of(&member.device);
        let host_plane = backend.planes.of(&memory::host());
        Self {
            backend,
            member,
            key,
            name,
            remote,
            plane,
            host_plane,
            local_members,
            has_exchanged: Mutex::new(false),
            is_connected: Arc::default(),
            second: Mutex::default(),
        }
    }

    /// Returns the plane of a call with tensors on `device`: the rank's own, or the host. Ranks that
    /// exchange must use the same plane, so calls of which some pass no tensors use the rank's own.
    pub fn plane(&self, op: Op, device: &Device) -> &Arc<dyn DataPlane> {
        let some_pass_none = matches!(
            op,
            Op::Broadcast | Op::Scatter | Op::Gather | Op::AllToAllList | Op::Barrier
        );
        if *device == self.member.device || (some_pass_none && self.plane.exchanges()) {
            &self.plane
        } else {
            &self.host_plane
        }
    }

    /// Lets the plane of `tensors` prepare the contribution to a call, of which other ranks need
    /// `needed`.
    pub fn prepare<'a>(
        &'a self,
        call: &CallContext,
        needed: RecipientData<'a>,
        plan: Option<&Arc<CollectivePlan>>,
        (recipients, tensors): (Vec<usize>, Vec<DispatchTensor>),
    ) -> PreparedCall<'a> {
        let device = self.member.home(&tensors);
        if let Some(tensor) = tensors.first() {
            self.member.ledger.ran_on(tensor.device());
        }
        let plane = self.plane(call.signature.op, &device).clone();
        let mut exchange = plane.exchanges().then(|| self.has_exchanged.lock());
        let has_exchanged = exchange
            .as_mut()
            .is_none_or(|before| mem::replace(&mut **before, true));
        let is_first_exchange = !has_exchanged;
        // The ranks connect in the first exchange.
        let is_deferred = call.is_deferred && !is_first_exchange;
        let call = DataCall {
            signature: &call.signature,
            member: &self.member,
            name: self.name,
            needed,
            plan,
            is_distributed: self.remote.is_some(),
            is_deferred,
            is_first_exchange,
            peer: None,
        };
        let contribution = plane.contribute(&call, tensors, recipients);
        PreparedCall {
            exchange,
            plane,
            contribution,
            needed,
            device,
            is_deferred,
        }
    }

    /// Lets the plane of `tensors` prepare a message to member `to`. Its tensors are exchanged if they
    /// have elements, and the ranks have connected.
    fn prepare_message(
        &self,
        signature: &CallSignature,
        tensors: Vec<DispatchTensor>,
        to: usize,
    ) -> MessageBody {
        let device = self.member.home(&tensors);
        if let Some(tensor) = tensors.first() {
            self.member.ledger.ran_on(tensor.device());
        }
        let plane = self.plane(signature.op, &device).clone();
        let is_exchanged = plane.exchanges()
            && signature.bytes() > 0
            && to != self.member.group.rank()
            && self.is_connected.load(Ordering::Acquire);
        let is_distributed = self.remote.is_some();
        let peer = is_exchanged.then_some(MessagePeer::To(to));
        let call = DataCall::of_message(signature, &self.member, self.name, is_distributed, peer);
        let contribution = plane.contribute(&call, tensors, Vec::new());
        if !is_exchanged {
            return MessageBody::Tensors(contribution);
        }
        MessageBody::Exchanged(self.backend.keep_message(SentMessage {
            rank: self.member.rank(),
            plane,
            device,
            group: self.key,
            contribution,
        }))
    }

    /// Returns the key and the remote ranks of an internal group with the same members, on which
    /// second phases are posted.
    pub fn second_phases(&self) -> (GroupKey, Arc<RemoteGroup>) {
        let name = format!("{PRIVATE}second phases of {}", self.name);
        let key = self
            .backend
            .rendezvous
            .group(self.member.group.ranks(), name.clone());
        let remote = RemoteGroup::new(&self.backend, &self.member, name);
        (
            key,
            Arc::new(remote.expect("some of the group are in other processes")),
        )
    }

    /// Posts the next collective of the group. If `own` returns this rank's shards of the result,
    /// remote data may be received into the result, to which the rank writes them.
    fn post<T: Send + 'static>(
        &self,
        call: CallContext,
        prepared: PreparedCall<'_>,
        own: impl FnOnce(&Contribution) -> Option<OwnShards>,
        finish: impl FnOnce(&dyn DataPlane, &CollectiveInputs) -> T + Send + 'static,
    ) -> PostResult<T> {
        if prepared.plane.exchanges() {
            return self.post_exchanged(call, prepared, finish);
        }
        let PreparedCall {
            plane,
            contribution,
            needed,
            device,
            is_deferred,
            exchange: _,
        } = prepared;
        let signature = call.signature;
        let own = own(&contribution);
        let in_background =
            !is_deferred && self.completes_in_background(signature.bytes(), &device);
        let data = self
            .remote
            .as_ref()
            .map(|remote| remote.data(&contribution, needed));
        let mode = if is_deferred {
            DataMode::OnDemand
        } else {
            DataMode::Eager
        };
        let (op, sent, own) = self.post_everywhere(signature, contribution, data, mode, own)?;
        let collective = PostedCollective {
            handle: OpHandleGuard {
                backend: self.backend.clone(),
                op: Some(op),
            },
            is_deferred: is_deferred && self.remote.is_some(),
            own,
            sent,
            device,
            finish: Box::new(move |inputs| finish(&*plane, inputs)),
        };
        let request = HostRequest::new(self.member.rank(), false, collective);
        Ok(Box::new(if in_background {
            request.complete_when_ready(op)
        } else {
            request
        }))
    }

    /// Posts the next collective of the group, whose tensors the ranks exchange by their plane. It
    /// is started once all ranks agree, also if this rank drops its request; a deferred one once all
    /// agree and one of them needs the result.
    fn post_exchanged<T: Send + 'static>(
        &self,
        call: CallContext,
        prepared: PreparedCall<'_>,
        finish: impl FnOnce(&dyn DataPlane, &CollectiveInputs) -> T + Send + 'static,
    ) -> PostResult<T> {
        let PreparedCall {
            exchange: posting,
            plane,
            contribution,
            device,
            is_deferred,
            ..
        } = prepared;
        let signature = CallSignature {
            // All ranks must defer it, or none.
            exchange: Some(match is_deferred {
                true => format!("{}, deferred", plane.name()).into(),
                false => plane.name().into(),
            }),
            ..call.signature
        };
        let id = CollectiveId {
            op: signature.op,
            seq: 0,
            label: signature.label.clone(),
            ranks: self.member.group.shared_ranks(),
        };
        let data = self
            .remote
            .as_ref()
            .map(|remote| remote.data(&contribution, RecipientData::Full));
        let (op, sent, _) =
            self.post_everywhere(signature, contribution, data, DataMode::Eager, None)?;
        let backend = &self.backend;
        let rank = self.member.rank();
        let id = CollectiveId { seq: op.seq, ..id };
        let collective = PostedCollective {
            handle: OpHandleGuard {
                backend: backend.clone(),
                op: Some(op),
            },
            is_deferred: false,
            own: None,
            sent,
            device: device.clone(),
            finish: ExchangedRequest::<T>::start(rank, plane.clone(), backend.clone()),
        };
        let started = HostRequest::new(rank, true, collective);
        backend.add_exchange(
            op,
            started.task(),
            is_deferred,
            self.local_members,
            self.remote.as_ref(),
        );
        drop(posting);
        Ok(Box::new(ExchangedRequest {
            started,
            call: ExchangedCall {
                backend: backend.clone(),
                plane,
                rank,
                op,
                id,
                may_decline: is_deferred,
                is_connected: self.is_connected.clone(),
            },
            device,
            finish: Box::new(finish),
        }))
    }

    /// Posts a collective here, and sends it to the other processes of the group, each with its
    /// `data`. Creates the result buffer of `own` shards, unless the data is sent on demand.
    fn post_everywhere(
        &self,
        signature: CallSignature,
        contribution: Contribution,
        data: Option<Vec<PayloadData>>,
        mode: DataMode,
        mut own: Option<OwnShards>,
    ) -> Result<(OpHandle, Option<SendStamp>, Option<OwnShards>), CommError> {
        let backend = &self.backend;
        let member = self.member.group.rank();
        let Some((remote, data)) = self.remote.as_ref().zip(data) else {
            let (op, _) = backend
                .rendezvous
                .post(self.key, member, signature, contribution)?;
            return Ok((op, None, own));
        };
        let is_deferred = mode == DataMode::OnDemand;
        let (op, sent) = remote.post(signature, data, mode, |signature| {
            let contribution = contribution.arrived(None);
            let (op, _) = backend
                .rendezvous
                .post(self.key, member, signature, contribution)?;
            if let Some(own) = own.as_mut().filter(|_| !is_deferred) {
                own.create_buffer(backend, op);
            }
            Ok(op)
        })?;
        if !is_deferred {
            backend.pull(backend.rendezvous.read(|table| table.request(op)));
        }
        Ok((op, Some(sent), own))
    }

    /// Returns true if remote data is received in place in results of `bytes` bytes.
    fn receives_in_place(&self, bytes: u64) -> bool {
        self.remote
            .as_ref()
            .is_some_and(|remote| remote.receives_in_place(bytes))
    }

    /// Returns this rank's shard of a result with the shape `shape`, if remote data is received in
    /// place. The result has the device and the element type of `like`, and is split along `dim`
    /// into `lengths`, by rank.
    fn own_shard(
        &self,
        shape: Shape,
        dim: usize,
        lengths: &[usize],
        like: &DispatchTensor,
        shard: impl FnOnce() -> DispatchTensor,
    ) -> Option<OwnShards> {
        let bytes = (shape.num_elements() * like.dtype().size()) as u64;
        if !self.receives_in_place(bytes) || !memory::is_host(&Device::new(like.device())) {
            return None;
        }
        let layout = ContiguousLayout::new(shape, like.dtype(), dim, lengths.iter().copied())?;
        Some(OwnShards {
            tensors: vec![shard()],
            layouts: vec![layout],
            buffer: None,
        })
    }

    /// Returns true if the completion thread completes a result of `bytes` bytes on `device`.
    pub fn completes_in_background(&self, bytes: u64, device: &Device) -> bool {
        self.remote.is_some() && bytes >= request::WORTH && memory::is_host(device)
    }
}

impl GroupBackend for HostGroupBackend {
    fn member(&self) -> &GroupMember {
        &self.member
    }

    fn can_overlap(&self) -> bool {
        self.remote.is_some() || self.plane.exchanges()
    }

    fn capabilities(&self) -> Capabilities {
        self.plane.capabilities()
    }

    fn all_gather(
        &self,
        call: CallContext,
        plan: Arc<CollectivePlan>,
        shards: Vec<DispatchTensor>,
    ) -> PostResult<Vec<DispatchTensor>> {
        let prepared = self.prepare(
            &call,
            RecipientData::Full,
            Some(&plan),
            (Vec::new(), shards),
        );
        let bytes = call.signature.bytes();
        let full = call.signature.tensors.clone();
        let own = |contribution: &Contribution| {
            if !self.receives_in_place(bytes) {
                return None;
            }
            Some(OwnShards {
                layouts: ContiguousLayout::of_full(&full, self.member.group.size())?,
                tensors: contribution.tensors.clone(),
                buffer: None,
            })
        };
        self.post(call, prepared, own, move |plane, inputs| {
            plane.all_gather(inputs, &plan)
        })
    }

    fn reduce_scatter(
        &self,
        call: CallContext,
        plan: Arc<CollectivePlan>,
        full_tensors: Vec<DispatchTensor>,
        op: ReduceOp,
    ) -> PostResult<Vec<DispatchTensor>> {
        let needed = RecipientData::Shards(plan.shardings());
        let prepared = self.prepare(&call, needed, Some(&plan), (Vec::new(), full_tensors));
        let shardings = plan.clone();
        self.post(
            call,
            prepared,
            |_| None,
            move |plane, inputs| plane.reduce_scatter(inputs, shardings.shardings(), op),
        )
    }

    fn all_to_all(
        &self,
        call: CallContext,
        mut shards: Vec<Vec<DispatchTensor>>,
        _metas: Vec<Vec<TensorMeta>>,
    ) -> PostResult<Vec<Vec<DispatchTensor>>> {
        let own = mem::take(&mut shards[self.member.group.rank()]);
        let prepared = self.prepare(&call, RecipientData::Addressed, None, addressed(shards));
        self.post(
            call,
            prepared,
            |_| None,
            move |plane, inputs| plane.all_to_all(inputs, own),
        )
    }

    fn broadcast(
        &self,
        call: CallContext,
        tensors: Vec<DispatchTensor>,
        _metas: Vec<TensorMeta>,
        root: usize,
    ) -> PostResult<Vec<DispatchTensor>> {
        let prepared = self.prepare(&call, RecipientData::Full, None, (Vec::new(), tensors));
        self.post(
            call,
            prepared,
            |_| None,
            move |plane, inputs| plane.broadcast(inputs, root),
        )
    }

    fn barrier(&self, call: CallContext) -> PostResult<()> {
        let prepared = self.prepare(&call, RecipientData::Full, None, Default::default());
        self.post(call, prepared, |_| None, |_, _| ())
    }

    fn send(
        &self,
        call: CallContext,
        tensors: Vec<DispatchTensor>,
        to: usize,
        tag: u32,
    ) -> PostResult<()> {
        let from = self.member.group.rank();
        let signature = call.signature;
        let body = self.prepare_message(&signature, tensors, to);
        let rendezvous = &self.backend.rendezvous;
        match self
            .remote
            .as_ref()
            .and_then(|remote| Some((remote, remote.process_of(to)?)))
        {
            Some((remote, process)) => {
                remote.send(process, to, tag, &signature, &body, || {
                    rendezvous.send_elsewhere(self.key, from, &signature)
                })?;
            }
            None => {
                let message = |part| P2pMessage {
                    from,
                    tag,
                    signature,
                    part,
                };
                match body {
                    MessageBody::Tensors(part) => {
                        rendezvous.send(self.key, to, message(Some(part)))?;
                    }
                    MessageBody::Exchanged(id) => {
                        let message = rendezvous.announce(self.key, to, message(None))?;
                        if self.backend.message_sent(message, id) == Ok(true) {
                            self.backend.start_exchanges();
                        }
                    }
                }
            }
        }
        // The backend owns the message.
        Ok(Box::new(Completed::timed(|| ())))
    }

    fn receive(
        &self,
        call: CallContext,
        from: Option<usize>,
        tag: u32,
        _metas: Option<Vec<TensorMeta>>,
    ) -> PostResult<ReceivedTensors> {
        let backend = self.backend.clone();
        let member = self.member.clone();
        let plane = self.plane.clone();
        let exchanges = plane.exchanges();
        if exchanges {
            backend.add_receiver((self.key, member.group.rank()), || MessageReceiver {
                plane: plane.clone(),
                member: member.clone(),
                name: self.name,
            });
        }
        let group_rank = member.group.rank();
        let handle = backend
            .rendezvous
            .receive(self.key, group_rank, from, tag, call.signature)?;
        if exchanges {
            backend.receive_posted(handle);
        }
        Ok(Box::new(RecvRequest {
            backend,
            plane,
            handle: Some(handle),
            member,
        }))
    }

    /// Every rank reads the operands in place. Of large tensors, each rank reduces a part for all.
    fn all_reduce(
        &self,
        call: CallContext,
        tensors: Vec<DispatchTensor>,
        op: ReduceOp,
    ) -> PostResult<Vec<DispatchTensor>> {
        if let Some(remote) = &self.remote
            && self.has_two_phases(remote, call.signature.bytes(), &tensors)
        {
            return self.all_reduce_in_two_phases(remote, call, tensors, op);
        }
        let count = tensors.len();
        let prepared = self.prepare(&call, RecipientData::Full, None, (Vec::new(), tensors));
        self.post(
            call,
            prepared,
            |_| None,
            move |plane, inputs| {
                (0..count)
                    .map(|index| plane.all_reduce(inputs, index, op))
                    .collect()
            },
        )
    }

    /// Copies each element once.
    fn shard_dim_all_to_all(
        &self,
        call: CallContext,
        sharded: ShardedTensor,
        to_dim: usize,
        to_sizes: ShardSizes,
    ) -> PostResult<DispatchTensor> {
        let ranks = self.member.group.size();
        let rank = self.member.group.rank();
        let ShardedTensor { tensor, dim, sizes } = sharded;
        let mut shape = tensor.shape();
        let lengths: Vec<_> = (0..ranks)
            .map(|rank| sizes.range(ranks, rank).len())
            .collect();
        let range = to_sizes.range(ranks, rank);
        (shape[dim], shape[to_dim]) = (lengths.iter().sum(), range.len());
        let shardings = [(to_dim, to_sizes.clone())];
        let needed = RecipientData::Shards(&shardings);
        let prepared = self.prepare(&call, needed, None, (Vec::new(), vec![tensor]));
        let own = |contribution: &Contribution| {
            let tensor = &contribution.tensors[0];
            self.own_shard(shape, dim, &lengths, tensor, || {
                shard(tensor, to_dim, range)
            })
        };
        self.post(call, prepared, own, move |plane, inputs| {
            plane.reshard(inputs, dim, to_dim, &to_sizes)
        })
    }

    /// Every rank reads its rows in place.
    fn all_to_all_v(
        &self,
        call: CallContext,
        tensor: DispatchTensor,
        send_counts: &[usize],
        recv_counts: &[usize],
    ) -> PostResult<DispatchTensor> {
        let rows = addressed(rows_for_each(&tensor, send_counts));
        let prepared = self.prepare(&call, RecipientData::Addressed, None, rows);
        let mut shape = tensor.shape();
        shape[0] = recv_counts.iter().sum();
        let rank = self.member.group.rank();
        let own = |contribution: &Contribution| {
            let rows = &contribution.tensors_for(rank)[0];
            self.own_shard(shape, 0, recv_counts, rows, || rows.clone())
        };
        self.post(call, prepared, own, |plane, inputs| {
            plane.all_to_all_v(inputs)
        })
    }

    /// Every rank reads its shards in place.
    fn scatter(
        &self,
        call: CallContext,
        tensors: Vec<DispatchTensor>,
        _metas: Vec<TensorMeta>,
        shardings: Vec<(usize, ShardSizes)>,
        root: usize,
    ) -> PostResult<Vec<DispatchTensor>> {
        let needed = shardings.clone();
        let needed = RecipientData::Shards(&needed);
        let prepared = self.prepare(&call, needed, None, (Vec::new(), tensors));
        self.post(
            call,
            prepared,
            |_| None,
            move |plane, inputs| {
                shardings
                    .iter()
                    .enumerate()
                    .map(|(index, (dim, sizes))| plane.scatter(inputs, index, root, *dim, sizes))
                    .collect()
            },
        )
    }
}
