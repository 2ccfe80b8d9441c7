#![doc = include_str!("backward.md")]

use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Weak};

use burn::backend::ops::FloatTensorOps;
use burn::backend::{Dispatch, DispatchDevice, DispatchTensor, TensorMetadata};
use burn::tensor::{DType, Device, Shape};
use parking_lot::Mutex;
use smallvec::SmallVec;

use super::options::cast;
use super::recompute::context;
use super::reduction::Reduced;
use super::steps;
use super::storage::persistent_copy;
use super::unit_pass::UnitPass;
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
        Self {
            shape: tensor.shape(),
            dtype: tensor.dtype(),
            device: tensor.device().inner(),
        }
    }

    pub(super) fn zeros(&self) -> DispatchTensor {
        Dispatch::float_zeros(self.shape.clone(), &self.device, self.dtype.into())
    }
}

/// Autodiff node that runs at the end of backward (rule 6). Its parent is a leaf.
///
/// It keeps its passes alive until then, because their gradients may still be held: one pass, or
/// all passes of a checkpointed block.
#[derive(Debug)]
pub(super) struct RootPostBackward(pub(super) SmallVec<[Arc<UnitPass>; 1]>);

impl GraphOp for RootPostBackward {
    fn forward(&self, parents: &[DispatchTensor]) -> DispatchTensor {
        nothing(&parents[0])
    }

    fn backward(&self, step: &mut BackwardStep<'_>) {
        for pass in &self.0 {
            pass.progress.flush(step.depth());
            reduce(pass, pass.passes.order.flush(), step);
            pass.passes.padding.forget();
            give(
                pass.passes
                    .reducer
                    .reduce_postponed(step.backward(), &pass.reductions),
                step,
            );
            give(pass.passes.reducer.finish(step.backward()), step);
            ran("RootPostBackward", Some(pass), step);
        }
    }
}

/// Issues the reductions of `due` one after the other. Completed gradients of earlier reductions
/// are registered on the shards' leaves.
pub(super) fn reduce(pass: &UnitPass, due: Vec<Weak<UnitPass>>, step: &mut BackwardStep<'_>) {
    give(
        pass.passes.reduce(due, context::backward(step.backward())),
        step,
    );
}

/// Registers gradients on their leaves. While a checkpointed block is recomputed, they are kept for
/// the graph around the block instead.
pub(super) fn give(reduced: Reduced, step: &mut BackwardStep<'_>) {
    let own = context::keep(reduced).into_iter().flatten();
    for (leaf, grad) in own {
        if let Some(grad) = steps::take(leaf, grad, step) {
            step.give_to(leaf, grad);
        }
    }
}

/// Records, for the debug checks, that a node that depends on the pass's token runs. In the graph
/// of a checkpointed block, nodes of passes around the block are skipped, because they have other
/// depths there.
fn progress(pass: &Arc<UnitPass>, step: &BackwardStep<'_>) {
    if cfg!(debug_assertions) && !context::is_outside(pass) {
        pass.progress.node(step.depth());
    }
}

/// Records that the node's backward has run: for the check of direct gradients, and for tests.
pub(super) fn ran(_node: &'static str, _pass: Option<&Arc<UnitPass>>, step: &BackwardStep<'_>) {
    steps::note(step);
    #[cfg(feature = "testing")]
    super::trace::ran(_node, _pass, step.depth());
}

/// Returns true if one operation can have both tensors as parents.
pub(super) fn one_graph(a: &DispatchTensor, b: &DispatchTensor) -> bool {
    a.autodiff == b.autodiff && a.device() == b.device()
}

/// Returns the value of a node that exists only for its position in the graph.
pub(super) fn nothing(like: &DispatchTensor) -> DispatchTensor {
    Dispatch::float_zeros([1].into(), &like.device(), like.dtype().into())
}

/// A tracked input of a unit: true once backward has passed its gradient on.
pub(super) type TrackedInput = Arc<AtomicBool>;

/// Autodiff node that makes a unit's parameters depend on what precedes the unit (rules 2 to 4 and
/// 7): the unit's token, or a link of it. Its parents are the [`RootPostBackward`] of a shard or
/// the previous link, and the tensor to which it ties the unit.
#[derive(Debug)]
pub(super) struct PostBackward {
    pass: Arc<UnitPass>,
    /// The input that this link ties, if any, with the metadata of its gradient.
    input: Option<(TrackedInput, Like)>,
    /// True if the unit's parameters depend on this link, which makes it the token.
    last: bool,
}

impl PostBackward {
    /// Creates a link to this tracked input, or to an earlier token or nothing if `input` is
    /// `None`. `last` makes the link the unit's token.
    pub(super) fn new(
        pass: &Arc<UnitPass>,
        input: Option<(&DispatchTensor, &TrackedInput)>,
        last: bool,
    ) -> Arc<Self> {
        let input = input.map(|(tensor, input)| {
            pass.add_input(autodiff::node_id(tensor.clone()));
            (input.clone(), Like::of(tensor))
        });
        Arc::new(Self {
            pass: pass.clone(),
            input,
            last,
        })
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
        // The operation that produced the input expects a gradient, even if the unit never used the
        // input.
        if let Some((input, like)) = &self.input
            && !input.load(Relaxed)
        {
            let program = context::backward(step.backward());
            self.pass.passes.padding.pad(step, program);
            self.pass.gather_around();
            step.give(1, || like.zeros());
        }
        ran(
            if self.last { "PostBackward" } else { "Link" },
            Some(&self.pass),
            step,
        );
    }
}

/// Autodiff node of an unsharded parameter. Its parents are the shard's leaf and the token.
#[derive(Debug)]
pub(super) struct UnshardedParamNode {
    pass: Arc<UnitPass>,
    position: usize,
    retain: Retain,
    /// Gathered value, until the node is created.
    value: Mutex<Option<DispatchTensor>>,
    /// Mesh dimensions over which the gradient is summed, if it differs between the tensor-parallel
    /// ranks.
    partial: Option<MeshDims>,
}

impl UnshardedParamNode {
    pub(super) fn new(
        pass: Arc<UnitPass>,
        position: usize,
        retain: Retain,
        value: DispatchTensor,
        partial: Option<MeshDims>,
    ) -> Arc<Self> {
        Arc::new(Self {
            pass,
            position,
            retain,
            value: Mutex::new(Some(value)),
            partial,
        })
    }
}

impl GraphOp for UnshardedParamNode {
    fn forward(&self, _: &[DispatchTensor]) -> DispatchTensor {
        self.value
            .lock()
            .take()
            .expect("a graph node is created only once")
    }

    fn recompute(&self, _: &[DispatchTensor]) -> DispatchTensor {
        let has_two_nodes = self.pass.grads.lock().is_partial_expected(self.position);
        self.pass
            .unsharded
            .view_in_backward(self.position, has_two_nodes)
    }

    fn retain(&self) -> Retain {
        self.retain
    }

    fn backward(&self, step: &mut BackwardStep<'_>) {
        progress(&self.pass, step);
        let grad = step.take();
        if self.pass.passes.padding.is_reached(step.node()) {
            self.pass
                .collect(self.position, self.partial.as_deref(), grad);
        }
        ran("UnshardedParamNode", Some(&self.pass), step);
    }
}

/// Autodiff node of a tracked input, cast to the dtype of the unit's inputs (rule 2). Its parents
/// are the input and the token.
#[derive(Debug)]
pub(super) struct UnitInput {
    pub(super) pass: Arc<UnitPass>,
    pub(super) input: TrackedInput,
    /// Dtype of the input before the cast.
    pub(super) dtype: DType,
}

impl GraphOp for UnitInput {
    fn forward(&self, parents: &[DispatchTensor]) -> DispatchTensor {
        cast(
            parents[0].clone(),
            self.pass.unsharded.unit().spec().precision().inputs,
        )
    }

    fn backward(&self, step: &mut BackwardStep<'_>) {
        progress(&self.pass, step);
        self.input.store(true, Relaxed);
        let grad = step.take();
        step.give(0, || cast(grad, Some(self.dtype)));
        ran("UnitInput", Some(&self.pass), step);
    }
}

/// Autodiff node of an output, cast to the dtype of the unit's outputs (rule 8). Its parents are
/// the output and the last token.
#[derive(Debug)]
pub(super) struct PreBackward {
    /// The pass of the unit; `None` for a module that only encloses units.
    pub(super) pass: Option<Arc<UnitPass>>,
    /// Dtype of the output before the cast.
    pub(super) dtype: DType,
}

impl GraphOp for PreBackward {
    fn forward(&self, parents: &[DispatchTensor]) -> DispatchTensor {
        let dtype = self
            .pass
            .as_ref()
            .and_then(|pass| pass.unsharded.unit().spec().precision().outputs);
        persistent_copy(cast(parents[0].clone(), dtype))
    }

    fn backward(&self, step: &mut BackwardStep<'_>) {
        let grad = step.take();
        if let Some(pass) = &self.pass {
            pass.start_backward_gather();
            pass.unsharded.wait_backward_gather();
        }
        step.give(0, || cast(grad, Some(self.dtype)));
        ran("PreBackward", self.pass.as_ref(), step);
    }
}

/// Returns a new leaf for one pass, in the graph of `like`.
pub(super) fn own_leaf(like: &DispatchTensor) -> DispatchTensor {
    autodiff::leaf(&Device::new(like.device()).inner(), like, true)
}
