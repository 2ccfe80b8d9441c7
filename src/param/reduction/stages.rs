//! [`GradReduction`]: one reduction, stage by stage.

use std::mem;
use std::sync::Arc;

use burn::backend::autodiff::NodeId;
use burn::backend::ops::FloatTensorOps;
use burn::backend::{Dispatch, DispatchTensor, TensorMetadata};
use burn::tensor::{DType, Scalar, Tensor};

use super::Reduced;
use super::buckets::{BucketPart, Buckets};
use super::flags::{self, FlaggedGrads, without_unused};
use super::gradients::{GradStage, Trained};
use crate::Result;
use crate::comm::{Call, Digests, Op, OpTiming, Phase, ReduceOp, Work};
use crate::memory::ToHost;
use crate::param::ParamError;
use crate::param::custom::AllReduceHook;
use crate::param::events::{Event, EventKind, ShardedState, TrainingState, record};
use crate::param::gradient_hook::{GradientHook, GradsWork};
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
        replicated: Option<ReplicatedWork>,
    },
    /// The all-reduce of all gradients and the flags over the replicas.
    Replicating(GradsWork),
    /// The collectives are complete. The gradients are being copied to host memory, for leaves with
    /// these element types.
    CopyingOut(ToHost, Vec<(NodeId, DType)>),
}

/// The all-reduce of a unit's replicated parameters: one of its own, or one that the units of a
/// bucket share.
#[derive(Debug)]
enum ReplicatedWork {
    Own(GradsWork),
    Shared(BucketPart),
}

impl ReplicatedWork {
    fn wait_with_timing(self) -> Result<(Vec<DispatchTensor>, Option<OpTiming>)> {
        match self {
            Self::Own(work) => work.wait_with_timing(),
            Self::Shared(part) => part.wait_with_timing(),
        }
    }
}

/// A reduction whose first collective is not posted yet.
#[derive(Debug)]
pub(super) struct PreparedReduction {
    reduction: GradReduction,
    /// This rank's gradients; `None` if no collective is needed.
    own: Option<FlaggedGrads>,
    /// Digests that the first collective compares.
    compared: Vec<Digests>,
}

impl PreparedReduction {
    /// Returns the buckets that the unit's gradients join, if they are reduced by one all-reduce
    /// over the groups of the units.
    pub(super) fn buckets(&self) -> Option<Arc<Buckets>> {
        let GradReduction { unit, trained, .. } = &self.reduction;
        let spec = unit.spec();
        let buckets = spec.data.as_ref()?.buckets.as_ref()?;
        let is_plain = self.own.is_some()
            && unit.comm.options.lock().collectives.is_none()
            && !trained
                .members
                .iter()
                .any(|&member| spec.params[member].is_sharded());
        is_plain.then(|| buckets.clone())
    }

    pub(super) fn unit(&self) -> &Arc<Unit> {
        &self.reduction.unit
    }

    pub(super) fn hook(&self) -> Option<Arc<dyn GradientHook>> {
        self.unit().comm.options.lock().gradient_hook.clone()
    }

    pub(super) fn op(&self) -> ReduceOp {
        self.unit().comm.averaging().shard
    }

    pub(super) fn call(&self) -> Call {
        self.reduction.call.clone()
    }

    pub(super) fn compared(&self) -> Vec<Digests> {
        self.compared.clone()
    }

    /// Returns the paths of the parameters.
    pub(super) fn names(&self) -> impl Iterator<Item = Arc<str>> {
        let members = self.reduction.trained.members.iter();
        members.map(|&member| self.unit().spec().params[member].path.clone())
    }

    /// Returns what, together with the dtypes, determines the plan of an all-reduce.
    pub(super) fn key(&self) -> (usize, Vec<usize>) {
        let unit = Arc::as_ptr(self.unit()).addr();
        (unit, self.reduction.trained.members.clone())
    }

    pub(super) fn bytes(&self) -> usize {
        let bytes = |grad: &DispatchTensor| grad.shape().num_elements() * grad.dtype().size();
        self.own.iter().flat_map(|own| &own.grads).map(bytes).sum()
    }

    pub(super) fn grads(&self) -> Vec<DispatchTensor> {
        let own = self.own.as_ref();
        own.map(|own| own.grads.clone()).unwrap_or_default()
    }

    /// Returns the flags of the gradients of a bucket.
    pub(super) fn flags(&self) -> DispatchTensor {
        let own = self.own.as_ref().expect("only gradients join a bucket");
        own.flags(1, self.op())
    }

    /// Posts the reductions over the ranks that shard.
    pub(super) fn post(self) -> GradReduction {
        let Self {
            mut reduction,
            own,
            compared,
        } = self;
        let data = reduction.unit.spec().data.clone();
        if let (Some(own), Some(data)) = (own, data) {
            reduction.stage = reduction.post_scatter(&data, &own, compared);
            reduction.used = own.used;
        }
        reduction
    }

    /// Continues with its part of the all-reduce of a bucket.
    pub(super) fn post_in(self, part: BucketPart) -> GradReduction {
        let Self {
            mut reduction, own, ..
        } = self;
        reduction.used = own.map(|own| own.used).unwrap_or_default();
        reduction.stage = ReduceStage::Scattering {
            sharded: None,
            replicated: Some(ReplicatedWork::Shared(part)),
        };
        reduction.note(EventKind::Issued(Op::AllReduce), None);
        reduction
    }
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
        grads: Vec<Option<DispatchTensor>>,
    ) -> ReduceProgress {
        match Self::prepare(unit, trained, grads) {
            Ok(prepared) => ReduceProgress::InFlight(prepared.post().into()),
            Err(postponed) => ReduceProgress::Postponed(postponed),
        }
    }

    /// Prepares a reduction. If the unit does not synchronize, accumulates the gradients and returns
    /// the postponed reduction.
    pub(super) fn prepare(
        unit: Arc<Unit>,
        trained: Trained,
        mut grads: Vec<Option<DispatchTensor>>,
    ) -> Result<PreparedReduction, Postponed> {
        let stage = GradStage::Full;
        if !unit.comm.options.lock().sync {
            unit.accumulated.add(stage, &trained, grads);
            return Err(Postponed {
                unit,
                stage,
                trained,
            });
        }
        unit.accumulated.take(stage, &trained.leaves, &mut grads);
        Ok(Self::scatter(unit, trained, grads))
    }

    /// Prepares the first stage: the reduction over the ranks that shard, which also compares the
    /// digests of the replica check.
    fn scatter(
        unit: Arc<Unit>,
        trained: Trained,
        grads: Vec<Option<DispatchTensor>>,
    ) -> PreparedReduction {
        let PendingDigests {
            checked_step,
            shard: compared,
            replicate,
        } = trained.source.pending_digests();
        let mut reduction = Self::new(unit, trained);
        reduction.checked_step = checked_step;
        reduction.replicate = replicate;
        let flagged = |grads| FlaggedGrads::new(grads, |at| reduction.trained.zeros(at));
        let data = reduction.unit.spec().data.as_ref();
        let own = match data.is_some_and(|data| !grads.is_empty() && data.ranks() > 1) {
            false if reduction.hook.is_some() => {
                let grads = flagged(grads).grads;
                reduction.stage = ReduceStage::Local(grads.into_iter().map(Some).collect());
                None
            }
            false => {
                reduction.stage = ReduceStage::Local(grads);
                None
            }
            true => Some(flagged(grads)),
        };
        PreparedReduction {
            reduction,
            own,
            compared,
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
        let mut post = |tensors: Vec<_>| {
            if tensors.is_empty() {
                return None;
            }
            let call = self.call.clone();
            let call = match compared.take() {
                Some(compared) => call.with_digests(compared),
                None => call,
            };
            Some((call, tensors))
        };
        let sharded = post(sharded).map(|(call, tensors)| {
            comm.exchange(
                UnitCollectiveKind::ReduceScatterGrads,
                call,
                members,
                tensors,
            )
        });
        let replicated = post(replicated).map(|(call, tensors)| {
            let kind = UnitCollectiveKind::ReduceReplicatedGrads;
            // A hook takes flags after the gradients.
            ReplicatedWork::Own(match sharded.is_some() {
                true => comm.exchange(kind, call, members, tensors).into(),
                false => comm.all_reduce(kind, call, members, tensors),
            })
        });
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
        let work = self.unit.comm.all_reduce(
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
        replicated: Option<ReplicatedWork>,
    ) -> Result<ReduceProgress> {
        let mut flags = None;
        let mut first = None;
        let mut completed = |(mut tensors, timing): (Vec<_>, Option<OpTiming>)| {
            first = first.or(timing);
            if !tensors.is_empty() && flags.is_none() {
                flags = tensors.pop();
            }
            tensors
        };
        let op = scatter_op(sharded.as_ref());
        let sharded = sharded.map(Work::wait_with_timing).transpose()?;
        let sharded = completed(sharded.unwrap_or_default());
        let replicated = replicated
            .map(ReplicatedWork::wait_with_timing)
            .transpose()?;
        let replicated = completed(replicated.unwrap_or_default());
        self.note(EventKind::Done(op), first);
        let mut flags = flags.expect("each parameter is sharded or replicated");
        let mut reduced = self
            .unit
            .spec()
            .merge(&self.trained.members, sharded, replicated);
        if self.unit.spec().sharded_data().refuses_unused {
            self.check_used(&flags)?;
        }
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

    /// Checks that every rank has used each parameter. `flags` are those after the reduction.
    ///
    /// # Collective
    /// Of all ranks, if one has not: the flags are the same on all.
    ///
    /// # Errors
    /// [`ParamError::Unused`] on every rank.
    fn check_used(&self, flags: &DispatchTensor) -> Result<()> {
        let data = self.unit.spec().sharded_data();
        let ranks = data.reduce.group().size();
        let all = match self.unit.comm.averaging().shard {
            ReduceOp::Avg => 1.0,
            _ => ranks as f32,
        };
        let flags = Tensor::<2>::from_dispatch(flags.clone()).into_data();
        let least = all * (1.0 - 0.5 / ranks as f32);
        if flags.iter::<f32>().all(|flag| flag > least) {
            return Ok(());
        }
        let own = self.trained.members.iter().zip(&self.used);
        let unused = own.filter(|(_, used)| !**used);
        let own: Vec<_> = unused
            .map(|(&member, _)| self.unit.spec().params[member].path.to_string())
            .collect();
        let of_ranks = data.reduce.all_gather_object(self.call.clone(), &own)?;
        let ranks = data.reduce.group().ranks().iter().copied();
        let unused = ranks.zip(of_ranks).filter(|(_, params)| !params.is_empty());
        let unused = unused.collect();
        Err(ParamError::Unused { unused }.into())
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
