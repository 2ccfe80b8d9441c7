//! [`RedistributePlan`]: redistribution from one layout to another by the steps of a plan, with one autodiff node
//! for the gradient.

use std::cell::RefCell;
use std::num::NonZeroUsize;
use std::sync::{Arc, Weak};

use burn::backend::DispatchTensor;
use burn::tensor::{DType, Tensor};
use lru::LruCache;
use parking_lot::Mutex;
use smallvec::SmallVec;

use super::local::{associate, cast, is_tracked, may_be_tracked};
use super::step::{PendingStep, PlannedStep, Tracking};
use super::vjp::{MeshDims, StepVjp, all_reduce_sum};
use super::{DTensorSpec, Kind};
use crate::Result;
use crate::autodiff::{self, BackwardStep, GraphOp};
use crate::comm::{Call, Communicator, Phase};
use crate::error::OrUnwind;
use crate::placement::{FusedStep, Layout, Step, fused_steps, plan, plan_input};
use crate::watch::{self, CallSite, LayoutChange};

/// Steps from one layout to another, and the label of their collectives.
#[derive(Debug)]
pub(super) struct RedistributePlan {
    steps: Vec<(Step, Layout)>,
    label: Arc<str>,
}

/// Number of layouts whose plans are cached per thread.
const FROM: NonZeroUsize = NonZeroUsize::new(64).unwrap();

/// Number of plans that are cached from each of them.
const TO: NonZeroUsize = NonZeroUsize::new(16).unwrap();

type PlansFrom = LruCache<Layout, LruCache<Layout, Arc<RedistributePlan>>>;

thread_local! {
    /// Cache of plans. A rank executes the same few plans in every training step, and planning is a
    /// search.
    static PLANS: RefCell<PlansFrom> = RefCell::new(LruCache::new(FROM));
}

impl RedistributePlan {
    /// Returns the steps, each with the layout after it.
    pub(super) fn steps(&self) -> &[(Step, Layout)] {
        &self.steps
    }

    /// Returns the plan from one layout to another, from this thread's cache if possible.
    pub(super) fn between(from: &Layout, to: &Layout) -> Result<Arc<Self>> {
        let known = PLANS.with_borrow_mut(|plans| plans.get_mut(from)?.get(to).cloned());
        if let Some(plan) = known {
            return Ok(plan);
        }
        let made = Arc::new(Self {
            steps: plan(from, to)?,
            label: label(from, to),
        });
        PLANS.with_borrow_mut(|plans| {
            plans
                .get_or_insert_mut_ref(from, || LruCache::new(TO))
                .put(to.clone(), made.clone());
        });
        Ok(made)
    }

    /// Returns the plan for an operator's input. Unlike [`between`](Self::between), it can reach a
    /// partial sum from any layout.
    pub(super) fn of_input(from: &Layout, to: &Layout) -> Result<Arc<Self>> {
        Self::between(from, to).or_else(|_| {
            Ok(Arc::new(Self {
                steps: plan_input(from, to)?,
                label: label(from, to),
            }))
        })
    }

    /// Returns the fused steps with their groups on `from`'s mesh. Each step gets the index of its
    /// backward collective as `tracking` says.
    fn planned_steps(
        &self,
        from: &DTensorSpec,
        varying: &[usize],
        tracking: Tracking,
    ) -> Result<PlannedSteps> {
        let mut steps = PlannedSteps::new();
        let mut before = None;
        for FusedStep {
            step,
            mesh_dims,
            after,
            ..
        } in fused_steps(
            from.layout(),
            &self.steps,
            varying,
            from.mesh().joins_dims(),
        ) {
            let after = from.with_layout(after.clone())?;
            steps.push(PlannedStep::new(
                step,
                mesh_dims,
                (before.as_ref().unwrap_or(from), &after),
                tracking,
            )?);
            before = Some(after);
        }
        Ok(steps)
    }

    /// Executes the plan with a `local` tensor laid out as `from`. The result may then vary over
    /// the mesh dimensions `varying`, so backward sums its gradient over them.
    ///
    /// If `local` is tracked and there is anything to do, this records one autodiff node; when
    /// backward has run that node, it releases the tensor in `kept`. `operator` names the operation
    /// that needs the redistribution, for traces.
    ///
    /// # Collective
    /// Every rank of the mesh.
    #[track_caller]
    pub(super) fn walk<const D: usize, K: Kind>(
        self: &Arc<Self>,
        local: Tensor<D, K>,
        from: &Arc<DTensorSpec>,
        varying: &[usize],
        kept: Weak<SavedForBackward<D>>,
        operator: &'static str,
    ) -> Result<Tensor<D, K>> {
        if self.steps.is_empty() && (varying.is_empty() || !is_tracked(&local)) {
            return Ok(local);
        }
        self.start(local, from, varying, None, CallSite::new(operator))?
            .finish(kept)
    }

    /// Like [`walk`](Self::walk), but does not wait for the last collective, after which only local
    /// work remains. The tensor and its gradient are cast according to `casts`.
    ///
    /// # Collective
    /// Every rank of the mesh.
    pub(super) fn start<const D: usize, K: Kind>(
        self: &Arc<Self>,
        local: Tensor<D, K>,
        from: &Arc<DTensorSpec>,
        varying: &[usize],
        casts: Option<Casts>,
        origin: CallSite,
    ) -> Result<Redistribution<D, K>> {
        let tracked = is_tracked(&local);
        let (walked, stayed): (MeshDims, MeshDims) = varying
            .iter()
            .copied()
            .partition(|dim| self.steps.iter().any(|(step, _)| step.mesh_dim() == *dim));
        let steps = self.planned_steps(
            from,
            varying,
            Tracking {
                draws: may_be_tracked(&local),
                tracked,
            },
        )?;
        let sum = match &stayed[..] {
            dims if dims.is_empty() || !tracked => None,
            dims => {
                let comm = from.mesh().communicator_over(dims)?;
                Some(Sum {
                    place: comm.next_forward_index(),
                    mesh_dims: dims.into(),
                    comm,
                })
            }
        };
        let tensor = casts.map_or_else(
            || local.clone().inner(),
            |casts| casts.forward(local.clone().inner()),
        );
        let call = from.call_as(Call::new(self.label.clone()), tensor.dtype());
        let node = RedistributeNode {
            output: Mutex::new(None),
            plan: self.clone(),
            from: from.clone(),
            pullbacks: Vec::new(),
            varying: walked,
            sum,
            call: call.clone().with_phase(Phase::Backward),
            casts,
            origin,
            kept: Weak::new(),
        };
        let walk = Redistribution {
            local,
            at: At::There(tensor),
            steps: steps.into_iter(),
            node,
        };
        let issued = walk
            .steps
            .as_slice()
            .iter()
            .rposition(PlannedStep::is_collective)
            .map_or(0, |last| last + 1);
        let call = call.with_phase(Phase::Forward);
        let _changing = watch::changing(|| walk.node.change(Phase::Forward));
        walk.take(issued, &call)
    }

    /// Returns the layout at the end of the plan, if it starts at `from`.
    fn end<'a>(&'a self, from: &'a Layout) -> &'a Layout {
        self.steps.last().map_or(from, |(_, layout)| layout)
    }
}

type PlannedSteps = SmallVec<[PlannedStep; 2]>;

/// A redistribution in execution. All collectives are issued; only the last may be incomplete.
#[derive(Debug)]
pub(super) struct Redistribution<const D: usize, K: Kind> {
    /// The original local tensor, in its graph.
    local: Tensor<D, K>,
    at: At<D, K>,
    steps: smallvec::IntoIter<[PlannedStep; 2]>,
    node: RedistributeNode<D>,
}

/// State of the tensor between steps.
#[derive(Debug)]
#[expect(
    clippy::large_enum_variant,
    reason = "it is on the stack for as long as a collective takes"
)]
enum At<const D: usize, K: Kind> {
    There(Tensor<D, K>),
    Between(PendingStep<D, K>),
}

impl<const D: usize, K: Kind> Redistribution<D, K> {
    /// Executes the next `steps` steps; the last of them is started but not waited for.
    fn take(mut self, steps: usize, call: &Call) -> Result<Self> {
        for _ in 0..steps {
            let Some(step) = self.steps.next() else { break };
            let tensor = self.node.arrive(self.at)?;
            self.at = At::Between(step.start(tensor, call.clone()));
        }
        Ok(self)
    }

    /// Returns true if [`finish`](Self::finish) would return without waiting for other ranks.
    pub(super) fn is_complete(&self) -> bool {
        match &self.at {
            At::There(_) => true,
            At::Between(started) => started.is_complete(),
        }
    }

    /// Executes the remaining steps and returns the redistributed tensor, connected to the graph of
    /// the original.
    pub(super) fn finish(self, kept: Weak<SavedForBackward<D>>) -> Result<Tensor<D, K>> {
        let tracked = is_tracked(&self.local);
        let strategy = self.local.gradient_checkpointing_strategy();
        let rest = self.steps.len();
        let call = self.node.call.clone();
        let Self {
            local,
            at,
            mut node,
            ..
        } = self.take(rest, &call)?;
        let tensor = node.arrive(at)?;
        if !tracked {
            return Ok(associate(tensor, strategy));
        }
        node.output = Mutex::new(Some(tensor.into_dispatch()));
        node.kept = kept;
        Ok(Tensor::from_dispatch(autodiff::unary(
            local.into_dispatch(),
            Arc::new(node),
        )))
    }
}

/// Element types in which a tensor and its gradient are sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Casts {
    /// Type in which the tensor is sent, and which the result has. `None` stands for the tensor's
    /// own type.
    pub(super) forward: Option<DType>,
    /// Type in which the gradient is sent. `None` stands for the type of the original tensor.
    pub(super) backward: Option<DType>,
}

impl Casts {
    fn forward<const D: usize, K: Kind>(self, tensor: Tensor<D, K>) -> Tensor<D, K> {
        match self.forward {
            Some(dtype) => cast(tensor, dtype),
            None => tensor,
        }
    }
}

/// A plan that consists of all-gathers only.
pub(super) struct Gathering<'a> {
    plan: &'a Arc<RedistributePlan>,
    /// Mesh dimensions over which it gathers, ascending.
    pub(super) mesh_dims: MeshDims,
}

impl RedistributePlan {
    /// Returns the plan as a gather, if it has steps and all of them are all-gathers.
    pub(super) fn gathering(self: &Arc<Self>) -> Option<Gathering<'_>> {
        if self.steps.is_empty()
            || !self
                .steps
                .iter()
                .all(|(step, _)| matches!(step, Step::AllGather { .. }))
        {
            return None;
        }
        let mut mesh_dims: MeshDims = self.steps.iter().map(|(step, _)| step.mesh_dim()).collect();
        mesh_dims.sort_unstable();
        Some(Gathering {
            plan: self,
            mesh_dims,
        })
    }
}

impl Gathering<'_> {
    /// Returns `full`, to which `local` was already gathered, with a second node in the graph. The
    /// backward of that node sums the gradient over the mesh dimensions `varying`, a subset of
    /// those gathered, and releases the tensor in `kept`. Local: no communication.
    pub(super) fn varying<const D: usize>(
        &self,
        local: Tensor<D>,
        from: &Arc<DTensorSpec>,
        full: Tensor<D>,
        varying: &[usize],
        kept: Weak<SavedForBackward<D>>,
        origin: CallSite,
    ) -> Result<Tensor<D>> {
        let steps = self.plan.planned_steps(
            from,
            varying,
            Tracking {
                draws: true,
                tracked: true,
            },
        )?;
        let op = RedistributeNode {
            output: Mutex::new(Some(full.inner().into_dispatch())),
            plan: self.plan.clone(),
            from: from.clone(),
            pullbacks: steps
                .into_iter()
                .filter_map(PlannedStep::gather_pullback::<D>)
                .collect(),
            varying: varying.into(),
            sum: None,
            call: from
                .call_as(Call::new(self.plan.label.clone()), from.dtype())
                .with_phase(Phase::Backward),
            casts: None,
            origin,
            kept,
        };
        Ok(Tensor::from_dispatch(autodiff::unary(
            local.into_dispatch(),
            Arc::new(op),
        )))
    }
}

fn label(from: &Layout, to: &Layout) -> Arc<str> {
    format!("redistribute {from} -> {to}").into()
}

/// A tensor that is held until the backward of its node has run, which sets it to `None` to release
/// the memory. A tensor that is not tracked remains.
pub(super) type SavedForBackward<const D: usize> = Mutex<Option<Tensor<D>>>;

/// Autodiff node of a redistribution.
#[derive(Debug)]
struct RedistributeNode<const D: usize> {
    /// Result of forward. It is computed before the node is created, so that a failing collective
    /// returns an error and does not panic.
    output: Mutex<Option<DispatchTensor>>,
    plan: Arc<RedistributePlan>,
    from: Arc<DTensorSpec>,
    pullbacks: Vec<StepVjp<D>>,
    /// Mesh dimensions of steps after which the result varies: the VJP of the step also sums the
    /// gradient over them.
    varying: MeshDims,
    /// Sum of the gradient over the other varying mesh dimensions, which no step changes.
    sum: Option<Sum>,
    call: Call,
    casts: Option<Casts>,
    origin: CallSite,
    kept: Weak<SavedForBackward<D>>,
}

/// Communicator over which a gradient is summed: one group for all these mesh dimensions.
#[derive(Debug)]
struct Sum {
    mesh_dims: MeshDims,
    comm: Communicator,
    /// Index assigned in forward: see [`Call::with_forward_index`].
    place: u64,
}

impl<const D: usize> GraphOp for RedistributeNode<D> {
    fn forward(&self, _: &[DispatchTensor]) -> DispatchTensor {
        self.output
            .lock()
            .take()
            .expect("a node's forward runs once")
    }

    fn backward(&self, step: &mut BackwardStep<'_>) {
        if let Some(kept) = self.kept.upgrade() {
            kept.lock().take();
        }
        let grad = Tensor::from_dispatch(step.take());
        let _changing = watch::changing(|| self.change(Phase::Backward));
        let grad = self.pull_cast(grad).or_unwind();
        step.give(0, || grad.into_dispatch());
    }
}

impl<const D: usize> RedistributeNode<D> {
    /// Waits for the step in flight, stores its VJP, and returns the tensor after it.
    fn arrive<K: Kind>(&mut self, at: At<D, K>) -> Result<Tensor<D, K>> {
        match at {
            At::There(tensor) => Ok(tensor),
            At::Between(started) => {
                let (tensor, pullback) = started.wait()?;
                self.pullbacks.push(pullback);
                Ok(tensor)
            }
        }
    }

    /// Like [`pull`](Self::pull), but sends the gradient in the element type that `casts` requests.
    fn pull_cast(&self, grad: Tensor<D>) -> Result<Tensor<D>> {
        let Some(casts) = self.casts else {
            return self.pull(grad);
        };
        let own = self.from.dtype();
        let sent = casts.backward.unwrap_or(self.from.dtype());
        Ok(cast(self.pull(cast(grad, sent))?, own))
    }

    /// Computes the gradient of the input from the gradient of the output.
    fn pull(&self, mut grad: Tensor<D>) -> Result<Tensor<D>> {
        let call = &self.from.call_as(self.call.clone(), grad.dtype());
        for (at, pullback) in self.pullbacks.iter().enumerate().rev() {
            // If a mesh dimension has two steps, the result varies after the last of them.
            let later = &self.pullbacks[at + 1..];
            let is_last = !later.iter().any(|later| {
                later
                    .mesh_dims
                    .iter()
                    .any(|dim| pullback.mesh_dims.contains(dim))
            });
            let varying = is_last
                && pullback
                    .mesh_dims
                    .iter()
                    .all(|dim| self.varying.contains(dim));
            grad = pullback.apply(call, grad, varying)?;
        }
        if let Some(Sum { comm, place, .. }) = &self.sum {
            grad = all_reduce_sum(comm, &call.clone().with_forward_index(*place), grad)?;
        }
        Ok(grad)
    }

    /// Returns a description of this change, for [`watch`].
    fn change(&self, phase: Phase) -> LayoutChange {
        let (from, to) = (self.from.layout(), self.plan.end(self.from.layout()));
        let backward = phase == Phase::Backward;
        let (from, to) = if backward { (to, from) } else { (from, to) };
        let names = self.from.mesh().names();
        let summed = self
            .varying
            .iter()
            .chain(self.sum.iter().flat_map(|sum| &sum.mesh_dims));
        LayoutChange {
            origin: self.origin.clone(),
            from: from.clone(),
            to: to.clone(),
            summed: summed
                .filter(|_| backward)
                .map(|&dim| names[dim].clone())
                .collect(),
            shape: self.from.shape().to_vec(),
            phase,
        }
    }
}
