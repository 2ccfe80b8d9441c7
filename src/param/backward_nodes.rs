#![doc = include_str!("backward.md")]

use std::sync::{Arc, Weak};

use burn::backend::ops::FloatTensorOps;
use burn::backend::{Dispatch, DispatchDevice, DispatchTensor, TensorMetadata};
use burn::tensor::{DType, Shape};
use parking_lot::Mutex;
use smallvec::SmallVec;

use super::precision::cast;
use super::recompute::context;
use super::storage::UnshardedParams;
use super::unit_pass::{Reduced, UnitPass};
use crate::autodiff::{self, BackwardStep, GraphOp, Retain};
use crate::dtensor::MeshDims;

/// Metadata of a tensor, sufficient to create zeros like it.
#[derive(Debug)]
pub(super) struct Like {
    shape: Shape,
    dtype: DType,
    device: DispatchDevice,
}

impl Like {
    pub(super) fn of(tensor: &DispatchTensor) -> Self {
        Self { shape: tensor.shape(), dtype: tensor.dtype(), device: tensor.device().inner() }
    }

    pub(super) fn zeros(&self) -> DispatchTensor {
        Dispatch::float_zeros(self.shape.clone(), &self.device, self.dtype.into())
    }
}

/// Autodiff node that runs at the end of backward (rule 6). Its parent is a leaf.
///
/// It keeps its passes alive until then, because their gradients may still be held: one pass, or all passes of a
/// checkpointed block.
#[derive(Debug)]
pub(super) struct RootPostBackward {
    passes: SmallVec<[Arc<UnitPass>; 1]>,
}

impl RootPostBackward {
    /// Creates the node for some passes of one rank.
    pub(super) fn new(passes: impl IntoIterator<Item = Arc<UnitPass>>) -> Self {
        Self { passes: passes.into_iter().collect() }
    }
}

impl GraphOp for RootPostBackward {
    fn forward(&self, parents: &[DispatchTensor]) -> DispatchTensor {
        nothing(&parents[0])
    }

    fn backward(&self, step: &mut BackwardStep<'_>) {
        for pass in &self.passes {
            pass.progress.flush(step.depth());
            reduce(pass, pass.passes.order.flush(), step);
            give(pass.passes.reduce_waiting(step.backward(), pass), step);
            give(pass.passes.finish(step.backward()), step);
            ran("RootPostBackward", Some(pass), step);
        }
    }
}

/// Issues the reductions of `due` one after the other. Completed gradients of earlier reductions are registered on
/// the shards' leaves.
pub(super) fn reduce(pass: &UnitPass, due: Vec<Weak<UnitPass>>, step: &mut BackwardStep<'_>) {
    give(pass.passes.reduce(due, context::backward(step.backward())), step);
}

/// Registers gradients on their leaves. While a checkpointed block is recomputed, they are kept for the graph around
/// the block instead.
pub(super) fn give(reduced: Reduced, step: &mut BackwardStep<'_>) {
    let own = context::keep(reduced).into_iter().flatten();
    own.for_each(|(leaf, grad)| step.give_to(leaf, grad));
}

/// Records, for the debug checks, that a node that depends on the pass's token runs. In the graph of a checkpointed
/// block, nodes of passes around the block are skipped, because they have other depths there.
fn progress(pass: &Arc<UnitPass>, step: &BackwardStep<'_>) {
    if cfg!(debug_assertions) && !context::is_outside(pass) {
        pass.progress.node(step.depth());
    }
}

/// Records for tests that the node's backward has run.
#[cfg(feature = "testing")]
fn ran(node: &'static str, pass: Option<&Arc<UnitPass>>, step: &BackwardStep<'_>) {
    super::trace::ran(node, pass, step.depth());
}

#[cfg(not(feature = "testing"))]
fn ran(_: &'static str, _: Option<&Arc<UnitPass>>, _: &BackwardStep<'_>) {}

/// Returns true if one operation can have both tensors as parents.
pub(super) fn one_graph(a: &DispatchTensor, b: &DispatchTensor) -> bool {
    a.autodiff == b.autodiff && a.device() == b.device()
}

/// Returns the value of a node that exists only for its position in the graph.
pub(super) fn nothing(like: &DispatchTensor) -> DispatchTensor {
    Dispatch::float_zeros([1].into(), &like.device(), like.dtype().into())
}

/// Autodiff node that makes a unit's parameters depend on what precedes the unit (rules 2 to 4 and 7): the unit's
/// token, or a link of it. Its parents are the [`RootPostBackward`] of a shard or the previous link, and the tensor
/// to which it ties the unit.
#[derive(Debug)]
pub(super) struct PostBackward {
    pass: Arc<UnitPass>,
    /// Index and metadata of the input that this link ties, if any.
    input: Option<(usize, Like)>,
    /// True if the unit's parameters depend on this link, which makes it the token.
    last: bool,
}

impl PostBackward {
    /// Creates a link to this tracked input, or to an earlier token or nothing if `input` is `None`. `last` makes the
    /// link the unit's token.
    pub(super) fn new(pass: &Arc<UnitPass>, input: Option<&DispatchTensor>, last: bool) -> Arc<Self> {
        let input = input.map(|tensor| (pass.add_input(autodiff::node_id(tensor.clone())), Like::of(tensor)));
        Arc::new(Self { pass: pass.clone(), input, last })
    }
}

impl GraphOp for PostBackward {
    fn forward(&self, parents: &[DispatchTensor]) -> DispatchTensor {
        match &self.input {
            None if !self.last => parents[0].clone(),
            _ => nothing(&parents[0]),
        }
    }

    fn backward(&self, step: &mut BackwardStep<'_>) {
        if self.last {
            self.pass.progress.token(step.depth());
            reduce(&self.pass, self.pass.finish(), step);
        }
        // The operation that produced the input expects a gradient, even if the unit never used the input.
        if let Some((number, like)) = &self.input
            && !self.pass.input_seen(*number)
        {
            self.pass.passes.order.pad();
            UnitPass::pad(self.pass.around());
            self.pass.gather_around();
            step.give(1, || like.zeros());
        }
        ran(if self.last { "PostBackward" } else { "Link" }, Some(&self.pass), step);
    }
}

/// Autodiff node of an unsharded parameter. Its parents are the shard's leaf and the token.
#[derive(Debug)]
pub(super) struct UnshardedParamNode {
    pub(super) pass: Arc<UnitPass>,
    pub(super) position: usize,
    pub(super) retain: Retain,
}

impl GraphOp for UnshardedParamNode {
    fn forward(&self, _: &[DispatchTensor]) -> DispatchTensor {
        self.pass.buffer.view(self.position)
    }

    fn recompute(&self, _: &[DispatchTensor]) -> DispatchTensor {
        self.pass.buffer.view_again(self.position)
    }

    fn retain(&self) -> Retain {
        self.retain
    }

    fn backward(&self, step: &mut BackwardStep<'_>) {
        progress(&self.pass, step);
        self.pass.collect(self.position, step.take());
        ran("UnshardedParamNode", Some(&self.pass), step);
    }
}

/// Autodiff node of an unsharded parameter whose gradient differs between the tensor-parallel ranks. Its parents are
/// the shard's leaf and the token.
#[derive(Debug)]
pub(super) struct PartialGradParamNode {
    pub(super) pass: Arc<UnitPass>,
    pub(super) position: usize,
    /// Mesh dimensions over which the gradients are summed.
    pub(super) dims: MeshDims,
    pub(super) retain: Retain,
    /// Gathered value, until the node is created.
    pub(super) value: Mutex<Option<DispatchTensor>>,
}

impl GraphOp for PartialGradParamNode {
    fn forward(&self, _: &[DispatchTensor]) -> DispatchTensor {
        self.value.lock().take().expect("a graph node is created only once")
    }

    fn recompute(&self, _: &[DispatchTensor]) -> DispatchTensor {
        self.pass.buffer.view_again(self.position)
    }

    fn retain(&self) -> Retain {
        self.retain
    }

    fn backward(&self, step: &mut BackwardStep<'_>) {
        progress(&self.pass, step);
        self.pass.buffer.reduce_in_term(self.position, &self.dims, step.take());
        ran("PartialGradParamNode", Some(&self.pass), step);
    }
}

/// Autodiff node of a tracked input, cast to the dtype of the unit's inputs (rule 2). Its parents are the input and
/// the token.
#[derive(Debug)]
pub(super) struct UnitInput {
    pub(super) pass: Arc<UnitPass>,
    pub(super) input: usize,
    /// Dtype of the input before the cast.
    pub(super) dtype: DType,
}

impl GraphOp for UnitInput {
    fn forward(&self, parents: &[DispatchTensor]) -> DispatchTensor {
        cast(parents[0].clone(), self.pass.buffer.unit().precision().inputs)
    }

    fn backward(&self, step: &mut BackwardStep<'_>) {
        progress(&self.pass, step);
        self.pass.see_input(self.input);
        let grad = step.take();
        step.give(0, || cast(grad, Some(self.dtype)));
        ran("UnitInput", Some(&self.pass), step);
    }
}

/// Autodiff node of an output, cast to the dtype of the unit's outputs (rule 8). Its parents are the output and the
/// last token.
#[derive(Debug)]
pub(super) struct PreBackward {
    /// The pass of the unit; `None` for a module that only encloses units.
    pass: Option<Arc<UnitPass>>,
    /// Dtype of the output before the cast.
    dtype: DType,
}

impl PreBackward {
    pub(super) fn new(pass: Option<Arc<UnitPass>>, dtype: DType) -> Arc<Self> {
        Arc::new(Self { pass, dtype })
    }
}

impl GraphOp for PreBackward {
    fn forward(&self, parents: &[DispatchTensor]) -> DispatchTensor {
        let dtype = self.pass.as_ref().and_then(|pass| pass.buffer.unit().precision().outputs);
        UnshardedParams::copy_out(cast(parents[0].clone(), dtype))
    }

    fn backward(&self, step: &mut BackwardStep<'_>) {
        let grad = step.take();
        if let Some(pass) = &self.pass {
            pass.start_again();
            pass.buffer.gather_again();
            pass.see_output(&grad);
        }
        step.give(0, || cast(grad, Some(self.dtype)));
        ran("PreBackward", self.pass.as_ref(), step);
    }
}
