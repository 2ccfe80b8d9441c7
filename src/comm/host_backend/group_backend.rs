//! [`HostGroupBackend`]: the collectives of a group, as a local rank calls them.

use std::sync::Arc;

use burn::backend::{DispatchTensor, TensorMetadata};
use burn::tensor::{Device, Shape};
use parking_lot::Mutex;

use super::HostBackend;
use super::recv_request::RecvRequest;
use super::remote_group::{RecipientData, RemoteGroup};
use super::request::{self, HostRequest, OpHandleGuard, OwnShards, PostedCollective};
use crate::comm::backend::{
    CallContext, Completed, GroupBackend, GroupMember, PostResult, ReceivedTensors, rows_for_each,
};
use crate::comm::communicator::PRIVATE;
use crate::comm::control::match_table::{DataMode, GroupKey, P2pMessage};
use crate::comm::data::contribution::{self, Contribution};
#[cfg(feature = "cube")]
use crate::comm::data::device::CoalescedCopies;
use crate::comm::data::inputs::CollectiveInputs;
#[cfg(feature = "cube")]
use crate::comm::data::inputs::has_kernel;
use crate::comm::data::result_buffer::ContiguousLayout;
use crate::comm::{CollectivePlan, ReduceOp, ShardedTensor, TensorMeta};
use crate::memory;
use crate::placement::ShardSizes;

/// Handle of one rank on one group.
#[derive(Debug)]
pub(super) struct HostGroupBackend {
    pub backend: Arc<HostBackend>,
    pub member: GroupMember,
    pub key: GroupKey,
    name: &'static str,
    /// Remote ranks of the group, if there are any.
    remote: Option<Arc<RemoteGroup>>,
    /// Group on which the second phases of all-reduces are posted, once there was one.
    pub second: Mutex<Option<(GroupKey, Arc<RemoteGroup>)>>,
}

impl HostGroupBackend {
    pub fn new(backend: Arc<HostBackend>, member: GroupMember, name: &'static str) -> Self {
        let key = backend.rendezvous.group(member.group.ranks(), name);
        let remote = RemoteGroup::new(&backend, &member, name.into()).map(Arc::new);
        Self {
            backend,
            member,
            key,
            name,
            remote,
            second: Mutex::default(),
        }
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

    /// Records the device of a contribution in the ledger.
    pub fn note_device(&self, contribution: &Contribution) {
        if let Some(tensor) = contribution.tensors.first() {
            self.member.ledger.ran_on(tensor.device());
        }
    }

    /// Posts the next collective of the group. Other processes receive the data of the contribution
    /// that they `need`. If this rank has `own` shards, remote data may be received into the
    /// result, to which it writes them.
    fn post<T: Send + 'static>(
        &self,
        post: CallContext,
        contribution: Contribution,
        needed: RecipientData<'_>,
        mut own: Option<OwnShards>,
        finish: impl FnOnce(&CollectiveInputs) -> T + Send + 'static,
    ) -> PostResult<T> {
        self.note_device(&contribution);
        let contribution = contribution.after_submitted_work();
        let backend = &self.backend;
        let member = self.member.group.rank();
        let CallContext {
            signature,
            is_deferred,
        } = post;
        let device = self.member.home(&contribution.tensors);
        let in_background =
            !is_deferred && self.completes_in_background(signature.bytes(), &device);
        let (op, sent) = match &self.remote {
            None => (
                backend
                    .rendezvous
                    .post(self.key, member, signature, contribution)?
                    .0,
                None,
            ),
            Some(remote) => {
                let data = remote.data(&contribution, needed);
                let mode = if is_deferred {
                    DataMode::OnDemand
                } else {
                    DataMode::Eager
                };
                let (op, sent) = remote.post(signature, data, mode, |signature| {
                    let contribution = contribution.arrived(None);
                    let (op, _) =
                        backend
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
                (op, Some(sent))
            }
        };
        let is_deferred = is_deferred && self.remote.is_some();
        let handle = OpHandleGuard {
            backend: backend.clone(),
            op: Some(op),
        };
        let finish = Box::new(finish);
        let collective = PostedCollective {
            handle,
            is_deferred,
            own,
            sent,
            device,
            finish,
        };
        let request = HostRequest::new(self.member.rank(), false, collective);
        Ok(Box::new(if in_background {
            request.complete_when_ready(op)
        } else {
            request
        }))
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
        self.remote.is_some()
    }

    fn all_gather(
        &self,
        post: CallContext,
        plan: Arc<CollectivePlan>,
        shards: Vec<DispatchTensor>,
    ) -> PostResult<Vec<DispatchTensor>> {
        let contribution = Contribution {
            plan: Some(plan.clone()),
            ..Contribution::new(shards)
        };
        #[cfg(feature = "cube")]
        let (packed, contribution) = match &self.remote {
            None => {
                CoalescedCopies::pack_parts(post.is_deferred, contribution, &plan, &self.member)
            }
            // Ranks of other processes contribute host tensors without rows.
            Some(_) => (None, contribution),
        };
        let layouts = self
            .receives_in_place(post.signature.bytes())
            .then(|| ContiguousLayout::of_full(&post.signature.tensors, self.member.group.size()));
        let tensors = &contribution.tensors;
        let own = layouts.flatten().map(|layouts| OwnShards {
            tensors: tensors.clone(),
            layouts,
            buffer: None,
        });
        self.post(
            post,
            contribution,
            RecipientData::Full,
            own,
            move |inputs| {
                if let Some(full_tensors) = inputs.received() {
                    return full_tensors;
                }
                #[cfg(feature = "cube")]
                if let Some(full_tensors) = packed.and_then(|packed| packed.gathered(inputs.all)) {
                    return full_tensors;
                }
                inputs.gather(&plan)
            },
        )
    }

    fn reduce_scatter(
        &self,
        post: CallContext,
        plan: Arc<CollectivePlan>,
        full_tensors: Vec<DispatchTensor>,
        op: ReduceOp,
    ) -> PostResult<Vec<DispatchTensor>> {
        let contribution = Contribution::new(full_tensors);
        #[cfg(feature = "cube")]
        let (packed, contribution) = match &self.remote {
            None => CoalescedCopies::pack_full(contribution, &plan, &self.member),
            Some(_) => (None, contribution),
        };
        let shardings = plan.clone();
        self.post(
            post,
            contribution,
            RecipientData::Shards(shardings.shardings()),
            None,
            move |inputs| {
                #[cfg(feature = "cube")]
                if let Some(shards) = packed
                    .filter(|_| has_kernel(op))
                    .and_then(|packed| packed.reduced(inputs.all, op))
                {
                    return shards;
                }
                inputs.reduce_scatter(plan.shardings(), op)
            },
        )
    }

    fn all_to_all(
        &self,
        post: CallContext,
        mut shards: Vec<Vec<DispatchTensor>>,
        _metas: Vec<Vec<TensorMeta>>,
    ) -> PostResult<Vec<Vec<DispatchTensor>>> {
        let own = std::mem::take(&mut shards[self.member.group.rank()]);
        let contribution = Contribution::addressed(shards);
        self.post(
            post,
            contribution,
            RecipientData::Addressed,
            None,
            move |inputs| inputs.addressed(own),
        )
    }

    fn broadcast(
        &self,
        post: CallContext,
        tensors: Vec<DispatchTensor>,
        _metas: Vec<TensorMeta>,
        root: usize,
    ) -> PostResult<Vec<DispatchTensor>> {
        let contribution = Contribution::new(tensors);
        self.post(
            post,
            contribution,
            RecipientData::Full,
            None,
            move |inputs| inputs.of_root(root),
        )
    }

    fn barrier(&self, post: CallContext) -> PostResult<()> {
        self.post(
            post,
            Contribution::new(Vec::new()),
            RecipientData::Full,
            None,
            |_| (),
        )
    }

    fn send(
        &self,
        post: CallContext,
        tensors: Vec<DispatchTensor>,
        to: usize,
        tag: u32,
    ) -> PostResult<()> {
        let from = self.member.group.rank();
        let part = Contribution::new(tensors);
        let signature = post.signature;
        self.note_device(&part);
        let part = part.after_submitted_work();
        let rendezvous = &self.backend.rendezvous;
        match self
            .remote
            .as_ref()
            .and_then(|remote| Some((remote, remote.process_of(to)?)))
        {
            Some((remote, process)) => {
                remote.send(process, to, tag, &signature, &part, || {
                    rendezvous.send_elsewhere(self.key, from, &signature)
                })?;
            }
            None => {
                let message = P2pMessage {
                    from,
                    tag,
                    signature,
                    part: Some(part),
                };
                rendezvous.send(self.key, to, message)?;
            }
        }
        // The backend owns the message.
        Ok(Box::new(Completed::timed(|| ())))
    }

    fn receive(
        &self,
        post: CallContext,
        from: Option<usize>,
        tag: u32,
        _metas: Option<Vec<TensorMeta>>,
    ) -> PostResult<ReceivedTensors> {
        let backend = self.backend.clone();
        let member = self.member.clone();
        let handle = Some(backend.rendezvous.receive(
            self.key,
            member.group.rank(),
            from,
            tag,
            post.signature,
        )?);
        Ok(Box::new(RecvRequest {
            backend,
            handle,
            member,
        }))
    }

    /// Every rank reads the operands in place. Of large tensors, each rank reduces a part for all.
    fn all_reduce(
        &self,
        post: CallContext,
        tensors: Vec<DispatchTensor>,
        op: ReduceOp,
    ) -> PostResult<Vec<DispatchTensor>> {
        if let Some(remote) = &self.remote
            && self.has_two_phases(remote, post.signature.bytes())
        {
            return self.all_reduce_in_two_phases(remote, post, tensors, op);
        }
        let count = tensors.len();
        self.post(
            post,
            Contribution::new(tensors),
            RecipientData::Full,
            None,
            move |inputs| {
                (0..count)
                    .map(|index| inputs.all_reduce(index, op))
                    .collect()
            },
        )
    }

    /// Copies each element once.
    fn shard_dim_all_to_all(
        &self,
        post: CallContext,
        shard: ShardedTensor,
        to_dim: usize,
        to_sizes: ShardSizes,
    ) -> PostResult<DispatchTensor> {
        let ranks = self.member.group.size();
        let rank = self.member.group.rank();
        let ShardedTensor { tensor, dim, sizes } = shard;
        let mut shape = tensor.shape();
        let lengths: Vec<_> = (0..ranks)
            .map(|rank| sizes.range(ranks, rank).len())
            .collect();
        let range = to_sizes.range(ranks, rank);
        (shape[dim], shape[to_dim]) = (lengths.iter().sum(), range.len());
        let contribution = Contribution::new(vec![tensor]);
        let tensor = &contribution.tensors[0];
        let own = self.own_shard(shape, dim, &lengths, tensor, || {
            contribution::shard(tensor, to_dim, range)
        });
        let shardings = [(to_dim, to_sizes.clone())];
        self.post(
            post,
            contribution,
            RecipientData::Shards(&shardings),
            own,
            move |inputs| inputs.reshard(dim, to_dim, &to_sizes),
        )
    }

    /// Every rank reads its rows in place.
    fn all_to_all_v(
        &self,
        post: CallContext,
        tensor: DispatchTensor,
        send_counts: &[usize],
        recv_counts: &[usize],
    ) -> PostResult<DispatchTensor> {
        let contribution = Contribution::addressed(rows_for_each(&tensor, send_counts));
        let mut shape = tensor.shape();
        shape[0] = recv_counts.iter().sum();
        let own = || contribution.tensors_for(self.member.group.rank())[0].clone();
        let own = self.own_shard(shape, 0, recv_counts, &tensor, own);
        self.post(
            post,
            contribution,
            RecipientData::Addressed,
            own,
            |inputs| inputs.addressed_rows(),
        )
    }

    /// Every rank reads its shards in place.
    fn scatter(
        &self,
        post: CallContext,
        tensors: Vec<DispatchTensor>,
        _metas: Vec<TensorMeta>,
        shardings: Vec<(usize, ShardSizes)>,
        root: usize,
    ) -> PostResult<Vec<DispatchTensor>> {
        let needed = shardings.clone();
        self.post(
            post,
            Contribution::new(tensors),
            RecipientData::Shards(&needed),
            None,
            move |inputs| {
                shardings
                    .iter()
                    .enumerate()
                    .map(|(index, (dim, sizes))| inputs.shard(index, root, *dim, sizes))
                    .collect()
            },
        )
    }
}
