//! What each collective does with the deposits, once all are there.

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
use crate::comm::process::header::SharedMemoryMessage;
use crate::comm::process::result_buffer::ResultBuffer;
use crate::comm::transport::SendStamp;
use crate::comm::{CollectivePlan, ReduceOp, TransferTiming, backend};
use crate::placement::ShardSizes;

/// Where a deposit comes from, which says whose its memory is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ContributionSource {
    /// A rank of this process.
    Local,
    /// A rank of another one, for several of this.
    RemoteShared,
    /// A rank of another one, for one of this: that may have the memory.
    RemoteExclusive,
}

/// When a deposit came.
#[derive(Debug, Clone, Copy)]
struct Arrival {
    /// From another process: its bytes were announced.
    begun: Option<Instant>,
    /// It was there.
    there: Instant,
}

/// What one rank brings to a collective.
#[derive(Debug)]
pub(crate) struct Contribution {
    pub tensors: Vec<DispatchTensor>,
    /// Of an all-to-all of lists, and of what came from another process for each rank of this one: the member that each
    /// tensor is for, ascending.
    addressees: Vec<usize>,
    /// Of an all-gather.
    plan: Option<Arc<CollectivePlan>>,
    origin: ContributionSource,
    /// The results in which this is, if it is there and not in `tensors`.
    result_buffer: Option<Arc<ResultBuffer>>,
    pub common: Option<SharedMemoryMessage>,
    /// Of ranks in several processes.
    came: Option<Arrival>,
    /// All tensors in one buffer, beside themselves.
    #[cfg(feature = "cube")]
    pub flat: Option<CubeTensor>,
    /// The first member's is used.
    #[cfg(feature = "flex")]
    shared: host::CollectiveCache,
}

impl Contribution {
    /// A deposit of references to `tensors`; copies only those that peers cannot read in place.
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
            common: None,
            came: None,
            #[cfg(feature = "cube")]
            flat: None,
            #[cfg(feature = "flex")]
            shared: host::CollectiveCache::default(),
        }
    }

    /// A deposit of this rank's parts.
    pub fn planned(parts: Vec<DispatchTensor>, plan: Arc<CollectivePlan>) -> Self {
        Self { plan: Some(plan), ..Self::new(parts) }
    }

    /// A deposit of what there is for each member.
    pub fn addressed(parts: Vec<Vec<DispatchTensor>>) -> Self {
        let parts = parts.into_iter().enumerate();
        let (addressees, tensors) = parts.flat_map(|(member, part)| part.into_iter().map(move |t| (member, t))).unzip();
        Self { addressees, ..Self::new(tensors) }
    }

    /// What has come from a rank of another process: all of it, or the parts of these members.
    pub fn landed(addressees: Vec<usize>, tensors: Vec<DispatchTensor>) -> Self {
        let origin =
            if addressees.is_empty() { ContributionSource::RemoteShared } else { ContributionSource::RemoteExclusive };
        Self { addressees, origin, ..Self::new(tensors) }
    }

    /// What is in what the only rank here gets.
    pub fn of_result_buffer(full_tensors: Arc<ResultBuffer>) -> Self {
        Self { result_buffer: Some(full_tensors), ..Self::landed(Vec::new(), Vec::new()) }
    }

    /// What has come from another process for a rank that is the only one here.
    pub fn for_one(self) -> Self {
        Self { origin: ContributionSource::RemoteExclusive, ..self }
    }

    /// This deposit, and what its rank says of a result in common.
    pub fn saying(self, common: Option<SharedMemoryMessage>) -> Self {
        Self { common, ..self }
    }

    /// This deposit, there from now on; its bytes have `begun` to come from another process.
    pub fn there(self, begun: Option<Instant>) -> Self {
        Self { came: Some(Arrival { begun, there: Instant::now() }), ..self }
    }

    /// When these have come, if some were from other processes, of which this one's thread has `taken` up the call.
    pub fn carried(deposits: &[Self], taken: Option<&SendStamp>) -> Option<TransferTiming> {
        let came = deposits.iter().filter_map(|deposit| deposit.came);
        let begun = came.clone().filter_map(|came| came.begun).min()?;
        let complete = came.map(|came| came.there).max()?;
        Some(TransferTiming { taken: taken.and_then(SendStamp::at), begun, complete })
    }

    /// Tensor `index` of a rank that cuts wholes: `Ok` if it is this one's part already, and nothing else came.
    fn shard_for(&self, member: usize, index: usize) -> Result<&DispatchTensor, &DispatchTensor> {
        if self.addressees.is_empty() { Err(&self.tensors[index]) } else { Ok(&self.parts_for(member)[index]) }
    }

    /// What there is for the results of `member`.
    fn for_result(&self, member: usize) -> &[DispatchTensor] {
        if self.addressees.is_empty() { &self.tensors } else { self.parts_for(member) }
    }

    /// What there is for `member`.
    pub fn parts_for(&self, member: usize) -> &[DispatchTensor] {
        let before = |end: usize| self.addressees.partition_point(|addressee| *addressee < end);
        &self.tensors[before(member)..before(member + 1)]
    }
}

/// The deposits of a complete collective, seen from one rank.
#[derive(Debug)]
pub(super) struct CollectiveInputs<'a> {
    pub deposits: &'a [Contribution],
    pub engine: &'a HostBackend,
    /// The rank's.
    pub ticket: OpHandle,
    /// Where a tensor goes that the rank has no counterpart of.
    pub device: &'a Device,
    /// Results in which this rank's own parts are.
    pub result_buffer: Option<&'a ResultBuffer>,
    /// How long the rank has waited for others that make its result with it.
    pub waited: Cell<Duration>,
}

impl<'a> CollectiveInputs<'a> {
    pub fn new(deposits: &'a [Contribution], engine: &'a HostBackend, ticket: OpHandle, device: &'a Device) -> Self {
        Self { deposits, engine, ticket, device, result_buffer: None, waited: Cell::default() }
    }

    /// What has come from other processes in its place, with what is not there yet.
    pub fn landed(&self) -> Option<Vec<DispatchTensor>> {
        if !self.are_some_elsewhere() {
            return None;
        }
        let in_deposits = || self.deposits.iter().find_map(|deposit| deposit.result_buffer.as_deref());
        let full_tensors = self.result_buffer.or_else(in_deposits)?;
        self.land(full_tensors);
        // SAFETY: all are there now.
        Some(unsafe { full_tensors.take(self.device) })
    }

    /// Whether ranks of the world are in other processes. Where they are not, nobody looks at every deposit for what may have
    /// come from there.
    fn are_some_elsewhere(&self) -> bool {
        self.engine.others.is_some()
    }

    /// Where a result belongs that all ranks get alike, if several of them are here.
    #[cfg(feature = "flex")]
    fn owner(&self, keep: host::ResultRetention) -> Option<host::Owner<'_>> {
        let shelf = self.engine.shelf.as_ref()?;
        let here = self.deposits.iter().filter(|deposit| deposit.origin == ContributionSource::Local);
        (here.take(2).count() == 2).then(|| self.deposits[0].shared.owner(shelf, self.ticket, keep, &self.waited))
    }

    /// Has all be in `wholes`, in which some may have landed.
    pub fn land(&self, full_tensors: &ResultBuffer) {
        if full_tensors.are_common() {
            // Every rank has put its own.
            return;
        }
        for (member, deposit) in self.deposits.iter().enumerate() {
            let is_there =
                deposit.result_buffer.is_some() || (member == self.ticket.member && self.result_buffer.is_some());
            if !is_there {
                // SAFETY: the deposits are complete, and this one's tensors are here.
                unsafe { full_tensors.put(member, deposit.for_result(self.ticket.member), || ()) };
            }
        }
    }

    /// [`landed`](Self::landed), of one tensor.
    fn landed_one(&self) -> Option<DispatchTensor> {
        self.landed().map(|mut full_tensors| full_tensors.pop().expect("a whole"))
    }

    /// Every tensor, whole, from the parts that all ranks have.
    pub fn gather(&self, plan: &CollectivePlan) -> Vec<DispatchTensor> {
        #[cfg(feature = "flex")]
        {
            let first = &self.deposits[0];
            let joints = || host::GatherCopyPlan::new(plan, self.deposits.len());
            // One rank's for all: it grows with their number.
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

    /// As many tensors, whole, of which every rank has a row.
    pub fn joined(&self, count: usize) -> Vec<DispatchTensor> {
        let unsplit = |index| concat(self.sources(index, |tensor| full(&tensor.shape()[..])), 0, self.device);
        self.landed().unwrap_or_else(|| (0..count).map(unsplit).collect())
    }

    /// This rank's part, along `to_dim`, of tensor 0 of all ranks, one after another along `dim`.
    pub fn recut(&self, dim: usize, to_dim: usize, to_sizes: &ShardSizes) -> DispatchTensor {
        let blocks = self.deposits.iter().map(|deposit| self.shard_of(deposit, 0, to_dim, to_sizes));
        self.landed_one().unwrap_or_else(|| concat(blocks.collect(), dim, &self.home(0)))
    }

    /// The tensors of `root`.
    pub fn of_root(&self, root: usize) -> Vec<DispatchTensor> {
        let root = &self.deposits[root];
        root.tensors.iter().map(|tensor| self.own(root, tensor)).collect()
    }

    /// What each rank has for this one; `own` of its own.
    pub fn addressed(&self, mut own: Vec<DispatchTensor>) -> Vec<Vec<DispatchTensor>> {
        let parts = |(member, deposit): (usize, &Contribution)| match member == self.ticket.member {
            true => std::mem::take(&mut own),
            false => deposit.parts_for(self.ticket.member).iter().map(|tensor| self.own(deposit, tensor)).collect(),
        };
        self.deposits.iter().enumerate().map(parts).collect()
    }

    /// What each rank has for this one, one after another.
    pub fn rows(&self) -> DispatchTensor {
        let rows = self.deposits.iter().flat_map(|deposit| deposit.parts_for(self.ticket.member));
        let rows = rows.map(|tensor| (tensor, full(&tensor.shape()[..])));
        self.landed_one().unwrap_or_else(|| concat(rows.collect(), 0, self.device))
    }

    /// A tensor of `deposit`: itself, if no other rank has it, or it is all that there is in its memory; otherwise a copy.
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

    /// This rank's part, along `dim`, of tensor `index` of `root`.
    pub fn part(&self, index: usize, root: usize, dim: usize, unsplit: &ShardSizes) -> DispatchTensor {
        let root = &self.deposits[root];
        match root.shard_for(self.ticket.member, index) {
            Ok(part) => self.own(root, part),
            Err(_) => concat(vec![self.shard_of(root, index, dim, unsplit)], 0, &self.home(index)),
        }
    }

    /// Where this rank's part, along `dim`, of tensor `index` of a deposit is.
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

    /// This rank's part, along `dim`, of the reduction of tensor `index`.
    pub fn reduce_part(&self, index: usize, dim: usize, unsplit: &ShardSizes, op: ReduceOp) -> DispatchTensor {
        if self.are_some_elsewhere() && self.deposits.iter().any(|deposit| !deposit.addressees.is_empty()) {
            return self.reduce_shard(index, dim, unsplit, op);
        }
        let shape = self.deposits[0].tensors[index].shape();
        self.reduce(index, &slice(&shape[..], dim, self.mine(unsplit)), op)
    }

    /// The same where ranks of other processes have sent no more than this rank's parts.
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

    /// Its terms: this rank's part of every rank's.
    fn operands_of_shard(&self, index: usize, dim: usize, unsplit: &ShardSizes) -> Vec<DispatchTensor> {
        let term = |deposit: &Contribution| match deposit.shard_for(self.ticket.member, index) {
            Ok(part) => part.clone(),
            Err(tensor) => part(tensor, dim, self.mine(unsplit)),
        };
        self.deposits.iter().map(term).collect()
    }

    /// This rank's parts of the reductions of all tensors, cut along a dimension each, written where `wholes` have those of
    /// `member`. False where they are no Flex tensors, or there is no kernel: then nothing is.
    ///
    /// # Safety
    /// Nobody reads or writes there meanwhile. The parts are as long as there.
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
                    // SAFETY: the caller's.
                    unsafe { terms.reduce_into(op, at, full_tensors.bytes()) };
                }
                return true;
            }
        }
        let _ = (full_tensors, member, shardings, op);
        false
    }

    /// The reduction of tensor `index`.
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

    /// Tensor `index` of every rank, if they are all Flex tensors.
    #[cfg(feature = "flex")]
    fn terms(&self, index: usize) -> Option<&'a host::ReduceOperands> {
        let terms = || self.deposits.iter().map(|deposit| host::primitive(&deposit.tensors[index])).collect();
        self.deposits[0].shared.terms((index, self.deposits[0].tensors.len()), terms)
    }

    fn sources(&self, index: usize, ranges: impl Fn(&DispatchTensor) -> Ranges) -> Vec<(&DispatchTensor, Ranges)> {
        let tensors = self.deposits.iter().map(|deposit| &deposit.tensors[index]);
        tensors.map(|tensor| (tensor, ranges(tensor))).collect()
    }

    /// The interval that this rank holds.
    fn mine(&self, unsplit: &ShardSizes) -> Range<usize> {
        unsplit.range(self.deposits.len(), self.ticket.member)
    }

    /// Where tensor `index` of this rank lives.
    fn home(&self, index: usize) -> Device {
        let own = self.deposits[self.ticket.member].tensors.get(index);
        own.map_or_else(|| self.device.clone(), |tensor| Device::new(tensor.device()))
    }
}

/// Whether reductions of this kind have kernels; the others are burn's operations.
pub(super) fn has_kernel(op: ReduceOp) -> bool {
    !matches!(op, ReduceOp::BitAnd | ReduceOp::BitOr | ReduceOp::BitXor | ReduceOp::PremulSum(_))
}

/// The part of `tensor` that is `range` of `dim`: where it is, if its elements are adjacent there.
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
        // What has come from another process is on the host, whatever the rank's device.
        if let Some(sources) = primitives.collect::<Option<Vec<_>>>()
            && host == *device.as_dispatch()
        {
            return host::concat(&sources, dim);
        }
    }
    backend::concat(&sources, dim, device)
}
