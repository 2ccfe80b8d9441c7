//! A checkpointed block's nodes in the autodiff graph.
//!
//! ```text
//!   flush, inputs, the last token before ─> RecomputeNode ─> RegionOutput, one for each
//! ```
//!
//! The gate lies one node above the outputs: it runs once all their gradients are there, and computes the block again. It
//! lies below what the block was given, and below the tokens of the units around: their weights are still there. To units
//! that are entered later it is the last token, if units were entered in the block: so these come up in every backward that
//! reaches what encloses them, on every rank, as rules 7 and 8 of [`graph`](crate::param::backward_nodes) have it.

use std::fmt;
use std::sync::Arc;

use burn::backend::autodiff::NodeId;
use burn::backend::{AutodiffBackend, Dispatch, DispatchTensor};
use parking_lot::Mutex;

use crate::autodiff::{self, BackwardId, BackwardStep, GraphOp};
use crate::param::backward_nodes::{Like, RootPostBackward, give, nothing, one_graph, reduce};
use crate::param::scope::pad;
use crate::param::sweep::own_leaf;
use crate::param::unit_pass::{Reduced, UnitPass};

/// What computes a block again.
pub(super) trait Recompute: Send {
    /// Computes it, and the gradients of what it was given by those of its outputs.
    fn run(self: Box<Self>, grads: Vec<Option<DispatchTensor>>, backward: BackwardId) -> Recomputed;
}

/// Gradients of what a block was given.
pub(super) struct Recomputed {
    /// Of the tracked inputs.
    pub(super) inputs: Vec<Option<DispatchTensor>>,
    /// Of leaves that no unit gathers.
    pub(super) leaves: Reduced,
    /// Of shards, that were reduced meanwhile.
    pub(super) reduced: Reduced,
}

/// A block between forward and backward. As a [`UnitPass`] it holds no tensor of the graph.
pub(super) struct RecomputeRegion {
    recompute: Mutex<Option<Box<dyn Recompute>>>,
    /// Of each output, once backward has come to it.
    grads: Mutex<Vec<Option<DispatchTensor>>>,
    /// The tracked inputs.
    inputs: Vec<(NodeId, Like)>,
    /// The passes inside.
    passes: Vec<Arc<UnitPass>>,
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
    /// With these tracked inputs, and so many outputs.
    pub(super) fn new(
        recompute: Box<dyn Recompute>,
        inputs: &[DispatchTensor],
        outputs: usize,
        passes: Vec<Arc<UnitPass>>,
    ) -> Arc<Self> {
        let input = |tensor: &DispatchTensor| Some((autodiff::node_id(tensor.clone())?, Like::of(tensor)));
        Arc::new(Self {
            recompute: Mutex::new(Some(recompute)),
            grads: Mutex::new(vec![None; outputs]),
            inputs: inputs.iter().filter_map(input).collect(),
            passes,
        })
    }

    /// Its gate, below `inputs`, the token `last` before it, and a `leaf`; `top` if no other block computes around it.
    pub(super) fn gate(
        self: &Arc<Self>,
        leaf: Option<DispatchTensor>,
        inputs: Vec<DispatchTensor>,
        last: Option<DispatchTensor>,
        top: bool,
    ) -> DispatchTensor {
        let reduced: Vec<_> = self.passes.iter().filter(|pass| pass.is_reduced()).cloned().collect();
        let first = match leaf {
            Some(leaf) if top && !reduced.is_empty() => {
                let own = own_leaf(&leaf);
                self.passes.iter().for_each(|pass| pass.passes.hang(&Arc::downgrade(pass), own.clone()));
                Some(autodiff::binary(leaf, own, Arc::new(RootPostBackward::new(reduced))))
            }
            leaf => leaf,
        };
        let like = first.iter().chain(&inputs).next().expect("something is tracked").clone();
        let mut parents: Vec<_> = first.into_iter().chain(inputs).chain(last).collect();
        parents.retain(|parent| one_graph(parent, &like));
        let lowest = parents.pop().expect("`like` is one");
        let link = |gate, parent| autodiff::binary(gate, parent, Arc::new(RecomputeNode(None)));
        let gate = Arc::new(RecomputeNode(Some(self.clone())));
        match parents.into_iter().reduce(link) {
            Some(links) => autodiff::binary(links, lowest, gate),
            None => autodiff::unary(lowest, gate),
        }
    }

    /// One of its outputs, of this value.
    pub(super) fn output(
        self: &Arc<Self>,
        gate: &DispatchTensor,
        index: usize,
        value: DispatchTensor,
    ) -> DispatchTensor {
        let output = RegionOutput { block: self.clone(), index, value: Mutex::new(Some(value)) };
        autodiff::unary(gate.clone(), Arc::new(output))
    }

    /// The gradients are there, if backward has come to an output at all.
    fn backward(&self, step: &mut BackwardStep<'_>) {
        let grads = std::mem::take(&mut *self.grads.lock());
        let recompute = self.recompute.lock().take().expect("a node runs once");
        let mut inputs = match grads.iter().any(Option::is_some) {
            true => {
                let Recomputed { inputs, leaves, reduced } = recompute.run(grads, step.backward());
                leaves.into_iter().for_each(|(leaf, grad)| step.give_to(leaf, grad));
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
        for ((node, like), grad) in self.inputs.iter().zip(inputs) {
            // Whatever made the input expects a gradient.
            let zeros = || {
                pad();
                like.zeros()
            };
            step.give_to(*node, grad.unwrap_or_else(zeros));
        }
    }
}

/// Computes the block again, or, as a link, ties its gate to one thing more.
#[derive(Debug)]
struct RecomputeNode(Option<Arc<RecomputeRegion>>);

impl GraphOp for RecomputeNode {
    fn forward(&self, parents: &[DispatchTensor]) -> DispatchTensor {
        nothing(&parents[0])
    }

    fn backward(&self, step: &mut BackwardStep<'_>) {
        self.0.iter().for_each(|block| block.backward(step));
    }
}

/// An output. Parent: the gate.
#[derive(Debug)]
struct RegionOutput {
    block: Arc<RecomputeRegion>,
    index: usize,
    /// Until the node is made.
    value: Mutex<Option<DispatchTensor>>,
}

impl GraphOp for RegionOutput {
    fn forward(&self, _: &[DispatchTensor]) -> DispatchTensor {
        self.value.lock().take().expect("a node of the graph is made once")
    }

    fn backward(&self, step: &mut BackwardStep<'_>) {
        self.block.grads.lock()[self.index] = Some(step.take());
    }
}

/// Gives an output, computed again, its gradient. Parents: the output, what else is to come up.
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

/// Runs backward from outputs of one graph with their gradients, through all that `last` hangs on, too. `None` if there is
/// nothing to run through.
pub(super) fn backward_from(
    outputs: Vec<(DispatchTensor, DispatchTensor)>,
    last: Option<DispatchTensor>,
    anchor: DispatchTensor,
) -> Option<<Dispatch as AutodiffBackend>::Gradients> {
    if outputs.is_empty() && last.is_none() {
        return None;
    }
    let root = outputs.into_iter().fold(last.unwrap_or(anchor), |root, (output, grad)| {
        autodiff::binary(output, root, Arc::new(GradSeed(Mutex::new(Some(grad)))))
    });
    Some(Dispatch::backward(root))
}
