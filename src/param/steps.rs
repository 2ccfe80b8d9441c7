//! [`backward_with_steps`]: a backward in which gradients of shards are taken as soon as they are reduced.

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Weak};

use burn::backend::autodiff::NodeId;
use burn::backend::ops::FloatTensorOps;
use burn::backend::{Dispatch, DispatchTensor};

use super::ParamError;
use super::thread::scheduler;
use super::unit_pass::UnitPass;
use crate::Error;
use crate::autodiff::BackwardStep;
use crate::burn_compat::{GraphEdges, edges_of};

thread_local! {
    /// The steps of the backward that runs on this thread.
    static STEPS: RefCell<Option<BackwardSteps>> = const { RefCell::new(None) };
}

/// Takes the gradient of a shard, identified by its leaf.
pub(crate) type TakeGradient = Box<dyn FnMut(NodeId, DispatchTensor)>;

/// Shards of which a backward gives the gradients to a function instead of burn's container.
///
/// A gradient is complete when all passes that train its shard are reduced: the passes that wait
/// for a backward when this one begins. The passes then give up their handles to the shard, since
/// none of them gathers it again. If not all passes are in the graph of the loss, the gradient is
/// [left](LeftGradients) to the end.
struct BackwardSteps {
    awaited: HashMap<NodeId, AwaitedGradient>,
    /// Leaves whose gradients were taken.
    taken: HashSet<NodeId>,
    /// Paths of the shards' parameters.
    paths: HashMap<NodeId, String>,
    /// `None` while it runs.
    take: Option<TakeGradient>,
    /// Nodes of the units' passes that have run. No other node may have such a shard as parent.
    ran: HashSet<NodeId>,
    /// The nodes of the backward, once a node of a unit has run.
    edges: Option<GraphEdges>,
    /// Nodes that the backward must not contain.
    refused: HashSet<NodeId>,
    /// Unwinds if it does.
    refuse: fn() -> !,
}

#[derive(Default)]
struct AwaitedGradient {
    /// The passes that train the shard, with its position in each.
    passes: Vec<(Weak<UnitPass>, usize)>,
    received: usize,
    grad: Option<DispatchTensor>,
}

/// What a backward has left.
pub(crate) struct LeftGradients {
    /// Gradients of which a part may be missing: not all passes of their shards were reduced.
    pub(crate) grads: Vec<(NodeId, DispatchTensor)>,
    /// Path of a parameter to whose gradient an operation outside its unit contributes.
    pub(crate) direct: Option<String>,
}

/// Returns the leaves of the shards of which the next backward may reduce a gradient.
///
/// Local: these are passes that exist on this rank. They decide when it steps, and not what it sends.
pub(crate) fn awaited_leaves() -> HashSet<NodeId> {
    let passes = scheduler().awaiting();
    let leaves = passes.iter().flat_map(|pass| pass.leaves());
    leaves.map(|(_, leaf)| leaf).collect()
}

/// Runs `backward`, in which `take` gets the gradients of these shards, given with the paths of
/// their parameters, as soon as they are reduced. Calls `refuse`, before any gradient is taken, if the
/// graph contains one of the nodes `refused`.
///
/// # Panics
/// Unwinds with [`ParamError::LateGradient`] if a gradient follows one that was taken.
pub(crate) fn backward_with_steps<T>(
    paths: HashMap<NodeId, String>,
    take: TakeGradient,
    (refused, refuse): (HashSet<NodeId>, fn() -> !),
    backward: impl FnOnce() -> T,
) -> (T, LeftGradients) {
    /// Restores the steps of a backward around this one, also if it unwinds.
    struct StepsAround(Option<BackwardSteps>);

    impl Drop for StepsAround {
        fn drop(&mut self) {
            STEPS.set(self.0.take());
        }
    }

    let mut awaited: HashMap<NodeId, AwaitedGradient> = HashMap::new();
    for pass in scheduler().awaiting() {
        for (position, leaf) in pass.leaves() {
            if paths.contains_key(&leaf) {
                let awaited = awaited.entry(leaf).or_default();
                awaited.passes.push((Arc::downgrade(&pass), position));
            }
        }
    }
    let around = StepsAround(STEPS.replace(Some(BackwardSteps {
        awaited,
        taken: HashSet::new(),
        paths,
        take: Some(take),
        ran: HashSet::new(),
        edges: None,
        refused,
        refuse,
    })));
    let result = backward();
    let steps = STEPS.take().expect("only this function ends it");
    drop(around);
    let direct = steps.direct();
    let left = steps.awaited.into_iter();
    let grads = left.filter_map(|(leaf, awaited)| Some((leaf, awaited.grad?)));
    let left = LeftGradients {
        grads: grads.collect(),
        direct,
    };
    (result, left)
}

/// Takes a reduced gradient, or returns it if the backward that runs has no step of its shard.
pub(super) fn take(
    leaf: NodeId,
    grad: DispatchTensor,
    step: &BackwardStep<'_>,
) -> Option<DispatchTensor> {
    note_graph(step);
    let complete = STEPS.with_borrow_mut(|steps| match steps {
        Some(steps) => steps.receive(leaf, grad),
        None => Received::NotAwaited(grad),
    });
    match complete {
        Received::NotAwaited(grad) => Some(grad),
        Received::Incomplete => None,
        Received::Complete(grad, mut take) => {
            // Not while the steps are borrowed: it runs an optimizer.
            take(leaf, grad);
            STEPS.with_borrow_mut(|steps| {
                if let Some(steps) = steps {
                    steps.take = Some(take);
                }
            });
            None
        }
    }
}

/// Reads the graph of the backward that runs, and unwinds if it contains a node that is refused.
fn note_graph(step: &BackwardStep<'_>) {
    let refuse = STEPS.with_borrow_mut(|steps| {
        let steps = steps.as_mut().filter(|steps| steps.edges.is_none())?;
        let edges = steps.edges.insert(edges_of(step));
        let is_refused = edges.keys().any(|node| steps.refused.contains(node));
        is_refused.then_some(steps.refuse)
    });
    if let Some(refuse) = refuse {
        refuse()
    }
}

/// What has become of a gradient.
enum Received {
    NotAwaited(DispatchTensor),
    /// More parts follow.
    Incomplete,
    /// The gradient, and the function that takes it.
    Complete(DispatchTensor, TakeGradient),
}

/// Records that a node of a unit's pass runs, which may have shards as parents.
pub(super) fn note(step: &BackwardStep<'_>) {
    note_graph(step);
    STEPS.with_borrow_mut(|steps| {
        if let Some(steps) = steps {
            steps.ran.insert(step.node());
        }
    });
}

/// Unwinds if the gradient of this shard was or will be taken: it arrives outside its unit.
pub(super) fn refuse_direct(leaf: NodeId) {
    let path = STEPS.with_borrow(|steps| Some(steps.as_ref()?.paths.get(&leaf)?.clone()));
    if let Some(param) = path {
        Error::from(ParamError::LateGradient { param }).unwind()
    }
}

impl BackwardSteps {
    fn receive(&mut self, leaf: NodeId, grad: DispatchTensor) -> Received {
        let Some(path) = self.paths.get(&leaf) else {
            return Received::NotAwaited(grad);
        };
        if self.taken.contains(&leaf) {
            let param = path.clone();
            Error::from(ParamError::LateGradient { param }).unwind()
        }
        let awaited = self.awaited.entry(leaf).or_default();
        awaited.received += 1;
        let grad = match awaited.grad.take() {
            Some(before) => Dispatch::float_add(grad, before),
            None => grad,
        };
        let take = match awaited.received < awaited.passes.len() {
            true => None,
            false => self.take.take(),
        };
        let Some(take) = take else {
            awaited.grad = Some(grad);
            return Received::Incomplete;
        };
        let awaited = self.awaited.remove(&leaf);
        for (pass, position) in awaited.into_iter().flat_map(|awaited| awaited.passes) {
            let Some(pass) = pass.upgrade() else { continue };
            pass.unsharded.source.release_shard(position);
        }
        self.taken.insert(leaf);
        Received::Complete(grad, take)
    }

    /// Returns the path of a shard that is a parent of a node outside the units.
    fn direct(&self) -> Option<String> {
        let outside = self
            .edges
            .iter()
            .flatten()
            .filter(|(node, _)| !self.ran.contains(node));
        let mut parents = outside.flat_map(|(_, parents)| parents);
        parents.find_map(|parent| self.paths.get(parent)).cloned()
    }
}
