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

pub(super) mod gradients;
pub(super) mod order;
pub(super) mod padding;

use std::collections::VecDeque;
use std::mem;
use std::sync::{Arc, Weak};

use burn::backend::autodiff::NodeId;
use burn::backend::ops::FloatTensorOps;
use burn::backend::{Dispatch, DispatchDevice, DispatchTensor, TensorMetadata};
use burn::tensor::{DType, Device, Scalar, Tensor, TensorData};
use itertools::Itertools;
use parking_lot::Mutex;
use smallvec::SmallVec;

use gradients::{GradStage, Trained};

use super::collectives::UnitCollectiveKind;
use super::custom::AllReduceHook;
use super::events::{Event, EventKind, ShardedState, TrainingState, happened};
use super::options::cast;
use super::replica_check::{ComparedRanks, PendingDigests};
use super::unit::{DataParallelGroups, Unit};
use crate::Result;
use crate::autodiff::BackwardId;
use crate::comm::{Call, CommError, Communicator, Digests, Op, OpTiming, Phase, ReduceOp, Work};
use crate::dtensor::MeshDims;
use crate::error::OrUnwind;
use crate::memory::ToHost;
use crate::mesh::DeviceMesh;

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
    /// instead. `grads` holds one gradient per trained parameter, `None` for one that this rank did
    /// not use. `owner` keeps the reduction until it is complete.
    ///
    /// # Collective
    /// On all data-parallel ranks.
    pub(super) fn submit(
        &self,
        trained: Trained,
        grads: Vec<Option<DispatchTensor>>,
        backward: BackwardId,
        owner: &OwnedReductions,
    ) {
        self.add(GradReduction::issue(trained, grads), backward, owner);
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
        let mut reduced = Reduced::new();
        let models = mem::take(&mut self.0.lock().models);
        let is_due = |postponed: &Postponed| {
            let model = postponed.trained.source.unit.model_root();
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
            unit.model_root()
                .filter(|model| !models.iter().any(|known| Arc::ptr_eq(known, model))),
        );
    }

    /// Drops the reductions in flight of a backward that was abandoned.
    pub(super) fn abandon(&self) {
        self.0.lock().in_flight.clear();
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

/// State of a reduction after one of its stages.
enum ReduceProgress {
    InFlight(Box<GradReduction>),
    Postponed(Postponed),
    Done(Reduced),
}

/// A reduction that was postponed at this stage until a later backward (gradient accumulation).
#[derive(Debug)]
struct Postponed {
    stage: GradStage,
    trained: Trained,
}

impl Postponed {
    /// Returns true if no other reduction has included its gradients, and the program has not
    /// dropped them.
    fn is_pending(&self) -> bool {
        self.trained
            .source
            .unit
            .accumulated
            .has(self.stage, &self.trained.leaves)
    }

    /// Returns true if a backward must issue it now.
    fn is_due(&self) -> bool {
        let (sync, all_reduce) = {
            let control = self.trained.source.unit.control.lock();
            (control.sync, control.all_reduce)
        };
        sync && (all_reduce || self.stage == GradStage::Full) && self.is_pending()
    }

    /// Starts the reduction.
    fn issue(self) -> ReduceProgress {
        match self.stage {
            GradStage::Full => {
                let none = vec![None; self.trained.leaves.len()];
                GradReduction::issue(self.trained, none)
            }
            GradStage::Scattered => {
                ReduceProgress::InFlight(GradReduction::issue_scattered(self.trained).into())
            }
        }
    }
}

/// The reduction of one pass's gradients.
#[derive(Debug)]
struct GradReduction {
    trained: Trained,
    call: Call,
    /// Factor by which the reduced sums are finally multiplied.
    scale: Option<f64>,
    /// True if the gradients are also all-reduced over the replicas (HSDP).
    all_reduce: bool,
    /// The program's hook, which runs on the reduced gradients.
    hook: Option<AllReduceHook>,
    /// Per parameter: true if this rank used it.
    used: Vec<bool>,
    /// Number of the pass if the replica check compares its reduced gradients; `None` otherwise.
    due: Option<u64>,
    /// Digests that the replicas compare in the all-reduce.
    replicate: Vec<Digests>,
    stage: ReduceStage,
}

#[derive(Debug)]
enum ReduceStage {
    /// No collective is needed.
    Local(Vec<Option<DispatchTensor>>),
    /// The reduction over the ranks that shard: a reduce-scatter of sharded parameters and an
    /// all-reduce of replicated ones. The flags are the last tensor of the first collective that is
    /// present.
    Scattering {
        sharded: Option<Work<Vec<DispatchTensor>>>,
        replicated: Option<Work<Vec<DispatchTensor>>>,
    },
    /// The all-reduce of all gradients and the flags over the replicas.
    Replicating(Work<Vec<DispatchTensor>>),
    /// The collectives are complete. The gradients are being copied to host memory, for leaves with
    /// these element types.
    CopyingOut(ToHost, Vec<(NodeId, DType)>),
}

impl GradReduction {
    fn new(trained: Trained) -> Self {
        let scale = trained.source.unit.averaging().scale;
        let (all_reduce, hook) = {
            let control = trained.source.unit.control.lock();
            (control.all_reduce, control.hook.clone())
        };
        let call = trained.source.call(Phase::Backward);
        let (used, due, replicate, stage) =
            (Vec::new(), None, Vec::new(), ReduceStage::Local(Vec::new()));
        Self {
            trained,
            call,
            scale,
            all_reduce,
            hook,
            used,
            due,
            replicate,
            stage,
        }
    }

    /// Starts a reduction, or accumulates the gradients: see [`GradReducer::submit`].
    fn issue(trained: Trained, mut grads: Vec<Option<DispatchTensor>>) -> ReduceProgress {
        let (unit, stage) = (&trained.source.unit, GradStage::Full);
        if !unit.control.lock().sync {
            unit.accumulated.add(stage, &trained, grads);
            return ReduceProgress::Postponed(Postponed { stage, trained });
        }
        unit.accumulated.take(stage, &trained.leaves, &mut grads);
        ReduceProgress::InFlight(Self::scatter(trained, grads).into())
    }

    /// Starts the first stage: the reduction over the ranks that shard, which also compares the
    /// digests of the replica check.
    fn scatter(trained: Trained, grads: Vec<Option<DispatchTensor>>) -> Self {
        let PendingDigests {
            due,
            shard,
            replicate,
        } = trained.source.carried();
        let reduction = Self {
            due,
            replicate,
            ..Self::new(trained)
        };
        let own = |grads| FlaggedGrads::new(grads, |at| reduction.trained.zeros(at));
        let data = reduction
            .unit()
            .data
            .as_ref()
            .filter(|data| !grads.is_empty() && data.ranks() > 1);
        let (used, stage) = match data {
            None if reduction.hook.is_some() => (
                Vec::new(),
                ReduceStage::Local(own(grads).grads.into_iter().map(Some).collect()),
            ),
            None => (Vec::new(), ReduceStage::Local(grads)),
            Some(data) => {
                let own = own(grads);
                let stage = reduction.post_scatter(data, &own, shard);
                (own.used, stage)
            }
        };
        Self {
            used,
            stage,
            ..reduction
        }
    }

    /// Posts the reductions over the ranks that shard. The first of them also transfers the flags
    /// and the digests in `compared`.
    fn post_scatter(
        &self,
        data: &DataParallelGroups,
        own: &FlaggedGrads,
        compared: Vec<Digests>,
    ) -> ReduceStage {
        let (unit, members) = (self.unit(), &self.trained.members);
        let (op, first) = (
            unit.averaging().shard,
            self.call.clone().with_digests(compared),
        );
        let [mut sharded, mut replicated] =
            [true, false].map(|is| unit.select(is, members, own.grads.clone()));
        let post = |kind, call, tensors| unit.exchange(kind, call, members, tensors);
        let (sharded, replicated) = if sharded.is_empty() {
            replicated.push(own.flags(1, op));
            (
                None,
                Some(post(
                    UnitCollectiveKind::ReplicatedGradients,
                    first,
                    replicated,
                )),
            )
        } else {
            sharded.push(own.flags(data.reduce.group().size(), op));
            let sharded = post(UnitCollectiveKind::Gradients, first, sharded);
            let has_rest = !replicated.is_empty();
            let rest = || {
                post(
                    UnitCollectiveKind::ReplicatedGradients,
                    self.call.clone(),
                    replicated,
                )
            };
            (Some(sharded), has_rest.then(rest))
        };
        self.note(EventKind::Issued(scatter_op(sharded.as_ref())), None);
        ReduceStage::Scattering {
            sharded,
            replicated,
        }
    }

    /// Starts the all-reduce over the replicas for gradients that are already reduced over the
    /// ranks that shard.
    fn issue_scattered(trained: Trained) -> Self {
        let mut reduction = Self::new(trained);
        let Self { trained, .. } = &reduction;
        let mut sums = vec![None; trained.leaves.len()];
        let used =
            trained
                .source
                .unit
                .accumulated
                .take(GradStage::Scattered, &trained.leaves, &mut sums);
        let sum = |(at, sum): (usize, Option<_>)| sum.unwrap_or_else(|| trained.zeros_of_shard(at));
        let mut sums: Vec<_> = sums.into_iter().enumerate().map(sum).collect();
        sums.push(flags(&used, 1, 1.0, sums[0].device(), sums[0].dtype()));
        reduction.used = used;
        reduction.stage = reduction.replicate(sums);
        reduction
    }

    /// Starts the all-reduce of gradients and flags over the replicas.
    fn replicate(&mut self, sums: Vec<DispatchTensor>) -> ReduceStage {
        let call = self
            .call
            .clone()
            .with_digests(mem::take(&mut self.replicate));
        let work = self
            .unit()
            .exchange(UnitCollectiveKind::All, call, &self.trained.members, sums);
        self.note(EventKind::Issued(Op::AllReduce), None);
        ReduceStage::Replicating(work)
    }

    /// Waits for the stage in flight, and starts the next one.
    ///
    /// # Errors
    /// The error of the collective, or of the hook.
    fn advance(mut self) -> Result<ReduceProgress> {
        match mem::replace(&mut self.stage, ReduceStage::Local(Vec::new())) {
            ReduceStage::Local(grads) => self.complete(grads),
            ReduceStage::Scattering {
                sharded,
                replicated,
            } => self.scattered(sharded, replicated),
            ReduceStage::Replicating(work) => {
                let (mut reduced, timing) = work.wait_with_timing()?;
                self.note(EventKind::Done(Op::AllReduce), timing);
                let flags = reduced.pop().expect("the flags are the last tensor");
                if let Some(step) = self.due {
                    self.unit().compare_gradients(
                        ComparedRanks::Replicate,
                        step,
                        &self.trained.members,
                        &reduced,
                    );
                }
                let grads = self.without_unused(reduced, flags);
                self.complete(grads)
            }
            ReduceStage::CopyingOut(copies, leaves) => {
                Ok(ReduceProgress::Done(for_leaves(leaves, copies.wait())))
            }
        }
    }

    /// Completes the stage of the ranks that shard.
    fn scattered(
        mut self,
        sharded: Option<Work<Vec<DispatchTensor>>>,
        replicated: Option<Work<Vec<DispatchTensor>>>,
    ) -> Result<ReduceProgress> {
        let (mut flags, mut first) = (None, None);
        let mut wait = |work: Option<Work<Vec<DispatchTensor>>>| -> Result<_, CommError> {
            let (mut tensors, timing) = work
                .map(Work::wait_with_timing)
                .transpose()?
                .unwrap_or_default();
            first = first.or(timing);
            if !tensors.is_empty() && flags.is_none() {
                flags = tensors.pop();
            }
            Ok(tensors)
        };
        let op = scatter_op(sharded.as_ref());
        let (sharded, replicated) = (wait(sharded)?, wait(replicated)?);
        self.note(EventKind::Done(op), first);
        let mut flags = flags.expect("each parameter is sharded or replicated");
        let mut reduced = self
            .unit()
            .merge(&self.trained.members, sharded, replicated);
        if let Some(step) = self.due {
            self.unit().compare_gradients(
                ComparedRanks::Shard,
                step,
                &self.trained.members,
                &reduced,
            );
        }
        if self
            .unit()
            .data
            .as_ref()
            .is_none_or(|data| data.replicate.is_none())
        {
            let grads = self.without_unused(reduced, flags);
            return self.complete(grads);
        }
        let (accumulated, stage) = (&self.unit().accumulated, GradStage::Scattered);
        if !self.all_reduce {
            let grads = without_unused(reduced, flags, &self.used);
            accumulated.add(stage, &self.trained, grads);
            return Ok(ReduceProgress::Postponed(Postponed {
                stage,
                trained: self.trained,
            }));
        }
        let mut sums: Vec<_> = reduced.into_iter().map(Some).collect();
        let was_accumulated = accumulated.take(stage, &self.trained.leaves, &mut sums);
        reduced = sums.into_iter().flatten().collect();
        if was_accumulated.contains(&true) {
            let more = self::flags(&was_accumulated, 1, 1.0, flags.device(), flags.dtype());
            flags = Dispatch::float_add(flags, more);
            self.used
                .iter_mut()
                .zip(was_accumulated)
                .for_each(|(used, before)| *used |= before);
        }
        reduced.push(flags);
        self.stage = self.replicate(reduced);
        Ok(ReduceProgress::InFlight(Box::new(self)))
    }

    /// Completes the collectives: scales the gradients and runs the hook. A copy to host memory
    /// then runs while the next gradients are computed.
    fn complete(mut self, grads: Vec<Option<DispatchTensor>>) -> Result<ReduceProgress> {
        let scaled = |grad: DispatchTensor| match self.scale {
            None => grad,
            Some(scale) => {
                // The reciprocal of a number of tokens may be 0 in half precision.
                let wide = (grad.dtype() == DType::F16).then_some(DType::F32);
                Dispatch::float_mul_scalar(cast(grad, wide), Scalar::from(scale))
            }
        };
        let mut grads: Vec<_> = grads.into_iter().map(|grad| grad.map(scaled)).collect();
        if let Some(hook) = &self.hook {
            let params = self
                .trained
                .members
                .iter()
                .map(|&member| self.unit().params[member].path.clone())
                .collect();
            let made = hook.run(
                self.unit().label(),
                params,
                grads.into_iter().flatten().collect(),
            )?;
            grads = made.into_iter().map(Some).collect();
        }
        let leaves = self
            .trained
            .leaves
            .iter()
            .copied()
            .zip(self.trained.stored());
        let used = leaves
            .zip(grads)
            .filter_map(|(leaf, grad)| Some((leaf, grad?)));
        let (leaves, grads): (Vec<_>, Vec<_>) = used.unzip();
        let Some(offloaded) = self.trained.source.copied_out() else {
            return Ok(ReduceProgress::Done(for_leaves(leaves, grads)));
        };
        self.stage = ReduceStage::CopyingOut(offloaded.copy_out(&self.call.label, grads), leaves);
        Ok(ReduceProgress::InFlight(Box::new(self)))
    }

    fn unit(&self) -> &Arc<Unit> {
        &self.trained.source.unit
    }

    /// Returns the gradients with `None` for each parameter that no rank used. A hook receives all
    /// of them.
    fn without_unused(
        &self,
        reduced: Vec<DispatchTensor>,
        flags: DispatchTensor,
    ) -> Vec<Option<DispatchTensor>> {
        match &self.hook {
            Some(_) => reduced.into_iter().map(Some).collect(),
            None => without_unused(reduced, flags, &self.used),
        }
    }

    fn note(&self, kind: EventKind, timing: Option<OpTiming>) {
        let (during, state) = (TrainingState::PostBackward, ShardedState::Sharded);
        happened(|| Event {
            timing,
            ..Event::of(self.unit(), kind, during, state)
        });
    }
}

/// Returns the operation of the reduction over the ranks that shard: an all-reduce if all
/// parameters are replicated.
fn scatter_op(sharded: Option<&Work<Vec<DispatchTensor>>>) -> Op {
    if sharded.is_some() {
        Op::ReduceScatter
    } else {
        Op::AllReduce
    }
}

/// Casts gradients to the element types of their shards.
fn for_leaves(leaves: Vec<(NodeId, DType)>, grads: Vec<DispatchTensor>) -> Reduced {
    leaves
        .into_iter()
        .zip(grads)
        .map(|((leaf, stored), grad)| (leaf, cast(grad, Some(stored))))
        .collect()
}

/// This rank's gradients of some of a unit's parameters. A parameter that the rank did not use has
/// zeros.
///
/// If no rank used a parameter, it has no gradient, as without sharding, and an optimizer does not
/// step it. If only some ranks used it, its gradient is averaged over all ranks, and the others
/// count as zeros. Each reduction therefore also transfers one flag per parameter, which says that
/// the rank used it.
struct FlaggedGrads {
    grads: Vec<DispatchTensor>,
    used: Vec<bool>,
}

impl FlaggedGrads {
    fn new(grads: Vec<Option<DispatchTensor>>, zeros: impl Fn(usize) -> DispatchTensor) -> Self {
        let used = grads.iter().map(Option::is_some).collect();
        let grads = grads
            .into_iter()
            .enumerate()
            .map(|(at, grad)| grad.unwrap_or_else(|| zeros(at)))
            .collect();
        Self { grads, used }
    }

    /// Returns flags of shape `[ranks, parameters]`, to be reduced by `op`. All rows are equal, so
    /// that after a reduce-scatter each rank has one complete row.
    fn flags(&self, ranks: usize, op: ReduceOp) -> DispatchTensor {
        let (device, dtype) = (self.grads[0].device(), self.grads[0].dtype());
        let (used, dtype) = match op {
            // The reduction multiplies flags by the factor, too. A flag of 1 could round to 0, for
            // instance if the factor is the reciprocal of a number of tokens. So the flag is the
            // reciprocal of the factor. Neither number needs to be in the range of f16.
            ReduceOp::PremulSum(factor) => (
                1.0 / factor.value(),
                if dtype == DType::F16 {
                    DType::F32
                } else {
                    dtype
                },
            ),
            _ => (1.0, dtype),
        };
        flags(&self.used, ranks, used, device, dtype)
    }
}

/// Returns `rows` equal rows of flags. Their element type is that of a gradient where that type can
/// represent them, so that all tensors of the collective have one type. The flag is `one` for a
/// parameter that this rank used, and 0 otherwise. Each rank that used a parameter adds about 1 to
/// its reduced flag, or its share of an average.
fn flags(
    used: &[bool],
    rows: usize,
    one: f64,
    device: DispatchDevice,
    dtype: DType,
) -> DispatchTensor {
    let row = used.iter().map(|&used| if used { one } else { 0.0 });
    let all: Vec<f64> = std::iter::repeat_with(|| row.clone())
        .take(rows)
        .flatten()
        .collect();
    Tensor::<2>::from_data(
        TensorData::new(all, [rows, used.len()]),
        (&Device::new(device), dtype),
    )
    .into_dispatch()
}

/// Returns the reduced gradients, with `None` for each parameter that no rank used. `flags` is read
/// only if this rank left a parameter unused, because reading waits for the device.
fn without_unused(
    reduced: Vec<DispatchTensor>,
    flags: DispatchTensor,
    used: &[bool],
) -> Vec<Option<DispatchTensor>> {
    if used.iter().all(|&used| used) {
        return reduced.into_iter().map(Some).collect();
    }
    let flags = Tensor::<2>::from_dispatch(flags).into_data();
    reduced
        .into_iter()
        .zip(flags.iter::<f32>())
        .map(|(grad, flag)| (flag > 0.0).then_some(grad))
        .collect()
}

/// Name of the duplicated communicators on which backward issues its reductions. Their collectives
/// are ordered independently of those that forward issues.
pub(crate) const REDUCE: &str = "burn_dtensor::reduced";

/// The groups of a tensor-parallel mesh over which partial gradients are summed. Computations that
/// read a parameter may differ along some of the mesh dimensions. The parameter's gradient is then
/// summed over the ranks along these dimensions.
#[derive(Debug)]
pub(crate) struct PartialGradGroups {
    all: Communicator,
    /// One group for each non-empty set of mesh dimensions that have more than one rank.
    along: Vec<(MeshDims, Communicator)>,
}

impl PartialGradGroups {
    /// Creates the groups of `mesh`.
    ///
    /// # Errors
    /// [`MeshError::NotAMember`](crate::mesh::MeshError::NotAMember), and a failure of the world.
    pub(super) fn of(mesh: &DeviceMesh) -> Result<Self> {
        let over = |dims: &[usize]| -> Result<_> {
            Ok(mesh.communicator_over(dims)?.duplicate_private(REDUCE))
        };
        let longer = (0..mesh.ndim()).filter(|&dim| mesh.size_of(dim) > 1);
        let along = longer.powerset().filter(|dims| !dims.is_empty());
        Ok(Self {
            all: over(&(0..mesh.ndim()).collect::<Vec<_>>())?,
            along: along
                .map(|dims| Ok((MeshDims::from_slice(&dims), over(&dims)?)))
                .collect::<Result<_>>()?,
        })
    }

    /// Returns the group of all ranks of the mesh.
    pub(super) fn all(&self) -> &Communicator {
        &self.all
    }

    /// Returns the group of the ranks along `dims`, which must be in ascending order.
    pub(super) fn along(&self, dims: &[usize]) -> &Communicator {
        let known = self.along.iter().find(|(known, _)| **known == *dims);
        &known
            .expect("partial gradients differ only along mesh dimensions that have several ranks")
            .1
    }

    /// Sums this rank's partial gradients of these parameters over the ranks along the mesh
    /// dimensions `dims`.
    fn sum(
        &self,
        dims: &[usize],
        call: Call,
        names: impl IntoIterator<Item = Arc<str>>,
        own: FlaggedGrads,
    ) -> Result<Vec<Option<DispatchTensor>>, CommError> {
        let flags = own.flags(1, ReduceOp::Sum);
        let mut sent = own.grads;
        sent.push(flags);
        // Model numbers are drawn on data-parallel groups and mean nothing on this one.
        let call = Call {
            model: None,
            ..call
        }
        .with_names(names);
        let mut sums = self
            .along(dims)
            .all_reduce(call, sent, ReduceOp::Sum)
            .wait()?;
        let flags = sums.pop().expect("the flags are the last tensor");
        Ok(without_unused(sums, flags, &own.used))
    }
}
