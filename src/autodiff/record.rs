//! Records a [`GraphOp`](super::GraphOp) as a node of burn's autodiff graph.

use std::fmt;
use std::marker::PhantomData;

#[cfg(feature = "flex")]
use burn::backend::DispatchTensorKind;
#[cfg(feature = "flex")]
use burn::backend::Flex;
use burn::backend::autodiff::NodeId;
use burn::backend::autodiff::checkpoint::{
    base::Checkpointer,
    retro_forward::RetroForward,
    state::BackwardStates,
    strategy::{BalancedCheckpointing, CheckpointStrategy},
};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, DispatchTensor};

use super::{BackwardId, BackwardStep, GradStore, GraphOps, Retain, SharedGraphOp, Wrap, running};
use crate::burn_compat::internals::backward_number;

impl<B: Wrap + GraphOps, C: CheckpointStrategy> GraphOps for Autodiff<B, C> {
    fn graph_unary(parent: FloatTensor<Self>, op: SharedGraphOp) -> FloatTensor<Self> {
        let output = B::graph_unary(parent.primitive().clone(), op.clone());
        record::<B, C, 1>([parent], op, output)
    }

    fn graph_binary(
        a: FloatTensor<Self>,
        b: FloatTensor<Self>,
        op: SharedGraphOp,
    ) -> FloatTensor<Self> {
        let output = B::graph_binary(a.primitive().clone(), b.primitive().clone(), op.clone());
        record::<B, C, 2>([a, b], op, output)
    }

    fn graph_node(tensor: FloatTensor<Self>) -> Option<NodeId> {
        Some(tensor.id())
    }
}

fn record<B: Wrap, C: CheckpointStrategy, const N: usize>(
    parents: [FloatTensor<Autodiff<B, C>>; N],
    op: SharedGraphOp,
    output: FloatTensor<B>,
) -> FloatTensor<Autodiff<B, C>> {
    let guards = parents.each_ref().map(|parent| parent.node());
    match op.retain() {
        Retain::Output => {
            let prep = Backward::<B, N>::prepare::<C>(RecordedNode, guards).compute_bound();
            match prep.stateful() {
                OpsKind::Tracked(prep) => prep.finish(op, output),
                OpsKind::UnTracked(prep) => prep.finish(output),
            }
        }
        // `prepare` may use a strategy other than the device's. Under `Balanced`, the operations
        // that read this output store how to recompute it, and not its value. burn cannot refer to
        // an untracked parent there, and cannot recompute an untracked node.
        Retain::Recompute => {
            let tracked: Vec<_> = parents
                .iter()
                .filter(|parent| parent.is_tracked())
                .collect();
            let again = RecomputeOutput::<B> {
                parents: tracked.iter().map(|parent| parent.id()).collect(),
                op: op.clone(),
                backend: PhantomData,
            };
            let prep = Backward::<B, N>::prepare::<BalancedCheckpointing>(RecordedNode, guards)
                .memory_bound()
                .retro_forward(again)
                .parents(tracked);
            match prep.stateful() {
                OpsKind::Tracked(prep) => prep.finish(op, output),
                OpsKind::UnTracked(prep) => prep.finish(output),
            }
        }
    }
}

/// Backward step of any [`GraphOp`](super::GraphOp).
#[derive(Debug)]
struct RecordedNode;

impl<B: Wrap, const N: usize> Backward<B, N> for RecordedNode {
    type State = SharedGraphOp;

    fn backward(
        self,
        ops: Ops<SharedGraphOp, N>,
        grads: &mut Gradients,
        checkpointer: &mut Checkpointer,
    ) {
        let parents = ops
            .parents
            .each_ref()
            .map(|node| node.as_ref().map(|node| node.id));
        let mut store = Store::<B, N> {
            ops: &ops,
            grads,
            checkpointer,
            backend: PhantomData,
        };
        let (node, depth) = (ops.node.id, ops.node.order);
        let mut step = BackwardStep {
            node,
            depth,
            parents: &parents,
            grads: &mut store,
        };
        running(&ops.state, &mut step);
    }
}

struct Store<'a, B, const N: usize> {
    ops: &'a Ops<SharedGraphOp, N>,
    grads: &'a mut Gradients,
    checkpointer: &'a Checkpointer,
    backend: PhantomData<B>,
}

impl<B: Wrap, const N: usize> GradStore for Store<'_, B, N> {
    fn backward(&mut self) -> BackwardId {
        BackwardId(backward_number(self.grads))
    }

    fn write_checkpointer(&self, to: &mut dyn fmt::Write) -> fmt::Result {
        write!(to, "{:?}", self.checkpointer)
    }

    fn take(&mut self) -> DispatchTensor {
        B::wrap(self.grads.consume::<B>(&self.ops.node))
    }

    fn add(&mut self, id: NodeId, grad: DispatchTensor) {
        self.grads.register::<B>(id, B::unwrap(grad));
    }

    fn add_elsewhere(&mut self, id: NodeId, grad: DispatchTensor) {
        match grad.kind {
            #[cfg(feature = "flex")]
            DispatchTensorKind::Flex(_) => self.grads.register::<Flex>(id, Flex::unwrap(grad)),
            _ => self.add(id, grad),
        }
    }
}

/// Recomputes an operation's output during backward.
struct RecomputeOutput<B> {
    parents: Vec<NodeId>,
    op: SharedGraphOp,
    backend: PhantomData<fn() -> B>,
}

/// Without the operation, because burn prints this for every node of a graph.
impl<B> fmt::Debug for RecomputeOutput<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RecomputeOutput")
            .field("parents", &self.parents)
            .finish_non_exhaustive()
    }
}

impl<B: Wrap> RetroForward for RecomputeOutput<B> {
    fn forward(&self, states: &mut BackwardStates, out_node: NodeId) {
        // Reading a state decrements its count. So every parent that burn knows of is read, whether
        // or not it is used.
        let parents: Vec<_> = self
            .parents
            .iter()
            .map(|id| B::wrap(states.get_state::<FloatTensor<B>>(id)))
            .collect();
        states.save(out_node, B::unwrap(self.op.recompute(&parents)));
    }
}
