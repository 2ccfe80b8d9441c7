//! [`UnshardedParams`]: a unit's unsharded parameters, as one forward and its backward use them.
//!
//! A unit's weights are unsharded in forward and a second time in backward. Scopes, passes and
//! autodiff nodes hold an `UnshardedParams` and change it only by its methods. How the memory is
//! allocated, freed and restored is private to [`storage`](super::storage).
//!
//! # What becomes of the weights
//!
//! [`storage`](super::storage) says in `unshard_state` how the state of the memory changes, and in
//! `copies` what the next forward finds; this is what decides it:
//!
//! | when | condition | the weights |
//! |---|---|---|
//! | forward leaves the unit, and a backward follows ([`reshard_after_forward`](UnshardedParams::reshard_after_forward)) | [`ReshardAfterForward`](super::ReshardAfterForward) keeps them | stay. If `set_reshard_after_backward(false)`, later passes over the same shards share them |
//! | | it frees them | are freed, and the all-gather for backward is issued: from the shards, or from the parts of a smaller group |
//! | | the same, with `set_unshard_in_backward(false)`, and no checkpointed block reads them | are freed; reading them in backward is an error |
//! | forward leaves the unit, no backward | kept after forward, gathered, not a lone read, and no passes share weights of these shards | stay, for the next forward from the same shards |
//! | | otherwise | are freed |
//! | backward leaves the unit ([`end_backward`](UnshardedParams::end_backward)) | `set_reshard_after_backward(false)`, and no passes share weights of these shards | stay, for the next forward from the same shards |
//! | | the same, and passes share them | stay until the shards change or the program reshards the unit |
//! | | otherwise | are freed with the last pass over these shards |
//! | the graph is dropped without a backward | no passes share them | are freed |
//! | the program calls `reshard` | no pass that shares them is in forward | are freed; a backward that follows gathers them. Several passes over the same shards have one all-gather (on a GPU, only the weights of one of them are freed) |

use std::convert::Infallible;
use std::mem;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use burn::backend::DispatchTensor;
use parking_lot::Mutex;

use super::events::{Event, EventKind, ShardedState, TrainingState, record};
use super::options::Kept;
use super::pending_all_gather::PendingAllGather;
use super::shards::LocalShards;
use super::storage::{
    After, GatherOrigin, KeptId, ShardGatherer, Storage, StoragePlacer, StoredWeight,
    UnshardedCopies, UnshardedCopy, Weights, persistent_copy,
};
use super::unit::Unit;
use crate::comm::{CommError, Phase};
use crate::error::OrUnwind;

/// Unsharded weights of one forward through a unit and of its backward. A weight is identified by
/// its position among the parameters that participate.
///
/// The weights are in an [`UnshardedCopy`], which other passes over the same shards may use too. It
/// holds plain tensors only, so that it keeps no graph alive.
#[derive(Debug)]
pub(super) struct UnshardedParams {
    unit: Arc<Unit>,
    pub(super) source: Arc<ShardGatherer>,
    copy: Arc<UnshardedCopy>,
    pub(super) options: UnshardOptions,
    phase: Mutex<PassPhase>,
    /// Entry in which the pass is counted while it keeps weights for backward.
    kept_entry: Mutex<Option<KeptId>>,
    /// True if checkpointed blocks read the weights, and so will read them a second time in
    /// backward.
    recomputed: AtomicBool,
}

/// Progress of a pass, which counts as a user of its copy until it has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PassPhase {
    Forward,
    AfterForward,
    Ended,
}

/// Options of the weights of one pass.
#[derive(Debug)]
pub(super) struct UnshardOptions {
    pub(super) kept: Kept,
    /// True if gathered weights are moved to evictable storage, on backends that support it.
    pub(super) in_slots: bool,
    /// True if the weights stay unsharded after the pass, for the next forward from the same
    /// shards.
    pub(super) stays: bool,
    /// True if the pass may use weights that were gathered or kept before: those have the element
    /// types of a forward.
    pub(super) uses_earlier: bool,
}

/// What becomes of a pass's weights at the end of its forward.
#[derive(Debug, Clone, Copy)]
enum Fate {
    /// They stay for the pass's backward.
    Kept,
    /// They stay for the next forward over the same shards.
    Retained,
    /// They are freed, and no backward follows.
    Freed,
    /// They are freed, and backward does not gather them.
    Released,
    /// They are freed, and gathered for backward from the shards of all ranks.
    GatheredFromShards,
    /// They are freed, and gathered for backward from the shards of a smaller group.
    GatheredFromParts,
}

impl UnshardedParams {
    /// Begins a pass that uses the weights of `source`, which are gathered from `shards`. It uses
    /// the weights that were gathered or kept for these shards before, if there are any.
    pub(super) fn new(
        unit: Arc<Unit>,
        source: Arc<ShardGatherer>,
        shards: &LocalShards,
        options: UnshardOptions,
    ) -> Self {
        let phase = Mutex::new(PassPhase::Forward);
        let recomputed = AtomicBool::new(false);
        // Memory that passes share must be freed only by an explicit `reshard`, which frees it for
        // all of them.
        let joins = options.in_slots && options.kept == Kept::Full;
        let (copy, values) = match options.uses_earlier {
            true => unit.copies.begin_pass(shards, joins, &source),
            false => (UnshardedCopies::private(shards, &source), None),
        };
        let params = Self {
            unit,
            source,
            copy,
            options,
            phase,
            kept_entry: Mutex::default(),
            recomputed,
        };
        if let Some(values) = values {
            let Ok(()) = params
                .copy
                .state
                .unshard(|_| Ok::<_, Infallible>(params.place(values)));
        }
        params
    }

    pub(super) fn unit(&self) -> &Arc<Unit> {
        &self.unit
    }

    /// Returns true if it holds these parameters of `unit`.
    pub(super) fn is_of(&self, unit: &Arc<Unit>, members: &[usize]) -> bool {
        Arc::ptr_eq(&self.unit, unit) && *self.source.members == *members
    }

    /// Returns true if its weights are gathered from shards in host memory to another device.
    pub(super) fn is_offloaded(&self) -> bool {
        self.source.offloaded().is_some()
    }

    /// Gathers for forward, unless this pass has gathered already. Waits for an all-gather that was
    /// posted or started before.
    ///
    /// # Errors
    /// The error of the all-gather.
    pub(super) fn gather(&self) -> Result<(), CommError> {
        self.copy.state.unshard(|started| {
            if started
                .as_ref()
                .is_none_or(|(_, origin)| *origin == GatherOrigin::Posted)
            {
                self.source.record_event(
                    EventKind::Unshard,
                    TrainingState::Forward,
                    ShardedState::Unsharded,
                );
            }
            let gathering = started.map_or_else(
                || self.source.post(self.source.call(Phase::Forward)),
                |(gathering, _)| gathering,
            );
            Ok(self.place(self.source.gathered_in(TrainingState::Forward, gathering)?))
        })
    }

    fn place(&self, unsharded: Vec<DispatchTensor>) -> Weights {
        let mut placing = StoragePlacer::new(self.copy.clone());
        let place =
            |(position, full)| match self.options.in_slots && !self.source.is_shard(position) {
                true => placing.place(full),
                false => StoredWeight::Own(full),
            };
        unsharded.into_iter().enumerate().map(place).collect()
    }

    /// Returns true if it costs no memory that the graph keeps the weight at `position`: if the
    /// unit keeps it after forward, if it is in evictable storage, or if it is the stored shard
    /// itself.
    ///
    /// Ranks must agree, because the result decides which nodes backward has. If tensor parallelism
    /// leaves this rank an empty weight, that weight is not in evictable storage, but those of the
    /// other ranks are. So an empty weight counts as evictable.
    pub(super) fn costs_nothing_kept(&self, position: usize) -> bool {
        let is_empty = || self.source.param(position).shape().num_elements() == 0;
        self.options.kept == Kept::Full
            || self.source.is_shard(position)
            || self
                .copy
                .state
                .weights(|weights| matches!(weights.get(position), Some(StoredWeight::InSlot(_))))
                == Some(true)
            || self.options.in_slots && is_empty()
    }

    /// Records that a checkpointed block reads the weights, and so will read them a second time in
    /// backward.
    pub(super) fn will_be_recomputed(&self) {
        self.recomputed.store(true, Relaxed);
    }

    /// Returns the weight at `position` in forward, and gathers first. A checkpointed block that
    /// recomputes its forward gets the weight that was gathered for backward.
    pub(super) fn view(&self, position: usize) -> DispatchTensor {
        self.gather().or_unwind();
        let weight = |weights: &[StoredWeight<_, DispatchTensor>]| {
            Some(weights.get(position)?.value().clone())
        };
        match self.copy.state.weights(weight).flatten() {
            Some(weight) => weight,
            None if self.recomputed.load(Relaxed) => self.view_in_backward(position, false),
            None => unreachable!("a unit's weights are read before its forward ends"),
        }
    }

    /// Ends forward: frees the unsharded weights, except those that are kept, and issues the
    /// all-gather that `backward` will need.
    pub(super) fn reshard_after_forward(&self, backward: bool) {
        let state = &self.copy.state;
        let had_ended = *self.phase.lock() == PassPhase::Ended;
        if had_ended {
            // A backward inside the unit's own forward has ended the pass. None follows.
            state.begin_pass();
        }
        // Without weights, the unit was not gathered, or that backward has freed them.
        let weights: Vec<_> = state
            .weights(|weights| {
                weights
                    .iter()
                    .map(|weight| weight.value().clone())
                    .collect()
            })
            .unwrap_or_default();
        let fate = self.fate(backward, &weights);
        if backward && !weights.is_empty() {
            self.source.digest_gathered(&weights);
        }
        if !matches!(fate, Fate::Kept | Fate::Retained) && !weights.is_empty() {
            let resharded_to = match fate {
                Fate::GatheredFromParts => ShardedState::ShardedPostForward,
                _ => ShardedState::Sharded,
            };
            self.source
                .record_event(EventKind::Reshard, TrainingState::Forward, resharded_to);
        }
        let after = match fate {
            Fate::Kept => After::Keep {
                share: self.options.stays && self.options.in_slots,
            },
            Fate::Retained => After::Retain(self.retained(weights)),
            Fate::Freed => After::Free,
            Fate::Released => After::Release,
            Fate::GatheredFromShards => After::Gather(self.source.post_backward_gather(None)),
            Fate::GatheredFromParts => {
                let parts = self.unit.comm.split(&self.source.members, &weights);
                After::Gather(self.source.post_backward_gather(Some(parts)))
            }
        };
        state.leave(after, Storage::release);
        *self.phase.lock() = match fate {
            Fate::Retained => PassPhase::Ended,
            _ => PassPhase::AfterForward,
        };
        match fate {
            Fate::Kept if !had_ended => {
                *self.kept_entry.lock() = Some(self.unit.copies.keep(&self.copy, &self.source));
            }
            Fate::Retained => self.unit.copies.retain(&self.copy),
            _ => {}
        }
    }

    /// Decides what becomes of the `weights` at the end of forward.
    fn fate(&self, backward: bool, weights: &[DispatchTensor]) -> Fate {
        if !backward {
            let stays = self.options.stays && !weights.is_empty();
            return match stays && !self.unit.copies.next_joins(&self.copy) {
                true => Fate::Retained,
                false => Fate::Freed,
            };
        }
        let is_gathered =
            self.recomputed.load(Relaxed) || self.unit.comm.options.lock().unshard_in_backward;
        match self.options.kept {
            Kept::Full => Fate::Kept,
            _ if !is_gathered => Fate::Released,
            Kept::Part if !weights.is_empty() => Fate::GatheredFromParts,
            Kept::Part | Kept::Shard => Fate::GatheredFromShards,
        }
    }

    /// Returns weights that are retained for the next forward, as the result of its all-gather.
    fn retained(&self, weights: Vec<DispatchTensor>) -> PendingAllGather {
        let sharded = self.unit.spec().select(true, &self.source.members, weights);
        PendingAllGather::Done((sharded.into_iter().map(persistent_copy).collect(), None))
    }

    /// Records an event of the unit.
    pub(super) fn record_event(&self, kind: EventKind, during: TrainingState) {
        let state = || {
            if self.copy.state.is_unsharded() {
                ShardedState::Unsharded
            } else {
                ShardedState::Sharded
            }
        };
        record(|| Event::of(self.unit.label(), kind, during, state()));
    }

    /// Starts the data transfer of the all-gather for backward, unless it has started.
    pub(super) fn start_backward_gather(&self) {
        if self.copy.state.start(PendingAllGather::start) {
            self.source.note_start();
        }
    }

    /// Returns true if the weights must be gathered for backward, and the transfer has not started.
    pub(super) fn is_to_start(&self) -> bool {
        self.copy.state.is_to_start()
    }

    /// Returns true if the transfer for backward has started and is complete.
    pub(super) fn is_backward_gathered(&self) -> bool {
        self.copy.state.is_started(PendingAllGather::is_complete)
    }

    /// Waits for the all-gather for backward. Later calls return at once.
    pub(super) fn wait_backward_gather(&self) {
        self.copy.fill();
    }

    /// Returns the weight at `position` in backward. A weight outside evictable storage is normally
    /// returned only once, so that its last reader frees it. It is retained if it `has_two_nodes`
    /// in the graph, if checkpointed blocks read it, or if it is kept for the next forward.
    ///
    /// # Panics
    /// Unwinds with [`ParamError::NotUnsharded`](super::ParamError::NotUnsharded) if backward does
    /// not gather the unit.
    pub(super) fn view_in_backward(&self, position: usize, has_two_nodes: bool) -> DispatchTensor {
        let stays = self.options.stays && !self.copy.state.was_shared();
        let shared = stays || has_two_nodes || self.recomputed.load(Relaxed);
        if let Some(weight) = self.copy.backward_weight(position, shared) {
            return weight;
        }
        self.copy.check_gathered();
        unreachable!(
            "rules 2 and 9: read once per backward, before the unit's post-backward node, from the all-gather that \
             forward issued"
        )
    }

    /// Called when backward needs the weights no longer: frees them, or keeps them for the next
    /// forward.
    pub(super) fn end_backward(&self) {
        let unit = &self.unit;
        let state = &self.copy.state;
        let stay = !unit.comm.options.lock().reshard_after_backward;
        let kept = self.kept_entry.lock().take();
        unit.copies.end_backward(kept, &self.copy, stay);
        // A backward inside the unit's own forward leaves the weights to the rest of that forward.
        let has_left = *self.phase.lock() == PassPhase::AfterForward;
        if stay && has_left && self.options.stays && !state.was_shared() {
            // All ranks keep the weights, or none does. This includes ranks whose backward read
            // none of them.
            self.copy.fill();
            if !unit.copies.next_joins(&self.copy) && state.retain(|weights| self.retained(weights))
            {
                *self.phase.lock() = PassPhase::Ended;
                unit.copies.retain(&self.copy);
            }
        } else if !(stay && state.is_open()) {
            self.source.record_event(
                EventKind::Reshard,
                TrainingState::PostBackward,
                ShardedState::Sharded,
            );
        }
        self.end();
    }

    /// Called when no operation of the pass reads the weights any more. A view that the program
    /// keeps stays valid.
    pub(super) fn end(&self) {
        let phase = mem::replace(&mut *self.phase.lock(), PassPhase::Ended);
        if phase != PassPhase::Ended {
            self.copy.end_pass(phase == PassPhase::Forward);
        }
    }

    /// Returns true if unsharded weights are in memory.
    #[cfg(feature = "testing")]
    pub(super) fn has_weights(&self) -> bool {
        self.copy.state.is_in_memory(Storage::is_full)
    }
}

/// Ends the pass when the graph that needed it has been dropped.
impl Drop for UnshardedParams {
    fn drop(&mut self) {
        self.end();
    }
}
