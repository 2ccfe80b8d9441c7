//! [`UnshardedParams`]: owner of a unit's unsharded parameters and gradients during one forward and its backward.
//!
//! A unit's weights are unsharded in forward and a second time in backward, and its gradients until they are
//! reduced. Scopes, passes and autodiff nodes hold an `UnshardedParams` and use only the operations below. How the
//! memory is allocated, freed and restored is private to this module.
//!
//! | operation | purpose | waits for | implementation |
//! |---|---|---|---|
//! | [`new`](UnshardedParams::new) | creates the owner | | allocates nothing: the communicator allocates results |
//! | [`copy_in`](UnshardedParams::copy_in) | accepts prefetched weights | the prefetch | stores them like `gather` |
//! | [`gather`](UnshardedParams::gather) | gathers for forward | all-gather | keeps each tensor, or moves it into evictable storage |
//! | [`view`](UnshardedParams::view) | returns a weight in forward | | a handle |
//! | [`take_back`](UnshardedParams::take_back) | ends forward | | evicts storage, issues the next all-gather |
//! | [`gather_again`](UnshardedParams::gather_again), [`view_again`](UnshardedParams::view_again) | return weights in backward | that all-gather | restores storage |
//! | [`reduce_in`](UnshardedParams::reduce_in) | accepts an unsharded gradient | | keeps the tensor |
//! | [`end`](UnshardedParams::end) | ends the pass | | drops the handles |
//! | [`take_gradients`](UnshardedParams::take_gradients) | returns the gradients to reduce | all-reduce of partial gradients | drops them here |
//! | [`copy_out`](UnshardedParams::copy_out) | returns a tensor that outlives the unit | | copies it if its memory is evictable |
//!
//! Another memory layout (such as one block per unit that kernels copy shards into) would change only the
//! implementations. So would an earlier or later communication.
//!
//! # Evictable storage
//!
//! Evictable storage replaces saved-tensor hooks, which burn lacks. The autodiff graph may hold a view of a weight,
//! because an operation saved it for backward. The program may hold one too, as a weight that it keeps.
//!
//! If the graph saved a view of a gathered weight, dropping the other handles does not free the memory: burn's
//! `linear` reshapes its weight, and `nn::Embedding` keeps its own. Without gradient checkpointing, either holds
//! the complete allocation until backward. So on Flex, a gathered weight is a view of a
//! [`Storage`](slot::EvictableStorage). Evicting the storage frees the bytes under every view at once, and
//! restoring it makes them available to all views. If ranks of one process share the bytes, these are freed once
//! all of the ranks have evicted theirs. Reading a view of evicted storage restores the storage first.
//!
//! ```text
//!   weight ── reshape ── saved by matmul        forward: full     after: empty     backward: full
//!      \________/            |
//!         Storage  <────────────┘
//! ```
//!
//! Memory is evicted once, when forward leaves the unit. What is gathered for backward is freed with its last view.
//! An extension that borrows the bytes of a Flex tensor itself (`FlexTensor::bytes`) must end the borrow before the
//! weight's unit ends. No operation on a `Tensor` borrows longer.
//!
//! On Cube backends, evictable storage is an allocation that contains gathered weights, usually all weights of a
//! unit. Views keep their handle, and the device's server thread removes and restores the memory behind it
//! ([`memory::cube`](crate::memory::cube)). That thread cannot gather, so reading a view of evicted storage is an
//! error there. Two kinds of weights are not in evictable storage on these backends: those of a unit that a read
//! opened, and those of a unit of several modules. There, backward may reach an operation that saved a view before
//! it reaches the unit.

#[cfg(feature = "cube")]
mod cube;
#[cfg(feature = "flex")]
mod flex;
mod gathered;
mod gradients;
mod placing;
mod shared;
#[cfg(feature = "flex")]
mod slot;
mod slots;
mod source;
mod sync;

use std::mem;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use burn::backend::DispatchTensor;
use parking_lot::Mutex;

use gathered::{After, StoredWeight};
use gradients::Gradients;
pub(super) use gradients::{is_zero, zeros_of};
use placing::{StoragePlacer, persistent_copy};
use shared::FreedBy;
pub(super) use shared::SharedWeights;
use slots::{Refill, Storage};
pub(super) use source::ShardGatherer;

use super::events::{EventKind, ShardedState, TrainingState, happened};
use super::pending_all_gather::{Keeps, PendingAllGather, Prefetched};
use super::precision::cast;
use super::shards::LocalShardsId;
use super::unit::{Kept, Unit};
use crate::comm::{CommError, Phase};
use crate::error::OrUnwind;

/// Unsharded weights of one forward through a unit and of its backward, and unsharded gradients until they are
/// reduced. A weight is identified by its position among the parameters that participate.
///
/// Holds plain tensors only, so that it keeps no graph alive.
#[derive(Debug)]
pub(super) struct UnshardedParams {
    source: Arc<ShardGatherer>,
    kept: Kept,
    /// True if gathered weights are moved to evictable storage, on backends that support it.
    in_slots: bool,
    gradients: Mutex<Gradients>,
    stays: Mutex<Stays>,
    /// Restores the evictable storage if later passes share it.
    freed_by: Option<Arc<FreedBy>>,
    /// True if checkpointed blocks read the weights, and so will read them a second time in backward.
    recomputed: AtomicBool,
}

/// Policy for the unsharded weights at the end of a pass.
#[derive(Debug)]
enum Stays {
    /// They are freed.
    No,
    /// They are kept for the next forward from these shards.
    For(LocalShardsId),
    /// The unit holds them, for all forwards from the same shards.
    Shared,
}

impl UnshardedParams {
    /// Creates the owner of the weights of `source`. If `stays` names shards, the unsharded weights are kept for
    /// the next forward from these shards.
    pub(super) fn new(source: Arc<ShardGatherer>, kept: Kept, in_slots: bool, stays: Option<LocalShardsId>) -> Self {
        let gradients = Mutex::new(Gradients::new(source.members.len()));
        let is_left = stays.is_some();
        let stays = Mutex::new(stays.map_or(Stays::No, Stays::For));
        let recomputed = AtomicBool::new(false);
        let mut buffer = Self { source, kept, in_slots, gradients, stays, freed_by: None, recomputed };
        buffer.freed_by = (is_left && buffer.may_share()).then(Arc::default);
        buffer
    }

    pub(super) fn unit(&self) -> &Arc<Unit> {
        &self.source.unit
    }

    pub(super) fn source(&self) -> &Arc<ShardGatherer> {
        &self.source
    }

    /// Returns true if it holds these parameters of `unit`.
    pub(super) fn is_of(&self, unit: &Arc<Unit>, members: &[usize]) -> bool {
        Arc::ptr_eq(&self.source.unit, unit) && self.source.members == members
    }

    pub(super) fn kept(&self) -> Kept {
        self.kept
    }

    /// Returns true if its weights are gathered from shards in host memory to another device.
    pub(super) fn is_offloaded(&self) -> bool {
        self.source.offloaded().is_some()
    }

    /// Uses weights that were gathered before this forward, from the same shards.
    ///
    /// # Errors
    /// The error of the all-gather.
    pub(super) fn copy_in(&self, prefetched: Prefetched) -> Result<(), CommError> {
        let gathered = &self.source.gathered;
        let copy = |gathering| {
            gathered.unshard(|| Ok(self.place(self.source.gathered_in(TrainingState::Forward, gathering)?)))
        };
        match prefetched {
            Prefetched::Program(gathering) | Prefetched::Prefetch(gathering) => copy(gathering),
            Prefetched::Posted(gathering) => {
                self.source.happened(EventKind::Unshard, TrainingState::Forward, ShardedState::Unsharded);
                copy(gathering)
            }
            Prefetched::Left(unsharded) => copy(PendingAllGather::Done((unsharded, None))),
            Prefetched::Shared(shared) if self.may_share() => {
                self.source.shares(&shared.freed_by);
                gathered.unshard(|| Ok::<_, CommError>(shared.weights))?;
                *self.stays.lock() = Stays::Shared;
                Ok(())
            }
            Prefetched::Shared(shared) => gathered.unshard(|| Ok(self.place(shared.lasting()))),
        }
    }

    /// Returns true if other passes may compute with the same memory. The memory must then be freed only by an
    /// explicit `reshard`, which frees it for all of them.
    fn may_share(&self) -> bool {
        self.in_slots && self.kept == Kept::Full
    }

    /// Gathers for forward, unless this pass has gathered already.
    ///
    /// # Errors
    /// The error of the all-gather.
    pub(super) fn gather(&self) -> Result<(), CommError> {
        self.source.gathered.unshard(|| Ok(self.place(self.source.gather()?)))
    }

    fn place(&self, unsharded: Vec<DispatchTensor>) -> Vec<StoredWeight<dyn Storage, DispatchTensor>> {
        let mut placing = StoragePlacer::new(match &self.freed_by {
            Some(freed_by) => freed_by.clone(),
            None => self.source.clone(),
        });
        let place = |(position, full)| match self.in_slots && !self.source.is_shard(position) {
            true => placing.place(full),
            false => StoredWeight::Own(full),
        };
        unsharded.into_iter().enumerate().map(place).collect()
    }

    /// Returns true if it costs no memory that the graph keeps the weight at `position`: if the unit keeps it after
    /// forward, if it is in evictable storage, or if it is the stored shard itself.
    ///
    /// Ranks must agree, because the result decides which nodes backward has. If tensor parallelism leaves this
    /// rank an empty weight, that weight is not in evictable storage, but those of the other ranks are. So an empty
    /// weight counts as evictable.
    pub(super) fn costs_nothing_kept(&self, position: usize) -> bool {
        let is_empty = || self.source.unit.params[self.source.members[position]].shape.contains(&0);
        self.kept == Kept::Full
            || self.source.is_shard(position)
            || self.source.gathered.is_in_slot(position)
            || self.in_slots && is_empty()
    }

    /// Records that a checkpointed block reads the weights, and so will read them a second time in backward.
    pub(super) fn will_be_recomputed(&self) {
        self.recomputed.store(true, Relaxed);
    }

    /// Returns the weight at `position` in forward, and gathers first. A checkpointed block that recomputes its
    /// forward gets the weight that was gathered for backward.
    pub(super) fn view(&self, position: usize) -> DispatchTensor {
        self.gather().or_unwind();
        match self.source.gathered.forward(position) {
            Some(weight) => weight,
            None if self.recomputed.load(Relaxed) => self.view_again(position),
            None => unreachable!("a unit's weights are read before its forward ends"),
        }
    }

    /// Ends forward: frees the unsharded weights, except those that are kept, and issues the all-gather that
    /// `backward` will need.
    pub(super) fn take_back(&self, backward: bool) {
        let after = |weights: &[StoredWeight<_, DispatchTensor>]| {
            if let Some(due) = self.source.due.as_ref().filter(|_| backward && !weights.is_empty()) {
                let unsharded = weights.iter().map(StoredWeight::value);
                self.source.unit.look_at_gathered(due, &self.source.members, unsharded);
            }
            if backward && self.kept == Kept::Full {
                return After::Keep;
            }
            if !backward
                && !weights.is_empty()
                && let Stays::For(shards) = mem::replace(&mut *self.stays.lock(), Stays::No)
            {
                self.leave_unsharded(shards, weights.iter().map(|weight| weight.value().clone()).collect());
                return After::Free;
            }
            if !weights.is_empty() {
                let part = backward && self.kept == Kept::Part;
                let state = if part { ShardedState::ShardedPostForward } else { ShardedState::Sharded };
                self.source.happened(EventKind::Reshard, TrainingState::Forward, state);
            }
            if !backward {
                return After::Free;
            }
            let parts = (self.kept == Kept::Part && !weights.is_empty()).then(|| {
                let unsharded: Vec<_> = weights.iter().map(|weight| weight.value().clone()).collect();
                self.source.unit.split(&self.source.members, &unsharded)
            });
            let unshard = self.recomputed.load(Relaxed) || self.source.unit.control.lock().unshard_in_backward;
            if unshard { After::Again(self.source.post_all_gather(parts)) } else { After::Release }
        };
        // Also if the forward unwinds, storage that other passes share is not evicted.
        let is_shared = matches!(*self.stays.lock(), Stays::Shared);
        self.source.gathered.leave(after, |slot| {
            if !is_shared {
                slot.release()
            }
        });
        if backward && self.kept == Kept::Full {
            let source: Arc<dyn Keeps> = self.source.clone();
            self.source.unit.keep(Arc::downgrade(&source));
            self.share();
        }
    }

    /// Shares the weights that are kept after forward with later passes.
    fn share(&self) {
        let Some(freed_by) = &self.freed_by else { return };
        let Some(weights) = self.source.gathered.kept().filter(|weights| !weights.is_empty()) else { return };
        if let Stays::For(shards) = mem::replace(&mut *self.stays.lock(), Stays::Shared) {
            self.source.shares(freed_by);
            let shared = SharedWeights { weights, freed_by: freed_by.clone() };
            self.source.unit.keep_unsharded(shards, Prefetched::Shared(shared));
        }
    }

    /// Records an event of the unit.
    pub(super) fn happened(&self, kind: EventKind, during: TrainingState) {
        happened(
            kind,
            || self.source.unit.label(),
            during,
            || match self.source.gathered.is_here() {
                true => ShardedState::Unsharded,
                false => ShardedState::Sharded,
            },
        );
    }

    /// Starts the data transfer of the all-gather for backward.
    pub(super) fn start_again(&self) {
        self.source.start();
    }

    /// Returns true if the weights must be gathered for backward, and the transfer has not started.
    pub(super) fn is_to_start(&self) -> bool {
        self.source.is_to_start()
    }

    /// Returns true if the transfer for backward has started and is complete.
    pub(super) fn is_gathered_again(&self) -> bool {
        self.source.is_there()
    }

    /// Waits for the all-gather for backward. Later calls return at once.
    pub(super) fn gather_again(&self) {
        self.source.fill();
    }

    /// Returns the weight at `position` in backward. A weight outside evictable storage is normally returned only
    /// once, so that its last reader frees it. It is retained if it has two autodiff nodes, if checkpointed blocks
    /// read it, or if it is kept for the next forward.
    ///
    /// # Panics
    /// Unwinds with [`ParamError::NotUnsharded`](super::ParamError::NotUnsharded) if backward does not gather the unit.
    pub(super) fn view_again(&self, position: usize) -> DispatchTensor {
        let stays = matches!(*self.stays.lock(), Stays::For(_));
        let shared = stays || self.recomputed.load(Relaxed) || self.gradients.lock().is_term_expected(position);
        if let Some(weight) = self.source.again(position, shared) {
            return weight;
        }
        self.source.check_unsharded();
        unreachable!(
            "rules 2 and 9: read once per backward, before the unit's post-backward node, from the all-gather that \
             forward issued"
        )
    }

    /// Adds `grad` to the unsharded gradient of the weight at `position`.
    pub(super) fn reduce_in(&self, position: usize, grad: DispatchTensor) {
        self.gradients.lock().add(position, grad);
    }

    /// Records that the weight at `position` was read for computations that differ between the tensor-parallel
    /// ranks along the mesh dimensions `dims`. Its gradient then contains a partial sum on each of these ranks.
    pub(super) fn expect_term(&self, position: usize, dims: &[usize]) {
        self.gradients.lock().expect_term(position, dims);
    }

    /// Adds this rank's partial gradient of the weight at `position`.
    pub(super) fn reduce_in_term(&self, position: usize, dims: &[usize], grad: DispatchTensor) {
        self.gradients.lock().add_term(position, dims, grad);
    }

    /// Called when backward needs the weights no longer: frees them, or keeps them for the next forward.
    pub(super) fn end_backward(&self) {
        let unit = &self.source.unit;
        let is_freed = unit.control.lock().reshard_after_backward;
        match mem::replace(&mut *self.stays.lock(), Stays::No) {
            Stays::Shared if !is_freed && unit.is_shared() => {}
            Stays::For(shards) if !is_freed => {
                // All ranks keep the weights, or none does. This includes ranks whose backward read none of them.
                self.source.fill();
                if let Some(unsharded) = self.source.gathered.left() {
                    self.leave_unsharded(shards, unsharded);
                }
            }
            Stays::No | Stays::For(_) | Stays::Shared => {
                unit.forget_shared();
                self.source.happened(EventKind::Reshard, TrainingState::PostBackward, ShardedState::Sharded);
            }
        }
        self.end();
    }

    /// Keeps the weights for the next forward from these shards.
    fn leave_unsharded(&self, shards: LocalShardsId, unsharded: Vec<DispatchTensor>) {
        let unsharded = self.source.unit.sharded_of(&self.source.members, unsharded);
        self.source.unit.keep_unsharded(shards, Prefetched::Left(unsharded.into_iter().map(persistent_copy).collect()));
    }

    /// Called when no operation of the pass reads the weights any more. A view that the program keeps stays valid.
    pub(super) fn end(&self) {
        self.source.gathered.end();
    }

    /// Drops gradients that are entirely zero.
    pub(super) fn drop_zeros(&self) {
        self.gradients.lock().drop_zeros();
    }

    /// Returns the collected gradients by position, after summing the partial gradients of tensor-parallel ranks.
    ///
    /// All sums (of partial gradients, of accumulated gradients, and of the averages) use the unit's reduction
    /// element type, or else the element type in which the parameter is stored. The element type of the gradient
    /// itself does not matter. So one reduce-scatter may carry tensors of several types. The result on this rank
    /// has the element type of its shard.
    ///
    /// # Collective
    /// On the tensor-parallel ranks, if gradients are partial.
    pub(super) fn take_gradients(&self) -> Result<Vec<Option<DispatchTensor>>, CommError> {
        let ShardGatherer { unit, members, .. } = &*self.source;
        let dtype = |position: usize| self.source.added_in(position);
        let to_add = |(position, grad): (usize, Option<_>)| Some(cast(grad?, Some(dtype(position))));
        let zeros = |position: usize| {
            zeros_of(&unit.params[members[position]].shape, &self.source.device(position), dtype(position))
        };
        let call = self.source.call(Phase::Backward);
        let (grads, terms) = self.gradients.lock().take();
        let mut grads: Vec<_> = grads.into_iter().enumerate().map(to_add).collect();
        for (dims, terms) in terms {
            let (positions, own): (Vec<_>, Vec<_>) =
                terms.into_iter().map(|(position, term)| (position, to_add((position, term)))).unzip();
            let summed = positions.iter().map(|&position| members[position]);
            let sums = unit.sum_terms(&dims, call.clone(), summed, own, |at| zeros(positions[at]))?;
            gradients::add_sums(&mut grads, &positions, sums);
        }
        Ok(grads)
    }

    /// Returns true if unsharded weights are in memory.
    #[cfg(feature = "testing")]
    pub(super) fn has_weights(&self) -> bool {
        self.source.gathered.is_there(Storage::is_full)
    }

    /// Returns true if unsharded gradients have not been reduced yet.
    #[cfg(feature = "testing")]
    pub(super) fn has_gradients(&self) -> bool {
        self.gradients.lock().is_any()
    }

    /// Returns an untracked tensor that outlives its unit: a copy if its memory is evictable.
    pub(super) fn copy_out(tensor: DispatchTensor) -> DispatchTensor {
        persistent_copy(tensor)
    }
}

/// Ends the pass when the graph that needed it has been dropped.
impl Drop for UnshardedParams {
    fn drop(&mut self) {
        self.end();
    }
}
