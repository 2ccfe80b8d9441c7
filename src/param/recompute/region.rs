//! Autodiff nodes of a checkpointed block.
//!
//! ```text
//!   flush, inputs, the previous token ─> RecomputeNode ─> one RegionOutput per output
//! ```
//!
//! The gate (the `RecomputeNode`) is the parent of all outputs. It runs when all their gradients
//! are complete, and recomputes the block. It is deeper than the inputs of the block and than the
//! tokens (post-backward nodes) of enclosing units, so the weights of those units are still
//! present. If units were entered in the block, the gate is the last token for units that are
//! entered later. Every backward that reaches an enclosing unit then reaches them too, on every
//! rank, as rules 7 and 8 of [`graph`](crate::param::backward_nodes) require.

use std::fmt;
use std::sync::{Arc, OnceLock};

use burn::backend::autodiff::NodeId;
use burn::backend::{AutodiffBackend, Dispatch, DispatchTensor};
use parking_lot::Mutex;
use smallvec::SmallVec;

use super::context;
use crate::autodiff::{self, BackwardId, BackwardStep, GraphOp};
use crate::param::backward_nodes::own_leaf;
use crate::param::backward_nodes::{Like, RootPostBackward, give, nothing, one_graph, reduce};
use crate::param::reduction::Reduced;
use crate::param::steps;
use crate::param::unit_pass::{BackwardScheduler, UnitPass};

/// Recomputation of a block.
pub(super) trait Recompute: Send {
    /// Recomputes the block, and returns the gradients of its inputs and parameters, given those of
    /// its outputs.
    fn run(
        self: Box<Self>,
        grads: Vec<Option<DispatchTensor>>,
        backward: BackwardId,
        scheduler: &BackwardScheduler,
    ) -> Recomputed;
}

/// Gradients of a block's inputs and parameters.
pub(super) struct Recomputed {
    /// Gradients of the tracked inputs.
    pub(super) inputs: Vec<Option<DispatchTensor>>,
    /// Gradients of leaves that no unit gathers.
    pub(super) leaves: Reduced,
    /// Gradients of shards, which were reduced during the recomputation.
    pub(super) reduced: Reduced,
}

/// A block between forward and backward. Like a [`UnitPass`], it holds no tensor of the graph.
pub(super) struct RecomputeRegion {
    recompute: Mutex<Option<Box<dyn Recompute>>>,
    /// Gradient of each output that backward has reached.
    grads: Mutex<Vec<Option<DispatchTensor>>>,
    /// The tracked inputs.
    inputs: Vec<(NodeId, Like)>,
    /// The passes of units inside the block.
    passes: Vec<Arc<UnitPass>>,
    /// The passes and reductions of the thread that ran the block.
    scheduler: Arc<BackwardScheduler>,
    /// The gate's node.
    gate: OnceLock<NodeId>,
}

impl fmt::Debug for RecomputeRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RecomputeRegion")
            .field("inputs", &self.inputs)
            .field("passes", &self.passes)
            .finish_non_exhaustive()
    }
}

impl RecomputeRegion {
    /// Creates a block with these tracked inputs, and `outputs` outputs.
    pub(super) fn new(
        recompute: Box<dyn Recompute>,
        inputs: &[DispatchTensor],
        outputs: usize,
        passes: Vec<Arc<UnitPass>>,
        scheduler: Arc<BackwardScheduler>,
    ) -> Arc<Self> {
        Arc::new(Self {
            recompute: Mutex::new(Some(recompute)),
            grads: Mutex::new(vec![None; outputs]),
            inputs: inputs
                .iter()
                .filter_map(|tensor| Some((autodiff::node_id(tensor.clone())?, Like::of(tensor))))
                .collect(),
            passes,
            scheduler,
            gate: OnceLock::new(),
        })
    }

    /// Creates the block's gate as a child of `inputs`, of the previous token `last`, and of a
    /// `leaf`. `top` is true if no other block is running.
    pub(super) fn gate(
        self: &Arc<Self>,
        leaf: Option<DispatchTensor>,
        inputs: Vec<DispatchTensor>,
        last: Option<DispatchTensor>,
        top: bool,
    ) -> DispatchTensor {
        let reduced: SmallVec<_> = self
            .passes
            .iter()
            .filter(|pass| pass.is_reduced())
            .cloned()
            .collect();
        let first = match leaf {
            Some(leaf) if top && !reduced.is_empty() => {
                let own = own_leaf(&leaf);
                self.passes
                    .iter()
                    .for_each(|pass| pass.passes.set_own_leaf(&Arc::downgrade(pass), own.clone()));
                Some(autodiff::binary(
                    leaf,
                    own,
                    Arc::new(RootPostBackward(reduced)),
                ))
            }
            leaf => leaf,
        };
        let like = first
            .iter()
            .chain(&inputs)
            .next()
            .expect("at least one input or parameter is tracked")
            .clone();
        let mut parents: Vec<_> = first.into_iter().chain(inputs).chain(last).collect();
        parents.retain(|parent| one_graph(parent, &like));
        let lowest = parents.pop().expect("`like` is one of the parents");
        let link = |gate, parent| autodiff::binary(gate, parent, Arc::new(RecomputeNode(None)));
        let gate = Arc::new(RecomputeNode(Some(self.clone())));
        let gate = match parents.into_iter().reduce(link) {
            Some(links) => autodiff::binary(links, lowest, gate),
            None => autodiff::unary(lowest, gate),
        };
        if let Some(node) = autodiff::node_id(gate.clone()) {
            self.scheduler.padding.add(*self.gate.get_or_init(|| node));
        }
        gate
    }

    /// Creates an output node with this value.
    pub(super) fn output(
        self: &Arc<Self>,
        gate: &DispatchTensor,
        index: usize,
        value: DispatchTensor,
    ) -> DispatchTensor {
        let output = RegionOutput {
            block: self.clone(),
            index,
            value: Mutex::new(Some(value)),
        };
        autodiff::unary(gate.clone(), Arc::new(output))
    }

    /// Runs when the gradients are complete. If backward reached no output, the passes inside end
    /// without a recomputation.
    fn backward(&self, step: &mut BackwardStep<'_>) {
        let grads = std::mem::take(&mut *self.grads.lock());
        let recompute = self.recompute.lock().take().expect("a node runs once");
        let mut inputs = match grads.iter().any(Option::is_some) {
            true => {
                let Recomputed {
                    inputs,
                    leaves,
                    reduced,
                } = recompute.run(grads, step.backward(), &self.scheduler);
                for (leaf, grad) in leaves {
                    steps::refuse_direct(leaf);
                    step.give_to(leaf, grad);
                }
                give(reduced, step);
                inputs
            }
            false => {
                self.passes.first().inspect(|first| first.gather_around());
                for pass in self.passes.iter().rev() {
                    pass.progress.token(step.depth());
                    reduce(pass, pass.finish(), step);
                }
                Vec::new()
            }
        };
        inputs.resize(self.inputs.len(), None);
        let padding = &self.scheduler.padding;
        if inputs.iter().any(Option::is_none) {
            let program = context::backward(step.backward());
            padding.pad(step, program);
        } else {
            // It passes gradients on as any node does. It would be removed when it is dropped, but
            // an output that the loss leaves out keeps it until backward has ended.
            self.ended();
        }
        for ((node, like), grad) in self.inputs.iter().zip(inputs) {
            if grad.is_some() {
                padding.reach(*node);
            }
            // The node that made the input expects a gradient.
            step.give_to(*node, grad.unwrap_or_else(|| like.zeros()));
        }
    }

    /// The gate no longer orders the backward.
    fn ended(&self) {
        self.gate
            .get()
            .into_iter()
            .for_each(|gate| self.scheduler.padding.remove(*gate));
    }
}

impl Drop for RecomputeRegion {
    fn drop(&mut self) {
        self.ended();
    }
}

/// Recomputes the block. As a link (`None`), it only adds one more parent to the gate.
#[derive(Debug)]
struct RecomputeNode(Option<Arc<RecomputeRegion>>);

impl GraphOp for RecomputeNode {
    fn forward(&self, parents: &[DispatchTensor]) -> DispatchTensor {
        nothing(&parents[0])
    }

    fn backward(&self, step: &mut BackwardStep<'_>) {
        // Before the nodes of the block's private graph.
        steps::note(step);
        self.0.iter().for_each(|block| block.backward(step));
    }
}

/// Node of one output. Its parent is the gate.
#[derive(Debug)]
struct RegionOutput {
    block: Arc<RecomputeRegion>,
    index: usize,
    /// Value of the output, until the node is created.
    value: Mutex<Option<DispatchTensor>>,
}

impl GraphOp for RegionOutput {
    fn forward(&self, _: &[DispatchTensor]) -> DispatchTensor {
        self.value.lock().take().expect("a node is recorded once")
    }

    fn backward(&self, step: &mut BackwardStep<'_>) {
        let grad = step.take();
        if self.block.scheduler.padding.is_reached(step.node()) {
            self.block.grads.lock()[self.index] = Some(grad);
        }
    }
}

/// Assigns a gradient to a recomputed output. Parents: the output, and the rest of the nodes that
/// backward must reach.
#[derive(Debug)]
struct GradSeed(Mutex<Option<DispatchTensor>>);

impl GraphOp for GradSeed {
    fn forward(&self, parents: &[DispatchTensor]) -> DispatchTensor {
        nothing(&parents[0])
    }

    fn backward(&self, step: &mut BackwardStep<'_>) {
        let grad = self.0.lock().take().expect("a node runs once");
        step.give(0, || grad);
    }
}

/// Runs backward from outputs of one graph with the given gradients, and from all ancestors of
/// `last`. Returns `None` if there are neither outputs nor `last`.
pub(super) fn backward_from(
    outputs: Vec<(DispatchTensor, DispatchTensor)>,
    last: Option<DispatchTensor>,
    anchor: DispatchTensor,
) -> Option<<Dispatch as AutodiffBackend>::Gradients> {
    if outputs.is_empty() && last.is_none() {
        return None;
    }
    let root = outputs
        .into_iter()
        .fold(last.unwrap_or(anchor), |root, (output, grad)| {
            autodiff::binary(output, root, Arc::new(GradSeed(Mutex::new(Some(grad)))))
        });
    Some(Dispatch::backward(root))
}
