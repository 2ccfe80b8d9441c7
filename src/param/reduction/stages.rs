//! [`GradReduction`]: one reduction, stage by stage.

use std::mem;
use std::sync::Arc;

use burn::backend::autodiff::NodeId;
use burn::backend::ops::FloatTensorOps;
use burn::backend::{Dispatch, DispatchTensor, TensorMetadata};
use burn::tensor::{DType, Scalar};

use super::Reduced;
use super::flags::{self, FlaggedGrads, without_unused};
use super::gradients::{GradStage, Trained};
use crate::Result;
use crate::comm::{Call, CommError, Digests, Op, OpTiming, Phase, Work};
use crate::memory::ToHost;
use crate::param::custom::AllReduceHook;
use crate::param::events::{Event, EventKind, ShardedState, TrainingState, record};
use crate::param::options::cast;
use crate::param::replica_check::{ComparedRanks, PendingDigests};
use crate::param::unit::Unit;
use crate::param::unit_comm::UnitCollectiveKind;
use crate::param::unit_spec::DataParallelGroups;

/// State of a reduction after one of its stages.
pub(super) enum ReduceProgress {
    InFlight(Box<GradReduction>),
    Postponed(Postponed),
    Done(Reduced),
}

/// A reduction that was postponed at this stage until a later backward (gradient accumulation).
#[derive(Debug)]
pub(super) struct Postponed {
    pub(super) unit: Arc<Unit>,
    pub(super) stage: GradStage,
    pub(super) trained: Trained,
}

impl Postponed {
    /// Returns true if no other reduction has included its gradients, and the program has not
    /// dropped them.
    pub(super) fn is_pending(&self) -> bool {
        self.unit.accumulated.has(self.stage, &self.trained.leaves)
    }

    /// Returns true if a backward must issue it now.
    pub(super) fn is_due(&self) -> bool {
        let (sync, all_reduce) = {
            let control = self.unit.comm.options.lock();
            (control.sync, control.all_reduce)
        };
        sync && (all_reduce || self.stage == GradStage::Full) && self.is_pending()
    }

    /// Starts the reduction.
    pub(super) fn issue(self) -> ReduceProgress {
        match self.stage {
            GradStage::Full => {
                let none = vec![None; self.trained.leaves.len()];
                GradReduction::issue(self.unit, self.trained, none)
            }
            GradStage::Scattered => ReduceProgress::InFlight(
                GradReduction::issue_scattered(self.unit, self.trained).into(),
            ),
        }
    }
}

/// The reduction of one pass's gradients.
#[derive(Debug)]
pub(super) struct GradReduction {
    unit: Arc<Unit>,
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
    checked_step: Option<u64>,
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
    fn new(unit: Arc<Unit>, trained: Trained) -> Self {
        let options = unit.comm.options.lock();
        let all_reduce = options.all_reduce;
        let hook = options.hook.clone();
        drop(options);
        Self {
            call: trained.source.call(Phase::Backward),
            scale: unit.comm.averaging().scale,
            all_reduce,
            hook,
            used: Vec::new(),
            checked_step: None,
            replicate: Vec::new(),
            stage: ReduceStage::Local(Vec::new()),
            unit,
            trained,
        }
    }

    /// Starts a reduction, or accumulates the gradients: see [`GradReducer::submit`].
    pub(super) fn issue(
        unit: Arc<Unit>,
        trained: Trained,
        mut grads: Vec<Option<DispatchTensor>>,
    ) -> ReduceProgress {
        let stage = GradStage::Full;
        if !unit.comm.options.lock().sync {
            unit.accumulated.add(stage, &trained, grads);
            return ReduceProgress::Postponed(Postponed {
                unit,
                stage,
                trained,
            });
        }
        unit.accumulated.take(stage, &trained.leaves, &mut grads);
        ReduceProgress::InFlight(Self::scatter(unit, trained, grads).into())
    }

    /// Starts the first stage: the reduction over the ranks that shard, which also compares the
    /// digests of the replica check.
    fn scatter(unit: Arc<Unit>, trained: Trained, grads: Vec<Option<DispatchTensor>>) -> Self {
        let PendingDigests {
            checked_step,
            shard,
            replicate,
        } = trained.source.pending_digests();
        let mut reduction = Self::new(unit.clone(), trained);
        reduction.checked_step = checked_step;
        reduction.replicate = replicate;
        let flagged = |grads| FlaggedGrads::new(grads, |at| reduction.trained.zeros(at));
        let data = unit.spec().data.as_ref();
        match data.filter(|data| !grads.is_empty() && data.ranks() > 1) {
            None if reduction.hook.is_some() => {
                let grads = flagged(grads).grads;
                reduction.stage = ReduceStage::Local(grads.into_iter().map(Some).collect());
            }
            None => reduction.stage = ReduceStage::Local(grads),
            Some(data) => {
                let own = flagged(grads);
                reduction.stage = reduction.post_scatter(data, &own, shard);
                reduction.used = own.used;
            }
        }
        reduction
    }

    /// Posts the reductions over the ranks that shard. The first of them also transfers the flags
    /// and the digests in `compared`.
    fn post_scatter(
        &self,
        data: &DataParallelGroups,
        own: &FlaggedGrads,
        compared: Vec<Digests>,
    ) -> ReduceStage {
        let comm = &self.unit.comm;
        let members = &self.trained.members;
        let op = comm.averaging().shard;
        let mut sharded = comm.spec.select(true, members, own.grads.clone());
        let mut replicated = comm.spec.select(false, members, own.grads.clone());
        // The first collective carries the flags.
        if sharded.is_empty() {
            replicated.push(own.flags(1, op));
        } else {
            sharded.push(own.flags(data.reduce.group().size(), op));
        }
        let mut compared = Some(compared);
        let mut post = |kind, tensors: Vec<_>| {
            if tensors.is_empty() {
                return None;
            }
            let call = self.call.clone();
            let call = match compared.take() {
                Some(compared) => call.with_digests(compared),
                None => call,
            };
            Some(comm.exchange(kind, call, members, tensors))
        };
        let sharded = post(UnitCollectiveKind::ReduceScatterGrads, sharded);
        let replicated = post(UnitCollectiveKind::ReduceReplicatedGrads, replicated);
        self.note(EventKind::Issued(scatter_op(sharded.as_ref())), None);
        ReduceStage::Scattering {
            sharded,
            replicated,
        }
    }

    /// Starts the all-reduce over the replicas for gradients that are already reduced over the
    /// ranks that shard.
    fn issue_scattered(unit: Arc<Unit>, trained: Trained) -> Self {
        let mut reduction = Self::new(unit.clone(), trained);
        let trained = &reduction.trained;
        let mut sums = vec![None; trained.leaves.len()];
        let used = unit
            .accumulated
            .take(GradStage::Scattered, &trained.leaves, &mut sums);
        let mut sums: Vec<_> = sums
            .into_iter()
            .enumerate()
            .map(|(at, sum)| sum.unwrap_or_else(|| trained.zeros_of_shard(at)))
            .collect();
        sums.push(flags::flags(
            &used,
            1,
            1.0,
            sums[0].device(),
            sums[0].dtype(),
        ));
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
        let work = self.unit.comm.exchange(
            UnitCollectiveKind::ReduceOverReplicas,
            call,
            &self.trained.members,
            sums,
        );
        self.note(EventKind::Issued(Op::AllReduce), None);
        ReduceStage::Replicating(work)
    }

    /// Waits for the stage in flight, and starts the next one.
    ///
    /// # Errors
    /// The error of the collective, or of the hook.
    pub(super) fn advance(mut self) -> Result<ReduceProgress> {
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
                if let Some(step) = self.checked_step {
                    self.unit.spec().compare_gradients(
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
        let mut flags = None;
        let mut first = None;
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
        let sharded = wait(sharded)?;
        let replicated = wait(replicated)?;
        self.note(EventKind::Done(op), first);
        let mut flags = flags.expect("each parameter is sharded or replicated");
        let mut reduced = self
            .unit
            .spec()
            .merge(&self.trained.members, sharded, replicated);
        if let Some(step) = self.checked_step {
            self.unit.spec().compare_gradients(
                ComparedRanks::Shard,
                step,
                &self.trained.members,
                &reduced,
            );
        }
        let data = self.unit.spec().data.as_ref();
        if data.is_none_or(|data| data.replicate.is_none()) {
            let grads = self.without_unused(reduced, flags);
            return self.complete(grads);
        }
        let accumulated = &self.unit.accumulated;
        let stage = GradStage::Scattered;
        if !self.all_reduce {
            let grads = without_unused(reduced, flags, &self.used);
            accumulated.add(stage, &self.trained, grads);
            return Ok(ReduceProgress::Postponed(Postponed {
                unit: self.unit,
                stage,
                trained: self.trained,
            }));
        }
        let mut sums: Vec<_> = reduced.into_iter().map(Some).collect();
        let was_accumulated = accumulated.take(stage, &self.trained.leaves, &mut sums);
        reduced = sums.into_iter().flatten().collect();
        if was_accumulated.contains(&true) {
            let more = flags::flags(&was_accumulated, 1, 1.0, flags.device(), flags.dtype());
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
                .map(|&member| self.unit.spec().params[member].path.clone())
                .collect();
            let made = hook.run(
                self.unit.label(),
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
        let during = TrainingState::PostBackward;
        let state = ShardedState::Sharded;
        record(|| Event {
            timing,
            ..Event::of(self.unit.label(), kind, during, state)
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
