//! [`GradReducer`]: reduces gradients to the shards that this rank's optimizer steps.
//!
//! ```text
//!   submit ──┬── reduce-scatter over the ranks that shard ──┬── all-reduce over the replicas ──> host ──> gradients
//!            │   all-reduce of replicated parameters        │   (HSDP)                         (offload)
//!            └─> accumulated: no sync                       └─> accumulated: no all-reduce
//! ```
//!
//! Each [`advance`](GradReducer::advance) waits for one stage of a reduction and issues the next.
//! Between two calls the rank computes while the other ranks, or its backend, work on the stage. A
//! reduction advances before the next is issued, so one unit's unsharded gradients are in memory in
//! addition to those being computed; two units' if another rank is slow to receive its shards.

mod bucket;
pub(super) mod buckets;
pub(super) mod flags;
pub(super) mod gradients;
pub(super) mod order;
pub(super) mod padding;
pub(super) mod partial_groups;
mod stages;

use std::collections::VecDeque;
use std::mem;
use std::sync::{Arc, Weak};

use burn::backend::DispatchTensor;
use burn::backend::autodiff::NodeId;
use parking_lot::Mutex;
use smallvec::SmallVec;

use bucket::Bucket;
use gradients::{GradStage, Trained};
use stages::{GradReduction, Postponed, ReduceProgress};

use super::unit::Unit;
use crate::autodiff::BackwardId;
use crate::error::OrUnwind;

/// Reduced gradients, each with its leaf. Each is that of this rank's shard, or of the full
/// parameter if it is replicated. Parameters that no rank used have none.
pub(super) type Reduced = Vec<(NodeId, DispatchTensor)>;

/// The reductions of one thread's backwards.
#[derive(Debug, Default)]
pub(super) struct GradReducer(Mutex<ReduceQueue>);

#[derive(Debug, Default)]
struct ReduceQueue {
    /// The reductions in flight, oldest first.
    in_flight: VecDeque<(BackwardId, Weak<InFlightReduction>)>,
    /// The postponed reductions. Their order is the same on all ranks, including a rank that has
    /// none of the gradients.
    postponed: Vec<Postponed>,
    /// The models whose units this backward trains.
    models: SmallVec<[Arc<str>; 1]>,
    /// Gradients that wait for those of more units, to be reduced with them; one bucket of each
    /// backward that runs.
    buckets: Vec<Bucket>,
    /// The backward that has posted the last bucket.
    posted: Option<BackwardId>,
}

impl ReduceQueue {
    /// Returns the bucket of a backward.
    fn bucket(&mut self, backward: BackwardId) -> Option<&mut Bucket> {
        let mut buckets = self.buckets.iter_mut();
        buckets.find(|bucket| bucket.backward == backward)
    }
}

/// A reduction in flight; `None` once it is complete.
type InFlightReduction = Mutex<Option<Box<GradReduction>>>;

/// The reductions in flight that are dropped together with the graph of a pass: that of the pass's
/// own gradients, and postponed ones that its backward has issued at the end.
#[derive(Debug, Default)]
pub(super) struct OwnedReductions(Mutex<SmallVec<[Arc<InFlightReduction>; 1]>>);

impl GradReducer {
    /// Starts the averaging of gradients over the data-parallel ranks, including gradients that
    /// were accumulated before. If the unit does not synchronize (`no_sync`), accumulates them
    /// instead; if it joins a bucket, the averaging starts when that is full. `grads` holds one
    /// gradient per trained parameter, `None` for one that this rank did not use. `owner` keeps the
    /// reductions that start until they are complete. Returns the gradients of earlier reductions.
    ///
    /// # Collective
    /// On all data-parallel ranks.
    ///
    /// # Panics
    /// Like [`advance`](Self::advance).
    pub(super) fn submit(
        &self,
        unit: &Arc<Unit>,
        trained: Trained,
        grads: Vec<Option<DispatchTensor>>,
        backward: BackwardId,
        owner: &OwnedReductions,
    ) -> Reduced {
        let prepared = match GradReduction::prepare(unit.clone(), trained, grads) {
            Ok(prepared) => prepared,
            Err(postponed) => {
                self.postpone(postponed);
                return Reduced::new();
            }
        };
        let Some(buckets) = prepared.buckets() else {
            let has_posted = self.0.lock().bucket(backward).is_some();
            let mut reduced = self.post_bucket(backward, owner);
            // Otherwise the caller has waited for the earlier ones.
            if has_posted || unit.spec().buckets().is_some() {
                reduced.extend(self.finish(backward));
            }
            self.add(
                ReduceProgress::InFlight(prepared.post().into()),
                backward,
                owner,
            );
            return reduced;
        };
        let takes = |bucket: &mut Bucket| bucket.takes(&buckets, &prepared);
        let mut reduced = Reduced::new();
        if !self.0.lock().bucket(backward).is_none_or(takes) {
            reduced = self.post_bucket(backward, owner);
        }
        let is_full = {
            let queue = &mut *self.0.lock();
            let is_first = queue.posted != Some(backward);
            match queue.bucket(backward) {
                Some(bucket) => bucket.add(prepared),
                None => {
                    let bucket = Bucket::new(backward, &buckets, prepared, is_first);
                    queue.buckets.push(bucket);
                }
            }
            queue
                .bucket(backward)
                .is_some_and(|bucket| bucket.is_full())
        };
        if is_full {
            reduced.extend(self.post_bucket(backward, owner));
        }
        reduced
    }

    /// Starts the reductions of the units whose gradients wait in a bucket, and returns the
    /// gradients of earlier reductions.
    ///
    /// # Panics
    /// Like [`advance`](Self::advance).
    pub(super) fn post_bucket(&self, backward: BackwardId, owner: &OwnedReductions) -> Reduced {
        let bucket = {
            let buckets = &mut self.0.lock().buckets;
            let own = buckets
                .iter()
                .position(|bucket| bucket.backward == backward);
            own.map(|own| buckets.remove(own))
        };
        let Some(bucket) = bucket else {
            return Reduced::new();
        };
        // As those of units that are in no bucket, one after another.
        let reduced = self.finish(backward);
        self.0.lock().posted = Some(backward);
        for reduction in bucket.post() {
            self.add(ReduceProgress::InFlight(reduction.into()), backward, owner);
        }
        reduced
    }

    /// Advances the reductions of `backward` by one stage, oldest first, and returns the gradients
    /// of those that are complete.
    ///
    /// # Panics
    /// Unwinds with the typed error of a collective that fails.
    pub(super) fn advance(&self, backward: BackwardId) -> Reduced {
        self.advance_all(self.of(backward), backward)
    }

    /// Waits for all reductions of `backward` in flight.
    ///
    /// # Panics
    /// Like [`advance`](Self::advance).
    pub(super) fn finish(&self, backward: BackwardId) -> Reduced {
        let mut reduced = Reduced::new();
        loop {
            match self.of(backward) {
                none if none.is_empty() => return reduced,
                some => reduced.extend(self.advance_all(some, backward)),
            }
        }
    }

    /// Starts the reductions that earlier backwards postponed, for the models whose units this
    /// backward trains. Returns the gradients of earlier reductions. A step then has all gradients,
    /// including those of units that its last backward does not enter. Called at the end of a
    /// backward.
    ///
    /// # Panics
    /// Like [`advance`](Self::advance).
    pub(super) fn reduce_postponed(
        &self,
        backward: BackwardId,
        owner: &OwnedReductions,
    ) -> Reduced {
        let mut reduced = self.post_bucket(backward, owner);
        let models = mem::take(&mut self.0.lock().models);
        let is_due = |postponed: &Postponed| {
            let model = postponed.unit.comm.model_root();
            postponed.is_due()
                && model.is_some_and(|model| models.iter().any(|known| Arc::ptr_eq(known, &model)))
        };
        while self.0.lock().postponed.iter().any(is_due) {
            // A reduction in flight may include postponed gradients.
            reduced.extend(self.advance(backward));
            let next = {
                let postponed = &mut self.0.lock().postponed;
                postponed.retain(Postponed::is_pending);
                let first = |stage| {
                    postponed
                        .iter()
                        .position(|other| other.stage == stage && is_due(other))
                };
                let at = first(GradStage::Full).or_else(|| first(GradStage::Scattered));
                at.map(|at| postponed.remove(at))
            };
            next.into_iter()
                .for_each(|next| self.add(next.issue(), backward, owner));
        }
        reduced
    }

    /// Records that a forward begins: the models that the last backward trained are those of an
    /// abandoned one.
    pub(super) fn begin_forward(&self) {
        self.0.lock().models.clear();
    }

    /// Records that the running backward trains `unit`.
    pub(super) fn trains(&self, unit: &Unit) {
        let models = &mut self.0.lock().models;
        models.extend(
            unit.comm
                .model_root()
                .filter(|model| !models.iter().any(|known| Arc::ptr_eq(known, model))),
        );
    }

    /// Drops the reductions of a backward that was abandoned.
    pub(super) fn abandon(&self) {
        let mut queue = self.0.lock();
        queue.in_flight.clear();
        queue.buckets.clear();
    }

    fn add(&self, progress: ReduceProgress, backward: BackwardId, owner: &OwnedReductions) {
        match progress {
            ReduceProgress::InFlight(reduction) => {
                let reduction = Arc::new(Mutex::new(Some(reduction)));
                self.0
                    .lock()
                    .in_flight
                    .push_back((backward, Arc::downgrade(&reduction)));
                owner.0.lock().push(reduction);
            }
            ReduceProgress::Postponed(postponed) => self.postpone(postponed),
            ReduceProgress::Done(_) => unreachable!("a reduction has at least one stage"),
        }
    }

    /// Registers a postponed reduction, and removes those whose gradients it includes.
    fn postpone(&self, new: Postponed) {
        let includes = |leaf: &NodeId| new.trained.leaves.contains(leaf);
        let postponed = &mut self.0.lock().postponed;
        postponed.retain(|old| {
            old.is_pending() && (old.stage != new.stage || !old.trained.leaves.iter().all(includes))
        });
        postponed.push(new);
    }

    /// Removes the reductions of `backward` from the queue and returns them. Drops those whose
    /// graph is gone.
    fn of(&self, backward: BackwardId) -> Vec<Weak<InFlightReduction>> {
        let in_flight = &mut self.0.lock().in_flight;
        let alive = mem::take(in_flight)
            .into_iter()
            .filter(|(_, reduction)| reduction.strong_count() > 0);
        let (own, others): (Vec<_>, Vec<_>) = alive.partition(|(of, _)| *of == backward);
        *in_flight = others.into();
        own.into_iter().map(|(_, reduction)| reduction).collect()
    }

    /// Advances these reductions. Those that are not complete return to the front of the queue.
    fn advance_all(
        &self,
        reductions: Vec<Weak<InFlightReduction>>,
        backward: BackwardId,
    ) -> Reduced {
        let mut reduced = Reduced::new();
        let mut left = VecDeque::new();
        for weak in reductions {
            let Some(in_flight) = weak.upgrade() else {
                continue;
            };
            let Some(reduction) = in_flight.lock().take() else {
                continue;
            };
            match reduction.advance().or_unwind() {
                ReduceProgress::Done(grads) => reduced.extend(grads),
                ReduceProgress::Postponed(postponed) => self.postpone(postponed),
                ReduceProgress::InFlight(reduction) => {
                    *in_flight.lock() = Some(reduction);
                    left.push_back((backward, weak));
                }
            }
        }
        let in_flight = &mut self.0.lock().in_flight;
        left.append(in_flight);
        *in_flight = left;
        reduced
    }
}
