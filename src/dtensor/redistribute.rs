//! Changing a layout: a plan's steps forward, and one node of the graph that undoes them.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::{Arc, Weak};

use burn::backend::DispatchTensor;
use burn::tensor::Tensor;
use parking_lot::Mutex;
use smallvec::SmallVec;

use super::handles::Kept;
use super::local::{associate, is_tracked};
use super::undo::{Undo, all_reduce_sum};
use super::{DTensor, DTensorSpec, Kind, step};
use crate::Result;
use crate::autodiff::{self, BackwardStep, GraphOp};
use crate::comm::{Call, Communicator, Phase};
use crate::placement::{Layout, Placement, Step, plan};

impl<const D: usize, K: Kind> DTensor<D, K> {
    /// The same tensor under other placements, cut in the order of the mesh dimensions.
    ///
    /// Differentiable (the table of [this module](super)); placements that do not change cost
    /// nothing. The steps are those of [`plan`].
    ///
    /// # Collective
    /// Every rank of the mesh.
    ///
    /// # Errors
    /// [`PlacementError`](crate::placement::PlacementError) for a wrong number of placements, a
    /// dimension out of range, or a Partial target that cannot be made (only `P(sum)` can, from
    /// `R` or `S(d)`); [`CommError`](crate::comm::CommError) if a collective fails.
    ///
    /// # Panics
    /// A collective that fails in backward unwinds the rank with its error; see
    /// [`Error::unwind`](crate::Error::unwind).
    pub fn redistribute(self, placements: &[Placement]) -> Result<Self> {
        if self.placements() == placements && self.layout().has_default_order() {
            return Ok(self);
        }
        let layout = Layout::new(self.mesh().shape(), placements)?;
        self.redistribute_to(&layout)
    }

    /// [`redistribute`](Self::redistribute) to a layout with an order of cuts of its own.
    ///
    /// # Collective
    /// Every rank of the mesh.
    ///
    /// # Errors
    /// As [`redistribute`](Self::redistribute), and
    /// [`LayoutMesh`](super::DTensorError::LayoutMesh) for a layout of another mesh shape.
    pub fn redistribute_to(self, layout: &Layout) -> Result<Self> {
        if self.layout() == layout {
            return Ok(self);
        }
        let spec = self.spec.with_layout(layout.clone())?;
        let route = Route::between(self.layout(), layout)?;
        let local = travel(self.local, &self.spec, &route, &[], Weak::new())?;
        Ok(Self::from_parts(local, spec.shared()))
    }

    /// The whole tensor, on every rank. Its gradient is replicated; see
    /// [`redistribute`](Self::redistribute).
    ///
    /// # Collective
    /// Every rank of the mesh.
    ///
    /// # Errors
    /// [`CommError`](crate::comm::CommError) if a collective fails.
    pub fn full_tensor(self) -> Result<Tensor<D, K>> {
        let replicate = Layout::replicate(self.mesh().shape())?;
        Ok(self.redistribute_to(&replicate)?.local)
    }
}

/// The steps from one layout to another, and what the collectives on the way are called.
#[derive(Debug)]
pub(super) struct Route {
    steps: Vec<(Step, Layout)>,
    label: Arc<str>,
}

/// Routes kept a thread; past that many planning starts anew.
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
        let label = format!("redistribute {from} -> {to}").into();
        let route = Arc::new(Self { steps, label });
        ROUTES.with_borrow_mut(|routes| {
            if routes.values().map(HashMap::len).sum::<usize>() >= CAPACITY {
                routes.clear();
            }
            let from = routes.entry(from.clone()).or_default();
            from.insert(to.clone(), route.clone());
        });
        Ok(route)
    }
}

/// Walks `route` with a tensor laid out as `from`, then lets it vary over the mesh dimensions
/// `varying`: its gradient is summed over them. Records one node if anything happens and `local`
/// is tracked; when its backward has run, what is `kept` of it is let go.
///
/// # Collective
/// Every rank of the mesh.
pub(super) fn travel<const D: usize, K: Kind>(
    local: Tensor<D, K>,
    from: &DTensorSpec,
    route: &Route,
    varying: &[usize],
    kept: Weak<Kept<D>>,
) -> Result<Tensor<D, K>> {
    let tracked = is_tracked(&local);
    if route.steps.is_empty() && (varying.is_empty() || !tracked) {
        return Ok(local);
    }
    let call = from.call(Call::new(route.label.clone()));
    let strategy = local.gradient_checkpointing_strategy();
    let (mut moved, mut undos) = (local.clone().inner(), Vec::new());
    let mut before = None;
    for (step, after) in &route.steps {
        let spec = before.as_ref().unwrap_or(from);
        let call = call.clone().in_phase(Phase::Forward);
        let (next, undo) = step::run(*step, spec, moved, call, tracked)?;
        moved = next;
        if tracked {
            undos.push(undo);
        }
        before = Some(from.with_layout(after.clone())?);
    }
    if !tracked {
        return Ok(associate(moved, strategy));
    }
    let summed = |&mesh_dim: &usize| {
        let comm = from.mesh().communicator(mesh_dim)?.clone();
        Ok(Varying { mesh_dim, place: comm.draw(), comm })
    };
    let varying: Result<_> = varying.iter().map(summed).collect();
    let op = Redistribution {
        output: Mutex::new(Some(moved.into_dispatch())),
        undos,
        varying: varying?,
        call: call.in_phase(Phase::Backward),
        kept,
    };
    let local = autodiff::unary(local.into_dispatch(), Arc::new(op));
    Ok(Tensor::from_dispatch(local))
}

/// A change of layout in the graph.
#[derive(Debug)]
struct Redistribution<const D: usize> {
    /// Made before the node, so that a failing collective is an error and not a panic.
    output: Mutex<Option<DispatchTensor>>,
    undos: Vec<Undo<D>>,
    varying: SmallVec<[Varying; 1]>,
    call: Call,
    kept: Weak<Kept<D>>,
}

/// A mesh dimension over which a gradient is summed.
#[derive(Debug, Clone)]
struct Varying {
    mesh_dim: usize,
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
        let grad = self.pull(grad).unwrap_or_else(|error| error.unwind());
        step.give(0, || grad.into_dispatch());
    }
}

impl<const D: usize> Redistribution<D> {
    /// The gradient of the input, from the gradient of the output.
    fn pull(&self, mut grad: Tensor<D>) -> Result<Tensor<D>> {
        let mut varying = self.varying.clone();
        for undo in self.undos.iter().rev() {
            let found = varying.iter().position(|varying| varying.mesh_dim == undo.mesh_dim);
            let was_varying = found.map(|at| varying.remove(at)).is_some();
            grad = undo.apply(&self.call, grad, was_varying)?;
        }
        for Varying { comm, place, .. } in &varying {
            grad = all_reduce_sum(comm.as_ref(), &self.call.clone().drawn(*place), grad)?;
        }
        Ok(grad)
    }
}
