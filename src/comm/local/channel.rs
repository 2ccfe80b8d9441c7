//! [`HostGroupBackend`]: the collectives of a group, as one of the ranks of this process calls them.

use std::sync::Arc;

use burn::backend::{DispatchTensor, TensorMetadata};
use burn::tensor::{Device, Shape};
use parking_lot::Mutex;

use super::HostBackend;
use super::completion_thread;
#[cfg(feature = "cube")]
use super::contribution::has_kernel;
use super::contribution::{self, CollectiveInputs, Contribution};
#[cfg(feature = "cube")]
use super::device::CoalescedCopies;
use super::match_table::{GroupKey, P2pMessage};
use super::remote_group::{DataMode, OutgoingData, RecipientData, RemoteGroup};
use super::requests::{CollectiveRequest, OpHandleGuard, OwnShards, RecvRequest, SendRequest};
use super::shared_request::Left;
use super::two_phase_all_reduce;
use crate::comm::backend::{CallContext, GroupBackend, GroupMember, PostResult, ReceivedTensors, rows_for_each};
use crate::comm::process::contiguous_layout::ContiguousLayout;
use crate::comm::{CollectivePlan, ReduceOp, ShardedTensor, TensorMeta};
use crate::memory;
use crate::placement::ShardSizes;

/// One thread rank's place in one group.
#[derive(Debug)]
pub(super) struct HostGroupBackend {
    pub engine: Arc<HostBackend>,
    pub member: GroupMember,
    pub key: GroupKey,
    name: &'static str,
    /// If some of the group are in other processes.
    outlet: Option<Arc<RemoteGroup>>,
    /// Where second halves of all-reduces are called, once there was one.
    pub second: Mutex<Option<(GroupKey, Arc<RemoteGroup>)>>,
}

impl HostGroupBackend {
    pub fn new(engine: Arc<HostBackend>, member: GroupMember, name: &'static str) -> Self {
        let key = engine.rendezvous.group(member.group.ranks(), name);
        let outlet =
            engine.others.as_ref().and_then(|others| RemoteGroup::new(others, &member, name.into())).map(Arc::new);
        Self { engine, member, key, name, outlet, second: Mutex::default() }
    }

    /// The place in the same group where second halves are called.
    pub fn second_halves(&self) -> (GroupKey, Arc<RemoteGroup>) {
        // No program names a channel so.
        let name = format!("{}\0second halves", self.name);
        let key = self.engine.rendezvous.group(self.member.group.ranks(), name.clone());
        let others = self.engine.others.as_ref().expect("there are halves among processes");
        let outlet = RemoteGroup::new(others, &self.member, name).expect("some of the group are in other processes");
        (key, Arc::new(outlet))
    }

    /// Notes where a deposit is.
    pub fn note(&self, deposit: &Contribution) {
        if let Some(tensor) = deposit.tensors.first() {
            self.member.ledger.ran_on(tensor.device());
        }
    }

    /// Joins the next collective of the group, whose ranks in other processes get `shares` of the deposit.
    fn join<T: Send + 'static>(
        &self,
        post: CallContext,
        deposit: Contribution,
        shares: Option<OutgoingData>,
        finish: impl FnOnce(&CollectiveInputs) -> T + Send + 'static,
    ) -> PostResult<T> {
        self.join_with(post, deposit, shares, None, finish)
    }

    /// The same where what others send may land in the results, of which this rank has its `own` parts.
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
        let is_open = !post.is_deferred && self.is_worth_hands(post.print.bytes(), &device);
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
        Ok(if is_open { Box::new(Left(self.engine.leave_open(ticket, joined))) } else { joined })
    }

    /// Whether what others send may land in results of so many `bytes`.
    fn lands(&self, bytes: u64) -> bool {
        self.outlet.as_ref().is_some_and(|outlet| outlet.lands(bytes))
    }

    /// This rank's `part` of a result that is where `like` is, in its element type, and of which ranks have so many
    /// indices of `dim`, if what others send may land there.
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

    /// Whether a result of so many `bytes` on `device` is made by whoever comes first, this rank or the engine's hands.
    pub fn is_worth_hands(&self, bytes: u64, device: &Device) -> bool {
        self.outlet.is_some() && bytes >= completion_thread::WORTH && memory::is_host(device)
    }

    /// What other processes need of a deposit, if there are any.
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
        if let Some(outlet) = self.outlet.as_ref().filter(|outlet| outlet.has_common_memory())
            && self.gathers_in_common(&post.print)
        {
            return self.all_gather_in_common(outlet, post, parts);
        }
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

    /// Every rank reads the terms where they are; of large ones each reduces a share for all.
    fn all_reduce(
        &self,
        post: CallContext,
        tensors: Vec<DispatchTensor>,
        op: ReduceOp,
    ) -> PostResult<Vec<DispatchTensor>> {
        if let Some(outlet) = &self.outlet
            && two_phase_all_reduce::pay(post.print.bytes(), self.member.group.size(), outlet.processes())
        {
            return self.all_reduce_in_halves(outlet, post, tensors, op);
        }
        let count = tensors.len();
        let deposit = Contribution::new(tensors);
        let shares = self.shares(&deposit, RecipientData::Full);
        self.join(post, deposit, shares, move |exchange| {
            (0..count).map(|index| exchange.reduce_full(index, op)).collect()
        })
    }

    /// In one pass.
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

    /// Every rank reads its rows where they are.
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

    /// Every rank reads its parts where they are.
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
