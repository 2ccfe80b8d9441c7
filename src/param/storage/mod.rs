//! [`UnshardedParams`]: whose the gathered memory of a unit is.
//!
//! A unit's weights are whole for a while, in forward and again in backward, and so are their gradients, until
//! they are reduced. All of that memory is a buffer's: scopes, passes and nodes of the graph hold the buffer, and
//! know nothing of what is behind it.
//!
//! | operation | | waits for | behind it |
//! |---|---|---|---|
//! | [`new`](UnshardedParams::new) | allocate | | nothing yet: the communicator makes results, a tensor a weight |
//! | [`copy_in`](UnshardedParams::copy_in) | what was gathered ahead of forward | | the tensor, or a slot of its memory |
//! | [`gather`](UnshardedParams::gather) | for forward | all-gather | the same |
//! | [`view`](UnshardedParams::view) | a weight in forward | | a handle |
//! | [`take_back`](UnshardedParams::take_back) | forward is over | | slots are emptied, and an all-gather is issued |
//! | [`gather_again`](UnshardedParams::gather_again), [`view_again`](UnshardedParams::view_again) | a weight in backward | that all-gather | slots are filled |
//! | [`reduce_in`](UnshardedParams::reduce_in) | a whole gradient | | the tensor |
//! | [`end`](UnshardedParams::end) | the pass needs the weights no longer | | handles go |
//! | [`take_gradients`](UnshardedParams::take_gradients) | to reduce | terms' all-reduce | they go |
//! | [`copy_out`](UnshardedParams::copy_out) | what leaves the unit | | a copy, of a slot's memory |
//!
//! Another layout of that memory, such as one block for all weights that kernels copy shards into and views out
//! of, changes what is behind these; so does a communication that is issued earlier or waited for later.
//!
//! # Slots
//!
//! Slots stand in for saved-tensor hooks, which burn lacks. A view may be held by the graph, as what
//! an operation saved for backward, and by the program, as a weight that it keeps.
//!
//! Dropping the handles of a gathered weight does not free it where the graph saved a view: burn's
//! `linear` reshapes its weight, `nn::Embedding` keeps its own, and without gradient checkpointing
//! either holds the whole buffer until backward. So on Flex a gathered weight is a view of a
//! [`Storage`](slot::EvictableStorage): freeing the slot frees the bytes under every view at once (of ranks in one
//! process, which have them in common, once all have freed theirs), filling it again gives them back. A view that is
//! read while its slot is empty has the slot filled first.
//!
//! ```text
//!   weight ── reshape ── saved by matmul        forward: full     after: empty     backward: full
//!      \________/            |
//!         Storage  <────────────┘
//! ```
//!
//! Memory is taken back once, when forward leaves the unit; what backward gathers again goes with its
//! last view. An extension that borrows the bytes of a Flex tensor itself (`FlexTensor::bytes`) must
//! end the borrow before the weight's unit ends: no operation on a `Tensor` borrows longer.
//!
//! On Cube backends a slot is an allocation with gathered weights in it, usually a whole unit's: views keep its name,
//! and the device's thread moves the memory under it away and back ([`memory::cube`](crate::memory::cube)). That thread
//! cannot gather, so a view that is read while its slot is empty is an error there. The weights of a unit that a read has
//! opened are in no slot there, nor those of a unit of several modules: backward may come to what has saved a view of them
//! before it comes to the unit.

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
pub(super) use gradients::zeros_of;
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

/// The gathered bytes of one forward through a unit and of its backward: whole weights, and whole gradients
/// until they are reduced. Weights are named by their position among those that take part.
///
/// It holds plain tensors only, so that it keeps no graph alive.
#[derive(Debug)]
pub(super) struct UnshardedParams {
    source: Arc<ShardGatherer>,
    kept: Kept,
    /// Whether gathered weights live in slots, where the backend has them.
    in_slots: bool,
    gradients: Mutex<Gradients>,
    stays: Mutex<Stays>,
    /// What fills its slots again, if passes to come share them.
    freed_by: Option<Arc<FreedBy>>,
    /// Whether checkpointed blocks read the weights, and will again in backward.
    recomputed: AtomicBool,
}

/// What becomes of what a pass has computed with.
#[derive(Debug)]
enum Stays {
    /// It is freed.
    No,
    /// It is for the next forward from these shards.
    For(LocalShardsId),
    /// The unit has it, for all forwards from the same shards.
    Shared,
}

impl UnshardedParams {
    /// Of the weights of `source`. What the pass has gathered `stays` for the next forward from these shards.
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

    /// Whether it is of these parameters of `unit`.
    pub(super) fn is_of(&self, unit: &Arc<Unit>, members: &[usize]) -> bool {
        Arc::ptr_eq(&self.source.unit, unit) && self.source.members == members
    }

    pub(super) fn kept(&self) -> Kept {
        self.kept
    }

    /// Whether its weights come from shards in host memory, and are elsewhere.
    pub(super) fn is_offloaded(&self) -> bool {
        self.source.offloaded().is_some()
    }

    /// Takes what is there before forward from the same shards.
    ///
    /// # Errors
    /// That of the all-gather.
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

    /// Whether others may compute with the same memory: nobody frees it but by hand, and then for all.
    fn may_share(&self) -> bool {
        self.in_slots && self.kept == Kept::Full
    }

    /// Gathers for forward, unless that has been done.
    ///
    /// # Errors
    /// That of the all-gather.
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

    /// Returns true if the graph may keep the weight at `position` at no cost: where the unit keeps it, in a slot, or as the
    /// shard that every rank holds in full.
    ///
    /// Ranks must agree, since it decides which nodes backward has. A weight without elements, of which tensor parallelism
    /// leaves this rank nothing, is in no slot, but those of the other ranks are.
    pub(super) fn costs_nothing_kept(&self, position: usize) -> bool {
        let is_empty = || self.source.unit.params[self.source.members[position]].shape.contains(&0);
        self.kept == Kept::Full
            || self.source.is_shard(position)
            || self.source.gathered.is_in_slot(position)
            || self.in_slots && is_empty()
    }

    /// A checkpointed block reads the weights, and will again in backward.
    pub(super) fn will_be_recomputed(&self) {
        self.recomputed.store(true, Relaxed);
    }

    /// The weight at `position`, in forward; gathers first. What a checkpointed block reads again, it reads in backward.
    pub(super) fn view(&self, position: usize) -> DispatchTensor {
        self.gather().or_unwind();
        match self.source.gathered.forward(position) {
            Some(weight) => weight,
            None if self.recomputed.load(Relaxed) => self.view_again(position),
            None => unreachable!("a unit's weights are read before its forward is left"),
        }
    }

    /// Forward is over: takes the gathered memory back, but for the part to keep, and issues the all-gather that
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
            if unshard { After::Again(self.source.post_all_gather(parts)) } else { After::Free }
        };
        // One that unwinds leaves to others what is theirs, too.
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

    /// Has passes to come compute with what stays after forward.
    fn share(&self) {
        let Some(freed_by) = &self.freed_by else { return };
        let Some(weights) = self.source.gathered.kept().filter(|weights| !weights.is_empty()) else { return };
        if let Stays::For(shards) = mem::replace(&mut *self.stays.lock(), Stays::Shared) {
            self.source.shares(freed_by);
            let shared = SharedWeights { weights, freed_by: freed_by.clone() };
            self.source.unit.keep_unsharded(shards, Prefetched::Shared(shared));
        }
    }

    /// Something has happened to the unit.
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

    /// Has what backward needs begin to move.
    pub(super) fn start_again(&self) {
        self.source.start();
    }

    /// Whether it has to be gathered for backward, and has not begun to move.
    pub(super) fn is_to_start(&self) -> bool {
        self.source.is_to_start()
    }

    /// Whether what backward needs has begun to move, and is there.
    pub(super) fn is_gathered_again(&self) -> bool {
        self.source.is_there()
    }

    /// Waits for what backward needs, once.
    pub(super) fn gather_again(&self) {
        self.source.refill();
    }

    /// The weight at `position`, in backward. One in no slot is given out once, so that its last reader
    /// frees it; one that has two nodes, or that checkpointed blocks read, goes with the unit, and one that stays for the next
    /// forward is kept.
    pub(super) fn view_again(&self, position: usize) -> DispatchTensor {
        let stays = matches!(*self.stays.lock(), Stays::For(_));
        let shared = stays || self.recomputed.load(Relaxed) || self.gradients.lock().is_term_expected(position);
        match self.source.again(position, shared) {
            Some(weight) => weight,
            None => unreachable!(
                "rules 2 and 9: made again once a backward, before its unit's token, of what forward issued"
            ),
        }
    }

    /// Collects the gradient of the whole weight at `position`.
    pub(super) fn reduce_in(&self, position: usize, grad: DispatchTensor) {
        self.gradients.lock().add(position, grad);
    }

    /// The weight at `position` has been read, for the first time, for computations that differ between the
    /// tensor-parallel ranks along the mesh dimensions `dims`.
    pub(super) fn expect_term(&self, position: usize, dims: &[usize]) {
        self.gradients.lock().expect_term(position, dims);
    }

    /// Collects this rank's term of the gradient at `position`.
    pub(super) fn reduce_in_term(&self, position: usize, dims: &[usize], grad: DispatchTensor) {
        self.gradients.lock().add_term(position, dims, grad);
    }

    /// Backward is through with the weights: they go, or stay for the next forward.
    pub(super) fn end_backward(&self) {
        let unit = &self.source.unit;
        let is_freed = unit.control.lock().reshard_after_backward;
        match mem::replace(&mut *self.stays.lock(), Stays::No) {
            Stays::Shared if !is_freed && unit.is_shared() => {}
            Stays::For(shards) if !is_freed => {
                // All ranks keep the weights, or none: also a rank whose backward has read none of them.
                self.source.refill();
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

    /// Leaves the weights for the next forward from these shards.
    fn leave_unsharded(&self, shards: LocalShardsId, unsharded: Vec<DispatchTensor>) {
        let unsharded = self.source.unit.sharded_of(&self.source.members, unsharded);
        self.source.unit.keep_unsharded(shards, Prefetched::Left(unsharded.into_iter().map(persistent_copy).collect()));
    }

    /// Nobody of the pass reads the weights any more. A view that the program keeps stays as it is.
    pub(super) fn end(&self) {
        self.source.gathered.end();
    }

    /// Drops gradients that are zero everywhere.
    pub(super) fn drop_zeros(&self) {
        self.gradients.lock().drop_zeros();
    }

    /// The collected gradients, by position, once terms of tensor-parallel ranks are summed.
    ///
    /// Whatever adds up does it in the unit's element type for that, or else in the one that the parameter is stored in,
    /// whatever its gradient is in: terms of tensor-parallel ranks, gradients that wait, and then the averages. So one
    /// reduce-scatter may carry tensors of several types. This rank's result is in the element type of its shard.
    ///
    /// # Collective
    /// Of the tensor-parallel ranks, where gradients are terms of a sum.
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

    /// Whether whole weights are in memory.
    #[cfg(feature = "testing")]
    pub(super) fn has_weights(&self) -> bool {
        self.source.gathered.is_there(Storage::is_full)
    }

    /// Whether whole gradients wait to be reduced.
    #[cfg(feature = "testing")]
    pub(super) fn has_gradients(&self) -> bool {
        self.gradients.lock().is_any()
    }

    /// An untracked tensor that outlives its unit: a copy, if its memory is a buffer's.
    pub(super) fn copy_out(tensor: DispatchTensor) -> DispatchTensor {
        persistent_copy(tensor)
    }
}

/// The graph that needed it is gone.
impl Drop for UnshardedParams {
    fn drop(&mut self) {
        self.end();
    }
}
