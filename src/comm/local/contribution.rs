//! [`Contribution`]: what a rank contributes to a collective; and [`CollectiveInputs`]: the operations that build a
//! rank's result from all contributions.

use std::cell::Cell;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use burn::backend::{DispatchTensor, TensorMetadata};
use burn::tensor::Device;
#[cfg(feature = "cube")]
use burn_cubecl::tensor::CubeTensor;

use super::HostBackend;
#[cfg(feature = "flex")]
use super::host;
use super::match_table::OpHandle;
use crate::comm::backend::ranges::{Ranges, full, slice};
use crate::comm::process::result_buffer::ResultBuffer;
use crate::comm::transport::SendStamp;
use crate::comm::{CollectivePlan, ReduceOp, TransferTiming, backend};
use crate::placement::ShardSizes;

/// Source of a contribution, which determines who owns its memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ContributionSource {
    /// A rank of this process.
    Local,
    /// A rank of another process; several local ranks share the data.
    RemoteShared,
    /// A rank of another process; the data is for one local rank, which owns the memory.
    RemoteExclusive,
}

/// Time at which a contribution arrived.
#[derive(Debug, Clone, Copy)]
struct Arrival {
    /// Time at which its bytes were announced, if it is from another process.
    begun: Option<Instant>,
    /// Time at which it was complete.
    there: Instant,
}

/// Contribution of one rank to a collective.
#[derive(Debug)]
pub(crate) struct Contribution {
    pub tensors: Vec<DispatchTensor>,
    /// Group rank that each tensor is for, ascending. Set for an all-to-all of lists, and for remote data that
    /// differs between the local ranks; empty otherwise.
    addressees: Vec<usize>,
    /// Plan of an all-gather.
    plan: Option<Arc<CollectivePlan>>,
    origin: ContributionSource,
    /// Result buffer that has the data, if it was received or written there instead of into `tensors`.
    result_buffer: Option<Arc<ResultBuffer>>,
    /// Time of arrival, if there are several processes.
    came: Option<Arrival>,
    /// All tensors packed into one buffer, in addition to `tensors`.
    #[cfg(feature = "cube")]
    pub flat: Option<CubeTensor>,
    /// Cache of the collective; only that of the first member is used.
    #[cfg(feature = "flex")]
    shared: host::CollectiveCache,
}

impl Contribution {
    /// Creates a contribution of references to `tensors`. Copies only tensors that peers cannot read in place.
    pub fn new(tensors: Vec<DispatchTensor>) -> Self {
        #[cfg(feature = "flex")]
        let tensors: Vec<_> = tensors.into_iter().map(host::settle).collect();
        #[cfg(feature = "cube")]
        let tensors = tensors.into_iter().map(crate::memory::cube::ensure_persistent).collect();
        Self {
            tensors,
            addressees: Vec::new(),
            plan: None,
            origin: ContributionSource::Local,
            result_buffer: None,
            came: None,
            #[cfg(feature = "cube")]
            flat: None,
            #[cfg(feature = "flex")]
            shared: host::CollectiveCache::default(),
        }
    }

    /// Creates a contribution of this rank's shards to an all-gather.
    pub fn planned(parts: Vec<DispatchTensor>, plan: Arc<CollectivePlan>) -> Self {
        Self { plan: Some(plan), ..Self::new(parts) }
    }

    /// Creates a contribution of separate tensors for each member: `parts[i]` is for group rank `i`.
    pub fn addressed(parts: Vec<Vec<DispatchTensor>>) -> Self {
        let parts = parts.into_iter().enumerate();
        let (addressees, tensors) = parts.flat_map(|(member, part)| part.into_iter().map(move |t| (member, t))).unzip();
        Self { addressees, ..Self::new(tensors) }
    }

    /// Creates the contribution of a rank of another process from received tensors. They are for all local ranks,
    /// or, if `addressees` is not empty, for these members.
    pub fn landed(addressees: Vec<usize>, tensors: Vec<DispatchTensor>) -> Self {
        let origin =
            if addressees.is_empty() { ContributionSource::RemoteShared } else { ContributionSource::RemoteExclusive };
        Self { addressees, origin, ..Self::new(tensors) }
    }

    /// Creates a contribution whose data is in the result buffer of the only local rank.
    pub fn of_result_buffer(full_tensors: Arc<ResultBuffer>) -> Self {
        Self { result_buffer: Some(full_tensors), ..Self::landed(Vec::new(), Vec::new()) }
    }

    /// Marks received data as owned by the only local rank of the group.
    pub fn for_one(self) -> Self {
        Self { origin: ContributionSource::RemoteExclusive, ..self }
    }

    /// Sets the time of arrival to now. `begun` is the time at which the bytes were announced, if they are from
    /// another process.
    pub fn there(self, begun: Option<Instant>) -> Self {
        Self { came: Some(Arrival { begun, there: Instant::now() }), ..self }
    }

    /// Returns the timing of the transfer, if some contributions are from other processes. `taken` records when
    /// this process sent its own.
    pub fn carried(deposits: &[Self], taken: Option<&SendStamp>) -> Option<TransferTiming> {
        let came = deposits.iter().filter_map(|deposit| deposit.came);
        let begun = came.clone().filter_map(|came| came.begun).min()?;
        let complete = came.map(|came| came.there).max()?;
        Some(TransferTiming { taken: taken.and_then(SendStamp::at), begun, complete })
    }

    /// Returns tensor `index` as `Ok` if the sender has already sliced out the shard of `member`, and the full
    /// tensor as `Err` otherwise.
    fn shard_for(&self, member: usize, index: usize) -> Result<&DispatchTensor, &DispatchTensor> {
        if self.addressees.is_empty() { Err(&self.tensors[index]) } else { Ok(&self.parts_for(member)[index]) }
    }

    /// Returns the tensors that the result of `member` is built from.
    fn for_result(&self, member: usize) -> &[DispatchTensor] {
        if self.addressees.is_empty() { &self.tensors } else { self.parts_for(member) }
    }

    /// Returns the tensors that are addressed to `member`.
    pub fn parts_for(&self, member: usize) -> &[DispatchTensor] {
        let before = |end: usize| self.addressees.partition_point(|addressee| *addressee < end);
        &self.tensors[before(member)..before(member + 1)]
    }
}

/// Contributions of a complete collective, as one rank uses them.
#[derive(Debug)]
pub(super) struct CollectiveInputs<'a> {
    pub deposits: &'a [Contribution],
    pub engine: &'a HostBackend,
    /// Handle of this rank.
    pub ticket: OpHandle,
    /// Device for tensors without a local counterpart.
    pub device: &'a Device,
    /// Result buffer that already has this rank's own shards.
    pub result_buffer: Option<&'a ResultBuffer>,
    /// Time that the rank has waited for others that build its result with it.
    pub waited: Cell<Duration>,
}

impl<'a> CollectiveInputs<'a> {
    pub fn new(deposits: &'a [Contribution], engine: &'a HostBackend, ticket: OpHandle, device: &'a Device) -> Self {
        Self { deposits, engine, ticket, device, result_buffer: None, waited: Cell::default() }
    }

    /// Returns the results if some remote data was received in place: copies the missing contributions into the
    /// result buffer and takes it.
    pub fn landed(&self) -> Option<Vec<DispatchTensor>> {
        if !self.are_some_elsewhere() {
            return None;
        }
        let in_deposits = || self.deposits.iter().find_map(|deposit| deposit.result_buffer.as_deref());
        let full_tensors = self.result_buffer.or_else(in_deposits)?;
        self.land(full_tensors);
        // SAFETY: all contributions are in the buffer now.
        Some(unsafe { full_tensors.take(self.device) })
    }

    /// Returns true if ranks of the world are in other processes. If not, there is no need to search the
    /// contributions for remote data.
    fn are_some_elsewhere(&self) -> bool {
        self.engine.others.is_some()
    }

    /// Returns the owner of a result that is identical on all ranks, if several of them are local and may share it.
    #[cfg(feature = "flex")]
    fn owner(&self, keep: host::ResultRetention) -> Option<host::Owner<'_>> {
        let shelf = self.engine.shelf.as_ref()?;
        let here = self.deposits.iter().filter(|deposit| deposit.origin == ContributionSource::Local);
        (here.take(2).count() == 2).then(|| self.deposits[0].shared.owner(shelf, self.ticket, keep, &self.waited))
    }

    /// Copies all contributions into `full_tensors` that are not there yet.
    pub fn land(&self, full_tensors: &ResultBuffer) {
        for (member, deposit) in self.deposits.iter().enumerate() {
            let is_there =
                deposit.result_buffer.is_some() || (member == self.ticket.member && self.result_buffer.is_some());
            if !is_there {
                // SAFETY: the contributions are complete, and the tensors of this one are in this process.
                unsafe { full_tensors.put(member, deposit.for_result(self.ticket.member), || ()) };
            }
        }
    }

    /// Like [`landed`](Self::landed), for one tensor.
    fn landed_one(&self) -> Option<DispatchTensor> {
        self.landed().map(|mut full_tensors| full_tensors.pop().expect("the result buffer has one tensor"))
    }

    /// Returns the full tensors of an all-gather, built from the shards of all ranks.
    pub fn gather(&self, plan: &CollectivePlan) -> Vec<DispatchTensor> {
        #[cfg(feature = "flex")]
        {
            let first = &self.deposits[0];
            let joints = || host::GatherCopyPlan::new(plan, self.deposits.len());
            // One rank keeps it for all, because its size is proportional to the number of ranks.
            let joints = first.plan.as_deref().unwrap_or(plan).kept(joints);
            let parts = |deposit: &'a Contribution| deposit.tensors.iter().map(host::primitive).collect();
            let parts = first.shared.gathered(joints, || self.deposits.iter().map(parts).collect());
            if let Some(parts) = parts {
                return joints.full_tensors(parts, self.owner(host::ResultRetention::Latest));
            }
        }
        let unsplit = |(index, (dim, _)): (usize, &(usize, ShardSizes))| {
            concat(self.sources(index, |tensor| full(&tensor.shape()[..])), *dim, &self.home(index))
        };
        plan.shardings().iter().enumerate().map(unsplit).collect()
    }

    /// Returns `count` one-dimensional tensors, each concatenated from the tensors of all ranks.
    pub fn joined(&self, count: usize) -> Vec<DispatchTensor> {
        let unsplit = |index| concat(self.sources(index, |tensor| full(&tensor.shape()[..])), 0, self.device);
        self.landed().unwrap_or_else(|| (0..count).map(unsplit).collect())
    }

    /// Changes the sharding of tensor 0 from `dim` to `to_dim`, and returns this rank's shard along `to_dim`.
    pub fn recut(&self, dim: usize, to_dim: usize, to_sizes: &ShardSizes) -> DispatchTensor {
        let blocks = self.deposits.iter().map(|deposit| self.shard_of(deposit, 0, to_dim, to_sizes));
        self.landed_one().unwrap_or_else(|| concat(blocks.collect(), dim, &self.home(0)))
    }

    /// Returns the tensors of `root`.
    pub fn of_root(&self, root: usize) -> Vec<DispatchTensor> {
        let root = &self.deposits[root];
        root.tensors.iter().map(|tensor| self.own(root, tensor)).collect()
    }

    /// Returns the tensors that each rank has addressed to this one. `own` are those of this rank itself.
    pub fn addressed(&self, mut own: Vec<DispatchTensor>) -> Vec<Vec<DispatchTensor>> {
        let parts = |(member, deposit): (usize, &Contribution)| match member == self.ticket.member {
            true => std::mem::take(&mut own),
            false => deposit.parts_for(self.ticket.member).iter().map(|tensor| self.own(deposit, tensor)).collect(),
        };
        self.deposits.iter().enumerate().map(parts).collect()
    }

    /// Returns the rows that all ranks have addressed to this one, concatenated in group order.
    pub fn rows(&self) -> DispatchTensor {
        let rows = self.deposits.iter().flat_map(|deposit| deposit.parts_for(self.ticket.member));
        let rows = rows.map(|tensor| (tensor, full(&tensor.shape()[..])));
        self.landed_one().unwrap_or_else(|| concat(rows.collect(), 0, self.device))
    }

    /// Returns a tensor of `deposit` for this rank's result. It is not copied if no other rank has it, or if it may
    /// be shared and keeps no other memory alive.
    fn own(&self, deposit: &Contribution, tensor: &DispatchTensor) -> DispatchTensor {
        #[cfg(feature = "flex")]
        let is_shared = self.engine.shelf.is_some() && host::is_alone(tensor);
        #[cfg(not(feature = "flex"))]
        let is_shared = false;
        if (deposit.origin == ContributionSource::RemoteExclusive || is_shared)
            && tensor.device() == *self.device.as_dispatch()
        {
            return tensor.clone();
        }
        concat(vec![(tensor, full(&tensor.shape()[..]))], 0, self.device)
    }

    /// Returns this rank's shard, along `dim`, of tensor `index` of `root`.
    pub fn part(&self, index: usize, root: usize, dim: usize, unsplit: &ShardSizes) -> DispatchTensor {
        let root = &self.deposits[root];
        match root.shard_for(self.ticket.member, index) {
            Ok(part) => self.own(root, part),
            Err(_) => concat(vec![self.shard_of(root, index, dim, unsplit)], 0, &self.home(index)),
        }
    }

    /// Returns a tensor of a contribution and the ranges in it that are this rank's shard, along `dim`, of tensor
    /// `index`.
    fn shard_of<'b>(
        &self,
        deposit: &'b Contribution,
        index: usize,
        dim: usize,
        unsplit: &ShardSizes,
    ) -> (&'b DispatchTensor, Ranges) {
        match deposit.shard_for(self.ticket.member, index) {
            Ok(part) => (part, full(&part.shape()[..])),
            Err(tensor) => (tensor, slice(&tensor.shape()[..], dim, self.mine(unsplit))),
        }
    }

    /// Returns this rank's shard, along `dim`, of the reduction of tensor `index`.
    pub fn reduce_part(&self, index: usize, dim: usize, unsplit: &ShardSizes, op: ReduceOp) -> DispatchTensor {
        if self.are_some_elsewhere() && self.deposits.iter().any(|deposit| !deposit.addressees.is_empty()) {
            return self.reduce_shard(index, dim, unsplit, op);
        }
        let shape = self.deposits[0].tensors[index].shape();
        self.reduce(index, &slice(&shape[..], dim, self.mine(unsplit)), op)
    }

    /// Like [`reduce_part`](Self::reduce_part), if ranks of other processes have sent only this rank's shards.
    fn reduce_shard(&self, index: usize, dim: usize, unsplit: &ShardSizes, op: ReduceOp) -> DispatchTensor {
        let terms = self.operands_of_shard(index, dim, unsplit);
        let ranges = full(&terms[0].shape()[..]);
        #[cfg(feature = "flex")]
        if has_kernel(op)
            && let Some(terms) = host::ReduceOperands::of(&terms)
        {
            return terms.reduce(&ranges, op);
        }
        backend::reduce(&terms.iter().collect::<Vec<_>>(), &ranges, op, &self.home(index))
    }

    /// Returns the operands of a reduce-scatter: this rank's shard of tensor `index` of every rank.
    fn operands_of_shard(&self, index: usize, dim: usize, unsplit: &ShardSizes) -> Vec<DispatchTensor> {
        let term = |deposit: &Contribution| match deposit.shard_for(self.ticket.member, index) {
            Ok(part) => part.clone(),
            Err(tensor) => part(tensor, dim, self.mine(unsplit)),
        };
        self.deposits.iter().map(term).collect()
    }

    /// Reduces all tensors and writes this rank's shards to the region of `member` in `full_tensors`. Returns
    /// false, and writes nothing, if the tensors are not Flex tensors or the operation has no kernel.
    ///
    /// # Safety
    /// No other thread may read or write the region during the call. The shards must have the length of the region.
    pub unsafe fn reduce_into(
        &self,
        full_tensors: &ResultBuffer,
        member: usize,
        shardings: &[(usize, ShardSizes)],
        op: ReduceOp,
    ) -> bool {
        #[cfg(feature = "flex")]
        if has_kernel(op) {
            let terms = |(index, (dim, sizes)): (usize, &(usize, ShardSizes))| {
                host::ReduceOperands::of(&self.operands_of_shard(index, *dim, sizes))
            };
            if let Some(terms) = shardings.iter().enumerate().map(terms).collect::<Option<Vec<_>>>() {
                for (terms, at) in terms.iter().zip(full_tensors.starts(member)) {
                    // SAFETY: the caller guarantees it.
                    unsafe { terms.reduce_into(op, at) };
                }
                return true;
            }
        }
        let _ = (full_tensors, member, shardings, op);
        false
    }

    /// Returns the reduction of tensor `index`.
    pub fn reduce_full(&self, index: usize, op: ReduceOp) -> DispatchTensor {
        #[cfg(feature = "flex")]
        if has_kernel(op)
            && let Some(terms) = self.terms(index)
        {
            return terms.reduce_full(op, self.owner(host::ResultRetention::All));
        }
        self.reduce(index, &full(&self.deposits[0].tensors[index].shape()[..]), op)
    }

    fn reduce(&self, index: usize, ranges: &Ranges, op: ReduceOp) -> DispatchTensor {
        #[cfg(feature = "flex")]
        if has_kernel(op)
            && let Some(terms) = self.terms(index)
        {
            return terms.reduce(ranges, op);
        }
        let sources: Vec<_> = self.deposits.iter().map(|deposit| &deposit.tensors[index]).collect();
        backend::reduce(&sources, ranges, op, &self.home(index))
    }

    /// Returns tensor `index` of every rank, if all are Flex tensors.
    #[cfg(feature = "flex")]
    fn terms(&self, index: usize) -> Option<&'a host::ReduceOperands> {
        let terms = || self.deposits.iter().map(|deposit| host::primitive(&deposit.tensors[index])).collect();
        self.deposits[0].shared.terms((index, self.deposits[0].tensors.len()), terms)
    }

    fn sources(&self, index: usize, ranges: impl Fn(&DispatchTensor) -> Ranges) -> Vec<(&DispatchTensor, Ranges)> {
        let tensors = self.deposits.iter().map(|deposit| &deposit.tensors[index]);
        tensors.map(|tensor| (tensor, ranges(tensor))).collect()
    }

    /// Returns the interval of this rank's shard.
    fn mine(&self, unsplit: &ShardSizes) -> Range<usize> {
        unsplit.range(self.deposits.len(), self.ticket.member)
    }

    /// Returns the device of this rank's tensor `index`.
    fn home(&self, index: usize) -> Device {
        let own = self.deposits[self.ticket.member].tensors.get(index);
        own.map_or_else(|| self.device.clone(), |tensor| Device::new(tensor.device()))
    }
}

/// Returns true if the reduction has a kernel; the others use burn's operations.
pub(super) fn has_kernel(op: ReduceOp) -> bool {
    !matches!(op, ReduceOp::BitAnd | ReduceOp::BitOr | ReduceOp::BitXor | ReduceOp::PremulSum(_))
}

/// Returns the slice `range` of `tensor` along `dim`. It is a view if its elements are adjacent, and a copy
/// otherwise.
pub(super) fn part(tensor: &DispatchTensor, dim: usize, range: Range<usize>) -> DispatchTensor {
    #[cfg(feature = "flex")]
    if let Some(part) = host::adjacent(tensor, dim, range.clone()) {
        return part;
    }
    concat(vec![(tensor, slice(&tensor.shape()[..], dim, range))], 0, &Device::new(tensor.device()))
}

fn concat(sources: Vec<(&DispatchTensor, Ranges)>, dim: usize, device: &Device) -> DispatchTensor {
    #[cfg(feature = "flex")]
    {
        let host = sources[0].0.device();
        let primitives = sources.iter().map(|(tensor, ranges)| Some((host::primitive(tensor)?, ranges.clone())));
        // Received data is on the host, whatever the rank's device is.
        if let Some(sources) = primitives.collect::<Option<Vec<_>>>()
            && host == *device.as_dispatch()
        {
            return host::concat(&sources, dim);
        }
    }
    backend::concat(&sources, dim, device)
}
