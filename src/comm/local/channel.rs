//! [`HostGroupBackend`]: the collectives of a group, as a local rank calls them.

use std::sync::Arc;

use burn::backend::{DispatchTensor, TensorMetadata};
use burn::tensor::{Device, Shape};
use parking_lot::Mutex;

use super::HostBackend;
use super::background::{self, BackgroundRequest};
#[cfg(feature = "cube")]
use super::contribution::has_kernel;
use super::contribution::{self, CollectiveInputs, Contribution};
#[cfg(feature = "cube")]
use super::device::CoalescedCopies;
use super::match_table::{GroupKey, P2pMessage};
use super::remote_group::{DataMode, OutgoingData, RecipientData, RemoteGroup};
use super::requests::{CollectiveRequest, OpHandleGuard, OwnShards, RecvRequest, SendRequest};
use crate::comm::backend::{CallContext, GroupBackend, GroupMember, PostResult, ReceivedTensors, rows_for_each};
use crate::comm::communicator::PRIVATE;
use crate::comm::process::contiguous_layout::ContiguousLayout;
use crate::comm::{CollectivePlan, ReduceOp, ShardedTensor, TensorMeta};
use crate::memory;
use crate::placement::ShardSizes;

/// Handle of one rank on one group.
#[derive(Debug)]
pub(super) struct HostGroupBackend {
    pub engine: Arc<HostBackend>,
    pub member: GroupMember,
    pub key: GroupKey,
    name: &'static str,
    /// Remote ranks of the group, if there are any.
    outlet: Option<Arc<RemoteGroup>>,
    /// Group on which the second phases of all-reduces are posted, once there was one.
    pub second: Mutex<Option<(GroupKey, Arc<RemoteGroup>)>>,
}

impl HostGroupBackend {
    pub fn new(engine: Arc<HostBackend>, member: GroupMember, name: &'static str) -> Self {
        let key = engine.rendezvous.group(member.group.ranks(), name);
        let outlet =
            engine.others.as_ref().and_then(|others| RemoteGroup::new(others, &member, name.into())).map(Arc::new);
        Self { engine, member, key, name, outlet, second: Mutex::default() }
    }

    /// Returns the key and the remote ranks of an internal group with the same members, on which second phases are
    /// posted.
    pub fn second_phases(&self) -> (GroupKey, Arc<RemoteGroup>) {
        let name = format!("{PRIVATE}second phases of {}", self.name);
        let key = self.engine.rendezvous.group(self.member.group.ranks(), name.clone());
        let others = self.engine.others.as_ref().expect("an all-reduce has two phases only among processes");
        let outlet = RemoteGroup::new(others, &self.member, name).expect("some of the group are in other processes");
        (key, Arc::new(outlet))
    }

    /// Records the device of a contribution in the ledger.
    pub fn note(&self, deposit: &Contribution) {
        if let Some(tensor) = deposit.tensors.first() {
            self.member.ledger.ran_on(tensor.device());
        }
    }

    /// Posts the next collective of the group. `shares` is the data that other processes need of the contribution.
    fn join<T: Send + 'static>(
        &self,
        post: CallContext,
        deposit: Contribution,
        shares: Option<OutgoingData>,
        finish: impl FnOnce(&CollectiveInputs) -> T + Send + 'static,
    ) -> PostResult<T> {
        self.join_with(post, deposit, shares, None, finish)
    }

    /// Like [`join`](Self::join), but remote data may be received into the result, to which this rank writes its
    /// `own` shards.
    fn join_with<T: Send + 'static>(
        &self,
        post: CallContext,
        deposit: Contribution,
        shares: Option<OutgoingData>,
        mut own: Option<OwnShards>,
        finish: impl FnOnce(&CollectiveInputs) -> T + Send + 'static,
    ) -> PostResult<T> {
        self.note(&deposit);
        let (place, device) = (self.member.group.rank(), self.member.home(&deposit.tensors));
        let in_background = !post.is_deferred && self.completes_in_background(post.print.bytes(), &device);
        let mut join = |print, deposit| {
            let ticket = self.engine.rendezvous.post(self.key, place, print, deposit)?;
            if let Some(own) = own.as_mut().filter(|_| !post.is_deferred) {
                own.await_others(&self.engine, ticket);
            }
            Ok(ticket)
        };
        let (ticket, taken) = match (&self.outlet, shares) {
            (Some(outlet), Some(shares)) => {
                let deposit = deposit.there(None);
                let when = if post.is_deferred { DataMode::OnDemand } else { DataMode::Eager };
                let (ticket, taken) = outlet.joined(post.print, shares, when, |print| join(print, deposit))?;
                if !post.is_deferred {
                    self.engine.ask(self.engine.rendezvous.want(ticket));
                }
                (ticket, Some(taken))
            }
            _ => (join(post.print, deposit)?, None),
        };
        let seat = OpHandleGuard::new(self.engine.clone(), ticket, self.outlet.is_some() && post.is_deferred);
        let joined = Box::new(CollectiveRequest { seat, own, taken, device, finish });
        if !in_background {
            return Ok(joined);
        }
        let request = BackgroundRequest::new(&self.engine, self.member.rank(), joined);
        Ok(Box::new(request.complete_when_ready(ticket)))
    }

    /// Returns true if remote data is received in place in results of `bytes` bytes.
    fn lands(&self, bytes: u64) -> bool {
        self.outlet.as_ref().is_some_and(|outlet| outlet.lands(bytes))
    }

    /// Returns this rank's shard `part` of a result with the shape `shape`, if remote data is received in place.
    /// The result has the device and the element type of `like`, and is split along `dim` into `lengths`, by rank.
    fn placed(
        &self,
        shape: Shape,
        like: &DispatchTensor,
        dim: usize,
        lengths: &[usize],
        part: impl FnOnce() -> DispatchTensor + Send + 'static,
    ) -> Option<OwnShards> {
        let dtype = like.dtype();
        let bytes = (shape.num_elements() * dtype.size()) as u64;
        if !self.lands(bytes) || !memory::is_host(&Device::new(like.device())) {
            return None;
        }
        let layout = ContiguousLayout::new(shape, dtype, dim, lengths.iter().copied())?;
        Some(OwnShards::new(move || vec![part()], move || Some(vec![layout])))
    }

    /// Returns true if the completion thread completes a result of `bytes` bytes on `device`.
    pub fn completes_in_background(&self, bytes: u64, device: &Device) -> bool {
        self.outlet.is_some() && bytes >= background::WORTH && memory::is_host(device)
    }

    /// Returns the data of a contribution that other processes need, if there are any.
    fn shares(&self, deposit: &Contribution, share: RecipientData<'_>) -> Option<OutgoingData> {
        self.outlet.as_ref().map(|outlet| outlet.shares(deposit, share))
    }
}

impl GroupBackend for HostGroupBackend {
    fn member(&self) -> &GroupMember {
        &self.member
    }

    fn can_overlap(&self) -> bool {
        self.outlet.is_some()
    }

    fn all_gather(
        &self,
        post: CallContext,
        plan: Arc<CollectivePlan>,
        parts: Vec<DispatchTensor>,
    ) -> PostResult<Vec<DispatchTensor>> {
        let deposit = Contribution::planned(parts, plan.clone());
        #[cfg(feature = "cube")]
        let (fused, deposit) = CoalescedCopies::pack_parts(post.is_deferred, deposit, &plan, &self.member);
        let shares = self.shares(&deposit, RecipientData::Full);
        let own = self.lands(post.print.bytes()).then(|| {
            let (tensors, ranks) = (post.print.tensors.clone(), self.member.group.size());
            let parts = deposit.tensors.clone();
            OwnShards::new(move || parts, move || ContiguousLayout::of_full(&tensors, ranks))
        });
        self.join_with(post, deposit, shares, own, move |exchange| {
            if let Some(full_tensors) = exchange.landed() {
                return full_tensors;
            }
            #[cfg(feature = "cube")]
            if let Some(full_tensors) = fused.and_then(|fused| fused.gathered(exchange.deposits)) {
                return full_tensors;
            }
            exchange.gather(&plan)
        })
    }

    fn reduce_scatter(
        &self,
        post: CallContext,
        plan: Arc<CollectivePlan>,
        full_tensors: Vec<DispatchTensor>,
        op: ReduceOp,
    ) -> PostResult<Vec<DispatchTensor>> {
        let deposit = Contribution::new(full_tensors);
        #[cfg(feature = "cube")]
        let (fused, deposit) = CoalescedCopies::pack_full(deposit, &plan, &self.member);
        let shares = self.shares(&deposit, RecipientData::Parts(plan.shardings()));
        self.join(post, deposit, shares, move |exchange| {
            #[cfg(feature = "cube")]
            if let Some(parts) = fused.filter(|_| has_kernel(op)).and_then(|fused| fused.reduced(exchange.deposits, op))
            {
                return parts;
            }
            let part =
                |(index, (dim, sizes)): (usize, &(usize, ShardSizes))| exchange.reduce_part(index, *dim, sizes, op);
            plan.shardings().iter().enumerate().map(part).collect()
        })
    }

    fn all_to_all(
        &self,
        post: CallContext,
        mut parts: Vec<Vec<DispatchTensor>>,
        _metas: Vec<Vec<TensorMeta>>,
    ) -> PostResult<Vec<Vec<DispatchTensor>>> {
        let own = std::mem::take(&mut parts[self.member.group.rank()]);
        let deposit = Contribution::addressed(parts);
        let shares = self.shares(&deposit, RecipientData::Addressed);
        self.join(post, deposit, shares, move |exchange| exchange.addressed(own))
    }

    fn broadcast(
        &self,
        post: CallContext,
        tensors: Vec<DispatchTensor>,
        _metas: Vec<TensorMeta>,
        root: usize,
    ) -> PostResult<Vec<DispatchTensor>> {
        let deposit = Contribution::new(tensors);
        let shares = self.shares(&deposit, RecipientData::Full);
        self.join(post, deposit, shares, move |exchange| exchange.of_root(root))
    }

    fn barrier(&self, post: CallContext) -> PostResult<()> {
        let deposit = Contribution::new(Vec::new());
        let shares = self.shares(&deposit, RecipientData::Full);
        self.join(post, deposit, shares, |_| ())
    }

    fn send(&self, post: CallContext, tensors: Vec<DispatchTensor>, to: usize, tag: u32) -> PostResult<()> {
        let (from, part) = (self.member.group.rank(), Contribution::new(tensors));
        self.note(&part);
        let is_elsewhere = |outlet: &&Arc<RemoteGroup>| outlet.is_elsewhere(to);
        match self.outlet.as_ref().filter(is_elsewhere) {
            Some(outlet) => outlet.sent(to, tag, &post.print, &part),
            None => self.engine.rendezvous.send(self.key, to, P2pMessage { from, tag, print: post.print, part })?,
        }
        Ok(Box::new(SendRequest))
    }

    fn receive(
        &self,
        post: CallContext,
        from: Option<usize>,
        tag: u32,
        _metas: Option<Vec<TensorMeta>>,
    ) -> PostResult<ReceivedTensors> {
        let claim = self.engine.rendezvous.receive(self.key, self.member.group.rank(), from, tag, post.print)?;
        Ok(Box::new(RecvRequest::new(self.engine.clone(), claim, self.member.clone())))
    }

    /// Every rank reads the operands in place. Of large tensors, each rank reduces a part for all.
    fn all_reduce(
        &self,
        post: CallContext,
        tensors: Vec<DispatchTensor>,
        op: ReduceOp,
    ) -> PostResult<Vec<DispatchTensor>> {
        if let Some(outlet) = &self.outlet
            && self.has_two_phases(outlet, post.print.bytes())
        {
            return self.all_reduce_in_two_phases(outlet, post, tensors, op);
        }
        let count = tensors.len();
        let deposit = Contribution::new(tensors);
        let shares = self.shares(&deposit, RecipientData::Full);
        self.join(post, deposit, shares, move |exchange| {
            (0..count).map(|index| exchange.reduce_full(index, op)).collect()
        })
    }

    /// Copies each element once.
    fn shard_dim_all_to_all(
        &self,
        post: CallContext,
        shard: ShardedTensor,
        to_dim: usize,
        to_sizes: ShardSizes,
    ) -> PostResult<DispatchTensor> {
        let (ranks, rank) = (self.member.group.size(), self.member.group.rank());
        let ShardedTensor { tensor, dim, sizes } = shard;
        let mut shape = tensor.shape();
        let (deposit, shardings) = (Contribution::new(vec![tensor]), [(to_dim, to_sizes)]);
        let shares = self.shares(&deposit, RecipientData::Parts(&shardings));
        let [(to_dim, to_sizes)] = shardings;
        let lengths: Vec<_> = (0..ranks).map(|rank| sizes.range(ranks, rank).len()).collect();
        (shape[dim], shape[to_dim]) = (lengths.iter().sum(), to_sizes.range(ranks, rank).len());
        let (tensor, range) = (deposit.tensors[0].clone(), to_sizes.range(ranks, rank));
        let like = tensor.clone();
        let part = move || contribution::part(&tensor, to_dim, range);
        let own = self.placed(shape, &like, dim, &lengths, part);
        self.join_with(post, deposit, shares, own, move |exchange| exchange.recut(dim, to_dim, &to_sizes))
    }

    /// Every rank reads its rows in place.
    fn all_to_all_v(
        &self,
        post: CallContext,
        tensor: DispatchTensor,
        given: &[usize],
        taken: &[usize],
    ) -> PostResult<DispatchTensor> {
        let deposit = Contribution::addressed(rows_for_each(&tensor, given));
        let shares = self.shares(&deposit, RecipientData::Addressed);
        let mut shape = tensor.shape();
        shape[0] = taken.iter().sum();
        let part = deposit.parts_for(self.member.group.rank())[0].clone();
        let own = self.placed(shape, &tensor, 0, taken, move || part);
        self.join_with(post, deposit, shares, own, |exchange| exchange.rows())
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
        let deposit = Contribution::new(tensors);
        let shares = self.shares(&deposit, RecipientData::Parts(&shardings));
        self.join(post, deposit, shares, move |exchange| {
            let part = |(index, (dim, sizes)): (usize, &(usize, ShardSizes))| exchange.part(index, root, *dim, sizes);
            shardings.iter().enumerate().map(part).collect()
        })
    }
}
