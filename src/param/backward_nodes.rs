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

/// A tensor's metadata: enough to make zeros like it.
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

/// Sees the end of backward: rule 6. Parent: a leaf.
///
/// Until then it keeps the passes alive, whose gradients may be held: one, or all of a checkpointed block.
#[derive(Debug)]
pub(super) struct RootPostBackward {
    passes: SmallVec<[Arc<UnitPass>; 1]>,
}

impl RootPostBackward {
    /// Of some passes of one rank.
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

/// Issues the reductions of `due`, one after another. The gradients of those before go to the shards' leaves.
pub(super) fn reduce(pass: &UnitPass, due: Vec<Weak<UnitPass>>, step: &mut BackwardStep<'_>) {
    give(pass.passes.reduce(due, context::backward(step.backward())), step);
}

/// Gives leaves their gradients: those of the program's backward, in whatever graph the step is.
pub(super) fn give(reduced: Reduced, step: &mut BackwardStep<'_>) {
    let own = context::keep(reduced).into_iter().flatten();
    own.for_each(|(leaf, grad)| step.give_to(leaf, grad));
}

/// A node that hangs on the pass's token runs. In the graph of a checkpointed block those of passes around it have other
/// depths.
fn progress(pass: &Arc<UnitPass>, step: &BackwardStep<'_>) {
    if cfg!(debug_assertions) && !context::is_outside(pass) {
        pass.progress.node(step.depth());
    }
}

/// The node's backward has run: tests look.
#[cfg(feature = "testing")]
fn ran(node: &'static str, pass: Option<&Arc<UnitPass>>, step: &BackwardStep<'_>) {
    super::trace::ran(node, pass, step.depth());
}

#[cfg(not(feature = "testing"))]
fn ran(_: &'static str, _: Option<&Arc<UnitPass>>, _: &BackwardStep<'_>) {}

/// Whether one operation can have both as parents.
pub(super) fn one_graph(a: &DispatchTensor, b: &DispatchTensor) -> bool {
    a.autodiff == b.autodiff && a.device() == b.device()
}

/// A node that only has a place in the graph.
pub(super) fn nothing(like: &DispatchTensor) -> DispatchTensor {
    Dispatch::float_zeros([1].into(), &like.device(), like.dtype().into())
}

/// Ties a unit's weights to its place in the graph: rules 2 to 4 and 7. Parents: a shard's [`RootPostBackward`] or the
/// token so far, and what it is tied to.
#[derive(Debug)]
pub(super) struct PostBackward {
    pass: Arc<UnitPass>,
    /// Number and metadata of the input this link ties, if it ties one.
    input: Option<(usize, Like)>,
    /// Whether the unit's weights hang on this link.
    last: bool,
}

impl PostBackward {
    /// A link to a tracked input, or else to nothing or an earlier token.
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
        // Whatever made the input expects a gradient, even if the unit never used it.
        if let Some((number, like)) = &self.input
            && !self.pass.input_seen(*number)
        {
            self.pass.passes.order.pad();
            self.pass.gather_around();
            step.give(1, || like.zeros());
        }
        ran(if self.last { "PostBackward" } else { "Link" }, Some(&self.pass), step);
    }
}

/// A gathered parameter. Parents: its shard's leaf, the token.
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

/// A gathered parameter whose gradient differs between the tensor-parallel ranks. Parents: its
/// shard's leaf, the token.
#[derive(Debug)]
pub(super) struct PartialGradParamNode {
    pub(super) pass: Arc<UnitPass>,
    pub(super) position: usize,
    /// The mesh dimensions over which the gradients are summed.
    pub(super) dims: MeshDims,
    pub(super) retain: Retain,
    /// The gathered value, until the node is made.
    pub(super) value: Mutex<Option<DispatchTensor>>,
}

impl GraphOp for PartialGradParamNode {
    fn forward(&self, _: &[DispatchTensor]) -> DispatchTensor {
        self.value.lock().take().expect("a node of the graph is made once")
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

/// A tracked input, in the element type of the unit's inputs. Parents: the input, the token: rule 2.
#[derive(Debug)]
pub(super) struct UnitInput {
    pub(super) pass: Arc<UnitPass>,
    pub(super) input: usize,
    /// The input's own element type.
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

/// An output, in the element type of the unit's outputs. Parents: the output, the last token: rule 8.
#[derive(Debug)]
pub(super) struct PreBackward {
    /// `None` for a module that only encloses units.
    pass: Option<Arc<UnitPass>>,
    /// The output's own element type.
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
        if let Some(pass) = &self.pass {
            pass.start_again();
            pass.buffer.gather_again();
        }
        let grad = step.take();
        step.give(0, || cast(grad, Some(self.dtype)));
        ran("PreBackward", self.pass.as_ref(), step);
    }
}
