//! [`GradReducer`]: reduces the gradients of a pass to the shards that this rank's optimizer steps.
//!
//! ```text
//!   issue ── reduce-scatter over the ranks that shard ── all-reduce over the replicas (HSDP) ──> gradients
//!            all-reduce of replicated parameters       /
//! ```
//!
//! If the shards are in host memory, the reduced gradients are then copied there.
//!
//! Each [`advance`](GradReducer::advance) waits for one stage and issues the next. Between two calls the rank
//! computes while the other ranks, or its backend, work on the stage.

use std::sync::Arc;

use burn::backend::autodiff::NodeId;
use burn::backend::ops::FloatTensorOps;
use burn::backend::{Dispatch, DispatchDevice, DispatchTensor, TensorMetadata};
use burn::tensor::{DType, Device, Scalar, Tensor, TensorData};

use super::accumulated_grads;
use super::custom::AllReduceHook;
use super::events::{EventKind, ShardedState, TrainingState, done, happened};
use super::plan_cache::UnitCollectiveKind;
use super::precision::cast;
use super::replica_check::PendingDigests;
use super::runtime_options::GradientDivideFactors;
use super::trained::Trained;
use super::unit::{DataParallelGroups, Unit};
use crate::comm::{Call, CommError, Digests, Op, OpTiming, Phase, ReduceOp, Work};
use crate::memory::ToHost;

/// This rank's gradients of some of a unit's parameters. A parameter that the rank did not use has zeros.
///
/// If no rank used a parameter, it has no gradient, as without sharding, and an optimizer does not step it. If only
/// some ranks used it, its gradient is averaged over all ranks, and the others count as zeros. Each reduction
/// therefore also transfers one flag per parameter, which says that the rank used it.
struct Own {
    grads: Vec<DispatchTensor>,
    used: Vec<bool>,
}

impl Own {
    fn new(grads: Vec<Option<DispatchTensor>>, zeros: impl Fn(usize) -> DispatchTensor) -> Self {
        let used = grads.iter().map(Option::is_some).collect();
        let grads = grads.into_iter().enumerate().map(|(at, grad)| grad.unwrap_or_else(|| zeros(at))).collect();
        Self { grads, used }
    }

    /// Returns flags of shape `[ranks, parameters]`, to be reduced by `op`. All rows are equal, so that after a
    /// reduce-scatter each rank has one complete row.
    fn flags(&self, ranks: usize, op: ReduceOp) -> DispatchTensor {
        let (device, dtype) = (self.grads[0].device(), self.grads[0].dtype());
        let (used, dtype) = match op {
            // The reduction multiplies flags by the factor, too. A flag of 1 could round to 0, for instance if the
            // factor is the reciprocal of a number of tokens. So the flag is the reciprocal of the factor. Neither
            // number needs to be in the range of f16.
            ReduceOp::PremulSum(factor) => (1.0 / factor.value(), if dtype == DType::F16 { DType::F32 } else { dtype }),
            _ => (1.0, dtype),
        };
        flags(&self.used, ranks, used, device, dtype)
    }
}

/// Returns `rows` equal rows of flags. Their element type is that of a gradient where that type can represent them,
/// so that all tensors of the collective have one type. The flag is `one` for a parameter that this rank used, and 0
/// otherwise. Each rank that used a parameter adds about 1 to its reduced flag, or its share of an average.
fn flags(used: &[bool], rows: usize, one: f64, device: DispatchDevice, dtype: DType) -> DispatchTensor {
    let row = used.iter().map(|&used| if used { one } else { 0.0 });
    let all: Vec<f64> = std::iter::repeat_with(|| row.clone()).take(rows).flatten().collect();
    Tensor::<2>::from_data(TensorData::new(all, [rows, used.len()]), (&Device::new(device), dtype)).into_dispatch()
}

/// Returns the reduced gradients, with `None` for each parameter that no rank used. `flags` is read only if this
/// rank left a parameter unused, because reading waits for the device.
fn without_unused(reduced: Vec<DispatchTensor>, flags: DispatchTensor, used: &[bool]) -> Vec<Option<DispatchTensor>> {
    if used.iter().all(|&used| used) {
        return reduced.into_iter().map(Some).collect();
    }
    let flags = Tensor::<2>::from_dispatch(flags).into_data();
    reduced.into_iter().zip(flags.iter::<f32>()).map(|(grad, flag)| (flag > 0.0).then_some(grad)).collect()
}

/// The reduction of one pass's gradients.
#[derive(Debug)]
pub(super) struct GradReducer {
    trained: Trained,
    call: Call,
    /// The parameters that are reduced, as indices into the unit.
    members: Vec<usize>,
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
    Alone(Vec<Option<DispatchTensor>>),
    /// The reduction over the ranks that shard: a reduce-scatter of sharded parameters and an all-reduce of
    /// replicated ones. The flags are the last tensor of the first collective that is present.
    Scattering { sharded: Option<Work<Vec<DispatchTensor>>>, replicated: Option<Work<Vec<DispatchTensor>>> },
    /// The all-reduce of all gradients and the flags over the replicas.
    Replicating(Work<Vec<DispatchTensor>>),
    /// The collectives are complete. The gradients are being copied to host memory, for leaves with these element
    /// types.
    CopyingOut(ToHost, Vec<(NodeId, DType)>),
}

/// Returns the operation of the reduction over the ranks that shard: an all-reduce if all parameters are
/// replicated.
fn scatter_op(sharded: Option<&Work<Vec<DispatchTensor>>>) -> Op {
    if sharded.is_some() { Op::ReduceScatter } else { Op::AllReduce }
}

fn issued(unit: &Unit, op: Op) {
    happened(EventKind::Issued(op), || unit.label(), TrainingState::PostBackward, || ShardedState::Sharded);
}

fn done_with(unit: &Unit, op: Op, course: Option<OpTiming>) {
    done(op, || unit.label(), TrainingState::PostBackward, ShardedState::Sharded, course);
}

/// A reduction that was postponed at this stage until a later backward (gradient accumulation).
#[derive(Debug)]
pub(super) struct PutOff {
    pub(super) stage: accumulated_grads::GradStage,
    pub(super) trained: Trained,
}

impl PutOff {
    /// Returns true if it is still postponed: no other reduction has included its gradients, and the program has
    /// not dropped them.
    pub(super) fn waits(&self) -> bool {
        self.trained.unit().waiting.has(self.stage, &self.trained.leaves)
    }

    /// Returns true if a backward must issue it now.
    pub(super) fn is_due(&self) -> bool {
        let (sync, all_reduce) = {
            let control = self.trained.unit().control.lock();
            (control.sync, control.all_reduce)
        };
        sync && (all_reduce || self.stage == accumulated_grads::GradStage::Full) && self.waits()
    }
}

/// Result of issuing a reduction: it is in flight or postponed.
pub(super) enum Issued {
    UnderWay(Box<GradReducer>),
    PutOff(PutOff),
}

/// State of a reduction after [`GradReducer::advance`].
pub(super) enum Advanced {
    UnderWay(Box<GradReducer>),
    PutOff(PutOff),
    /// The reduction is complete. Each gradient is that of this rank's shard (or of the full parameter if it is
    /// replicated), with its leaf. Parameters that no rank used have none.
    Done(Vec<(NodeId, DispatchTensor)>),
}

impl GradReducer {
    fn new(trained: Trained) -> Self {
        let unit = trained.unit();
        let scale = unit.averaging().scale;
        let (all_reduce, hook) = {
            let control = unit.control.lock();
            (control.all_reduce, control.hook.clone())
        };
        let (call, members) = (trained.source.call(Phase::Backward), trained.members());
        let (used, due, replicate, stage) = (Vec::new(), None, Vec::new(), ReduceStage::Alone(Vec::new()));
        Self { trained, call, members, scale, all_reduce, hook, used, due, replicate, stage }
    }

    /// Starts the averaging of gradients over the data-parallel ranks, including gradients that were accumulated
    /// before. If the unit does not synchronize (`no_sync`), accumulates them instead. `grads` holds one gradient
    /// per parameter, `None` for a parameter that this rank did not use.
    ///
    /// # Collective
    /// On all data-parallel ranks.
    pub(super) fn issue(trained: Trained, mut grads: Vec<Option<DispatchTensor>>) -> Issued {
        let (unit, stage) = (trained.unit(), accumulated_grads::GradStage::Full);
        if !unit.control.lock().sync {
            unit.waiting.add(stage, &trained.leaves, grads);
            return Issued::PutOff(PutOff { stage, trained });
        }
        unit.waiting.take(stage, &trained.leaves, &mut grads);
        Issued::UnderWay(Self::scatter(trained, grads).into())
    }

    /// Starts a postponed reduction, as [`issue`](Self::issue) does.
    ///
    /// # Collective
    /// On all data-parallel ranks.
    pub(super) fn issue_waiting(PutOff { stage, trained }: PutOff) -> Issued {
        match stage {
            accumulated_grads::GradStage::Full => {
                let none = vec![None; trained.leaves.len()];
                Self::issue(trained, none)
            }
            accumulated_grads::GradStage::Scattered => Issued::UnderWay(Self::issue_scattered(trained).into()),
        }
    }

    /// Starts the first stage: the reduction over the ranks that shard, which also compares the digests of the
    /// replica check.
    fn scatter(trained: Trained, grads: Vec<Option<DispatchTensor>>) -> Self {
        let PendingDigests { due, shard, replicate } = trained.source.carried();
        let mut reduction = Self { due, replicate, ..Self::new(trained) };
        let Self { trained, call, members, hook, .. } = &reduction;
        let unit = trained.unit();
        let data = unit.data.as_ref().filter(|data| !grads.is_empty() && data.ranks() > 1);
        let own = |grads| Own::new(grads, |at| trained.zeros(at));
        (reduction.used, reduction.stage) = match data {
            None if hook.is_some() => {
                (Vec::new(), ReduceStage::Alone(own(grads).grads.into_iter().map(Some).collect()))
            }
            None => (Vec::new(), ReduceStage::Alone(grads)),
            Some(data) => {
                let own = own(grads);
                let stage = unit.scatter(data, call, members, &own, shard);
                if let ReduceStage::Scattering { sharded, .. } = &stage {
                    issued(unit, scatter_op(sharded.as_ref()));
                }
                (own.used, stage)
            }
        };
        reduction
    }

    /// Starts the all-reduce over the replicas for gradients that are already reduced over the ranks that shard.
    fn issue_scattered(trained: Trained) -> Self {
        let mut reduction = Self::new(trained);
        let Self { trained, .. } = &reduction;
        let mut sums = vec![None; trained.leaves.len()];
        let used = trained.unit().waiting.take(accumulated_grads::GradStage::Scattered, &trained.leaves, &mut sums);
        let sum = |(at, sum): (usize, Option<_>)| sum.unwrap_or_else(|| trained.zeros_of_shard(at));
        let mut sums: Vec<_> = sums.into_iter().enumerate().map(sum).collect();
        sums.push(flags(&used, 1, 1.0, sums[0].device(), sums[0].dtype()));
        reduction.used = used;
        reduction.stage = reduction.replicate(sums);
        reduction
    }

    fn unit(&self) -> &Arc<Unit> {
        self.trained.unit()
    }

    /// Starts the all-reduce of gradients and flags over the replicas.
    fn replicate(&mut self, sums: Vec<DispatchTensor>) -> ReduceStage {
        let unit = self.trained.unit();
        let group = unit.data.as_ref().and_then(|data| data.replicate.as_ref()).expect("the unit has replicas");
        let call = self.call.clone().with_digests(std::mem::take(&mut self.replicate));
        let work = unit.exchange(UnitCollectiveKind::All, group, call, &self.members, sums);
        issued(unit, Op::AllReduce);
        ReduceStage::Replicating(work)
    }

    /// Waits for the stage in flight, and starts the next one.
    ///
    /// # Errors
    /// The error of the collective, or of the hook.
    pub(super) fn advance(mut self) -> crate::Result<Advanced> {
        match std::mem::replace(&mut self.stage, ReduceStage::Alone(Vec::new())) {
            ReduceStage::Alone(grads) => self.done(grads),
            ReduceStage::Scattering { sharded, replicated } => self.scattered(sharded, replicated),
            ReduceStage::Replicating(work) => {
                let (mut reduced, course) = work.wait_with_timing()?;
                done_with(self.unit(), Op::AllReduce, course);
                let flags = reduced.pop().expect("the flags are the last tensor");
                if let Some(step) = self.due {
                    self.unit().compare_replicated(step, &self.members, &reduced);
                }
                let grads = self.without_unused(reduced, flags);
                self.done(grads)
            }
            ReduceStage::CopyingOut(copies, leaves) => Ok(Advanced::Done(for_leaves(leaves, copies.wait()))),
        }
    }

    /// Returns the gradients with `None` for each parameter that no rank used. A hook receives all of them.
    fn without_unused(&self, reduced: Vec<DispatchTensor>, flags: DispatchTensor) -> Vec<Option<DispatchTensor>> {
        match &self.hook {
            Some(_) => reduced.into_iter().map(Some).collect(),
            None => without_unused(reduced, flags, &self.used),
        }
    }

    /// Completes the stage of the ranks that shard.
    fn scattered(
        mut self,
        sharded: Option<Work<Vec<DispatchTensor>>>,
        replicated: Option<Work<Vec<DispatchTensor>>>,
    ) -> crate::Result<Advanced> {
        let (mut flags, mut first) = (None, None);
        let mut wait = |work: Option<Work<Vec<DispatchTensor>>>| -> Result<_, CommError> {
            let (mut tensors, course) = work.map(Work::wait_with_timing).transpose()?.unwrap_or_default();
            first = first.or(course);
            if !tensors.is_empty() && flags.is_none() {
                flags = tensors.pop();
            }
            Ok(tensors)
        };
        let op = scatter_op(sharded.as_ref());
        let (sharded, replicated) = (wait(sharded)?, wait(replicated)?);
        done_with(self.unit(), op, first);
        let mut flags = flags.expect("each parameter is sharded or replicated");
        let mut reduced = self.unit().merge(&self.members, sharded, replicated);
        if let Some(step) = self.due {
            self.unit().compare_sharded(step, &self.members, &reduced);
        }
        if self.unit().data.as_ref().is_none_or(|data| data.replicate.is_none()) {
            let grads = self.without_unused(reduced, flags);
            return self.done(grads);
        }
        let waiting = &self.unit().waiting;
        if !self.all_reduce {
            let grads = without_unused(reduced, flags, &self.used);
            waiting.add(accumulated_grads::GradStage::Scattered, &self.trained.leaves, grads);
            return Ok(Advanced::PutOff(PutOff {
                stage: accumulated_grads::GradStage::Scattered,
                trained: self.trained,
            }));
        }
        let mut sums: Vec<_> = reduced.into_iter().map(Some).collect();
        let has_waited = waiting.take(accumulated_grads::GradStage::Scattered, &self.trained.leaves, &mut sums);
        reduced = sums.into_iter().flatten().collect();
        if has_waited.contains(&true) {
            let waited = self::flags(&has_waited, 1, 1.0, flags.device(), flags.dtype());
            flags = Dispatch::float_add(flags, waited);
            self.used.iter_mut().zip(has_waited).for_each(|(used, waited)| *used |= waited);
        }
        reduced.push(flags);
        self.stage = self.replicate(reduced);
        Ok(Advanced::UnderWay(Box::new(self)))
    }

    /// Completes the collectives: scales the gradients and runs the hook. A copy to host memory then runs while the
    /// next gradients are computed.
    fn done(mut self, grads: Vec<Option<DispatchTensor>>) -> crate::Result<Advanced> {
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
            let params = self.members.iter().map(|&member| self.unit().params[member].path.clone()).collect();
            let made = hook.run(self.unit().label(), params, grads.into_iter().flatten().collect())?;
            grads = made.into_iter().map(Some).collect();
        }
        let leaves = self.trained.leaves.iter().copied().zip(self.trained.stored());
        let used = leaves.zip(grads).filter_map(|(leaf, grad)| Some((leaf, grad?)));
        let (leaves, grads): (Vec<_>, Vec<_>) = used.unzip();
        let Some(offloaded) = self.trained.source.copied_out() else {
            return Ok(Advanced::Done(for_leaves(leaves, grads)));
        };
        self.stage = ReduceStage::CopyingOut(offloaded.copy_out(&self.call.label, grads), leaves);
        Ok(Advanced::UnderWay(Box::new(self)))
    }
}

/// Casts gradients to the element types of their shards.
fn for_leaves(leaves: Vec<(NodeId, DType)>, grads: Vec<DispatchTensor>) -> Vec<(NodeId, DispatchTensor)> {
    leaves.into_iter().zip(grads).map(|((leaf, stored), grad)| (leaf, cast(grad, Some(stored)))).collect()
}

impl Unit {
    /// Returns the divisors of the unit's gradients.
    pub(super) fn averaging(&self) -> GradientDivideFactors {
        let numbers = |data: &DataParallelGroups| (data.shard.group().size(), data.ranks(), data.all.group().size());
        let (sharding, ranks, averaged) = self.data.as_ref().map_or((1, 1, 1), numbers);
        self.control.lock().averaging(sharding, ranks, averaged)
    }

    /// Starts the reductions over the ranks that shard. The first of them also transfers the flags and the digests
    /// in `compared`.
    fn scatter(
        &self,
        data: &DataParallelGroups,
        call: &Call,
        members: &[usize],
        own: &Own,
        compared: Vec<Digests>,
    ) -> ReduceStage {
        let group = &data.reduce;
        let (mut sharded, mut replicated) =
            (self.sharded_of(members, own.grads.clone()), self.replicated_of(members, own.grads.clone()));
        let first = call.clone().with_digests(compared);
        let op = self.averaging().shard;
        if sharded.is_empty() {
            replicated.push(own.flags(1, op));
            let replicated =
                Some(self.exchange(UnitCollectiveKind::ReplicatedGradients, group, first, members, replicated));
            return ReduceStage::Scattering { sharded: None, replicated };
        }
        sharded.push(own.flags(group.group().size(), op));
        let sharded = Some(self.exchange(UnitCollectiveKind::Gradients, group, first, members, sharded));
        let replicated = (!replicated.is_empty())
            .then(|| self.exchange(UnitCollectiveKind::ReplicatedGradients, group, call.clone(), members, replicated));
        ReduceStage::Scattering { sharded, replicated }
    }

    /// Sums the partial gradients of `members` over the tensor-parallel ranks along the mesh dimensions `dims`.
    pub(super) fn sum_terms(
        &self,
        dims: &[usize],
        call: Call,
        members: impl IntoIterator<Item = usize>,
        terms: Vec<Option<DispatchTensor>>,
        zeros: impl Fn(usize) -> DispatchTensor,
    ) -> Result<Vec<Option<DispatchTensor>>, CommError> {
        let group = self.tensor.as_ref().expect("only parallelized parameters have partial gradients").along(dims);
        let own = Own::new(terms, zeros);
        let flags = own.flags(1, ReduceOp::Sum);
        let mut sent = own.grads;
        sent.push(flags);
        // Model numbers are drawn on data-parallel groups and mean nothing on this one.
        let call = Call { model: None, ..call };
        let call = call.with_names(members.into_iter().map(|member| self.params[member].path.clone()));
        let mut sums = group.all_reduce(call, sent, ReduceOp::Sum).wait()?;
        let flags = sums.pop().expect("the flags are the last tensor");
        Ok(without_unused(sums, flags, &own.used))
    }
}
