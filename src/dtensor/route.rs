//! [`Route`]: from one layout to another by a plan's steps, and one node of the graph that pulls gradients
//! back.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::{Arc, Weak};

use burn::backend::DispatchTensor;
use burn::tensor::Tensor;
use parking_lot::Mutex;

use super::local::{associate, is_tracked};
use super::pullback::{Dims, Pullback, all_reduce_sum};
use super::{DTensorSpec, Kind, step};
use crate::Result;
use crate::autodiff::{self, BackwardStep, GraphOp};
use crate::comm::{Call, Communicator, Phase};
use crate::error::OrUnwind;
use crate::placement::{Layout, Step, plan, plan_input};

/// The steps from one layout to another, and what the collectives on the way are called.
#[derive(Debug)]
pub(super) struct Route {
    steps: Vec<(Step, Layout)>,
    label: Arc<str>,
}

/// Routes kept per thread; past that many planning starts anew.
const CAPACITY: usize = 1 << 10;

thread_local! {
    /// A rank walks the same few routes in every training step, and planning one is a search.
    static ROUTES: RefCell<HashMap<Layout, HashMap<Layout, Arc<Route>>>> = RefCell::default();
}

impl Route {
    /// The steps, each with the layout after it.
    pub(super) fn steps(&self) -> &[(Step, Layout)] {
        &self.steps
    }

    /// The planned route, from this thread's cache.
    pub(super) fn between(from: &Layout, to: &Layout) -> Result<Arc<Self>> {
        let known = ROUTES.with_borrow(|routes| routes.get(from)?.get(to).cloned());
        if let Some(route) = known {
            return Ok(route);
        }
        let steps = plan(from, to)?;
        let route = Arc::new(Self { steps, label: label(from, to) });
        ROUTES.with_borrow_mut(|routes| {
            if routes.values().map(HashMap::len).sum::<usize>() >= CAPACITY {
                routes.clear();
            }
            let from = routes.entry(from.clone()).or_default();
            from.insert(to.clone(), route.clone());
        });
        Ok(route)
    }

    /// The way of an operator's input, which may become a term of a sum whatever it comes as.
    pub(super) fn of_input(from: &Layout, to: &Layout) -> Result<Arc<Self>> {
        Self::between(from, to).or_else(|_| Ok(Arc::new(Self { steps: plan_input(from, to)?, label: label(from, to) })))
    }

    /// The steps, those together that are one collective: reductions that follow each other, by one
    /// operation, over mesh dimensions that all vary afterwards or none does.
    fn legs<'a>(&'a self, varying: &'a [usize]) -> impl Iterator<Item = (Dims, &'a [(Step, Layout)])> {
        let joined = |(a, _): &(Step, Layout), (b, _): &(Step, Layout)| match (a, b) {
            (Step::AllReduce { op: a, mesh_dim: first }, Step::AllReduce { op: b, mesh_dim: second }) => {
                a == b && varying.contains(first) == varying.contains(second)
            }
            _ => false,
        };
        self.steps.chunk_by(joined).map(|leg| {
            let mut mesh_dims: Dims = leg.iter().map(|(step, _)| step.mesh_dim()).collect();
            mesh_dims.sort_unstable();
            (mesh_dims, leg)
        })
    }

    /// Walks it with a tensor laid out as `from`, then lets the tensor vary over the mesh dimensions
    /// `varying`: its gradient is summed over them. Records one node if anything happens and `local`
    /// is tracked; when its backward has run, what is `kept` of it is let go.
    ///
    /// # Collective
    /// Every rank of the mesh.
    pub(super) fn walk<const D: usize, K: Kind>(
        &self,
        local: Tensor<D, K>,
        from: &DTensorSpec,
        varying: &[usize],
        kept: Weak<Kept<D>>,
    ) -> Result<Tensor<D, K>> {
        let tracked = is_tracked(&local);
        if self.steps.is_empty() && (varying.is_empty() || !tracked) {
            return Ok(local);
        }
        let call = from.call(Call::new(self.label.clone()));
        let strategy = local.gradient_checkpointing_strategy();
        let (mut moved, mut pullbacks) = (local.clone().inner(), Vec::new());
        let mut before = None;
        for (mesh_dims, leg) in self.legs(varying) {
            let [.., (step, after)] = leg else { continue };
            let spec = before.as_ref().unwrap_or(from);
            let after = from.with_layout(after.clone())?;
            let call = call.clone().in_phase(Phase::Forward);
            let (next, pullback) = step::run(*step, mesh_dims, (spec, &after), moved, call, tracked)?;
            moved = next;
            if tracked {
                pullbacks.push(pullback);
            }
            before = Some(after);
        }
        if !tracked {
            return Ok(associate(moved, strategy));
        }
        let is_walked = |dim: &usize| self.steps.iter().any(|(step, _)| step.mesh_dim() == *dim);
        let (walked, stayed): (Dims, Dims) = varying.iter().copied().partition(is_walked);
        let sum = match &stayed[..] {
            [] => None,
            dims => {
                let comm = from.mesh().communicator_over(dims)?;
                Some(Sum { place: comm.draw(), comm })
            }
        };
        let op = Redistribution {
            output: Mutex::new(Some(moved.into_dispatch())),
            pullbacks,
            varying: walked,
            sum,
            call: call.in_phase(Phase::Backward),
            kept,
        };
        let local = autodiff::unary(local.into_dispatch(), Arc::new(op));
        Ok(Tensor::from_dispatch(local))
    }
}

/// A route that only gathers.
pub(super) struct Gathering<'a> {
    route: &'a Route,
    /// The mesh dimensions that it gathers over, ascending.
    pub(super) mesh_dims: Dims,
}

impl Route {
    /// The route, if it takes steps and all of them gather.
    pub(super) fn gathering(&self) -> Option<Gathering<'_>> {
        let gathers = |(step, _): &(Step, Layout)| matches!(step, Step::AllGather { .. });
        if self.steps.is_empty() || !self.steps.iter().all(gathers) {
            return None;
        }
        let mut mesh_dims: Dims = self.steps.iter().map(|(step, _)| step.mesh_dim()).collect();
        mesh_dims.sort_unstable();
        Some(Gathering { route: self, mesh_dims })
    }
}

impl Gathering<'_> {
    /// What `local` was gathered to, `whole`, with a second node in the graph: there its gradient is summed over the
    /// mesh dimensions `varying`, some of those gathered. Local: no communication.
    pub(super) fn varying<const D: usize>(
        &self,
        local: Tensor<D>,
        from: &DTensorSpec,
        whole: Tensor<D>,
        varying: &[usize],
    ) -> Result<Tensor<D>> {
        let (mut pullbacks, mut before) = (Vec::new(), from.clone());
        for (step, after) in &self.route.steps {
            if let Step::AllGather { mesh_dim, dim } = *step {
                pullbacks.push(step::gather_pullback::<D>(&before, mesh_dim, dim)?);
            }
            before = from.with_layout(after.clone())?;
        }
        let op = Redistribution {
            output: Mutex::new(Some(whole.inner().into_dispatch())),
            pullbacks,
            varying: varying.into(),
            sum: None,
            call: from.call(Call::new(self.route.label.clone())).in_phase(Phase::Backward),
            kept: Weak::new(),
        };
        Ok(Tensor::from_dispatch(autodiff::unary(local.into_dispatch(), Arc::new(op))))
    }
}

fn label(from: &Layout, to: &Layout) -> Arc<str> {
    format!("redistribute {from} -> {to}").into()
}

/// A tensor, until backward has run its node: that is spent, and with it the memory is let go. One
/// that is not tracked stays.
pub(super) type Kept<const D: usize> = Mutex<Option<Tensor<D>>>;

/// A change of layout in the graph.
#[derive(Debug)]
struct Redistribution<const D: usize> {
    /// Made before the node, so that a failing collective is an error and not a panic.
    output: Mutex<Option<DispatchTensor>>,
    pullbacks: Vec<Pullback<D>>,
    /// Mesh dimensions over which the gradient is summed where their step is pulled back.
    varying: Dims,
    /// The sum over all others.
    sum: Option<Sum>,
    call: Call,
    kept: Weak<Kept<D>>,
}

/// The ranks over which a gradient is summed: one group for all mesh dimensions.
#[derive(Debug)]
struct Sum {
    comm: Arc<dyn Communicator>,
    /// Drawn in forward: see [`Call::drawn`].
    place: u64,
}

impl<const D: usize> GraphOp for Redistribution<D> {
    fn forward(&self, _: &[DispatchTensor]) -> DispatchTensor {
        self.output.lock().take().expect("a node of the graph is made once")
    }

    fn backward(&self, step: &mut BackwardStep<'_>) {
        if let Some(kept) = self.kept.upgrade() {
            kept.lock().take();
        }
        let grad = Tensor::from_dispatch(step.take());
        let grad = self.pull(grad).or_unwind();
        step.give(0, || grad.into_dispatch());
    }
}

impl<const D: usize> Redistribution<D> {
    /// The gradient of the input, from the gradient of the output.
    fn pull(&self, mut grad: Tensor<D>) -> Result<Tensor<D>> {
        for (at, pullback) in self.pullbacks.iter().enumerate().rev() {
            // A mesh dimension that takes two steps varies after the last.
            let later = &self.pullbacks[at + 1..];
            let is_last = !later.iter().any(|later| later.mesh_dims.iter().any(|dim| pullback.mesh_dims.contains(dim)));
            let varying = is_last && pullback.mesh_dims.iter().all(|dim| self.varying.contains(dim));
            grad = pullback.apply(&self.call, grad, varying)?;
        }
        if let Some(Sum { comm, place }) = &self.sum {
            grad = all_reduce_sum(comm.as_ref(), &self.call.clone().drawn(*place), grad)?;
        }
        Ok(grad)
    }
}
