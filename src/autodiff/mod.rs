//! One generic operation in burn's autodiff graph.
//!
//! Every differentiable thing this crate does (a redistribution, a gathered parameter, the edges
//! of a unit) is a [`GraphOp`]: a value that computes forward on plain tensors and spreads a
//! gradient backward. [`unary`] and [`binary`] record it. One backend extension serves them all,
//! so a new operation needs no new backend code.
//!
//! A parent on a device without autodiff is a constant. With no tracked parent nothing is stored.

mod record;

use std::cell::Cell;
use std::fmt::Debug;
use std::sync::Arc;

use burn::backend::autodiff::NodeId;
use burn::backend::ops::FloatTensorOps;
use burn::backend::tensor::FloatTensor;
use burn::backend::{
    AutodiffBackend, Backend, BackendTensor, Dispatch, DispatchAutodiffContext, DispatchDevice, DispatchKindConversion,
    DispatchTensor, backend_extension,
};
use burn::tensor::{Device, FloatDType};

/// What the graph keeps of an operation's output for the operations that read it in backward.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Retain {
    /// The output itself: a boundary that no recomputation crosses.
    Output,
    /// Nothing: [`GraphOp::recompute`] makes it again when backward first needs it, on every
    /// gradient-checkpointing strategy. It is dropped after its last use.
    Recompute,
}

/// An operation with one float output, on one or two float parents.
///
/// All tensors are plain (no autodiff).
pub(crate) trait GraphOp: Debug + Send + Sync + 'static {
    /// The output's value.
    fn forward(&self, parents: &[DispatchTensor]) -> DispatchTensor;

    /// The output's value again, during backward. Untracked parents are left out.
    fn recompute(&self, parents: &[DispatchTensor]) -> DispatchTensor {
        self.forward(parents)
    }

    /// What the graph keeps of the output.
    fn retain(&self) -> Retain {
        Retain::Output
    }

    /// Passes the output's gradient on.
    fn backward(&self, step: &mut BackwardStep<'_>);
}

/// The graph's gradients, as one backward step sees them.
pub(crate) struct BackwardStep<'a> {
    depth: usize,
    backward: BackwardId,
    parents: &'a [Option<NodeId>],
    grads: &'a mut dyn GradStore,
}

/// One call of `backward`, as long as it lasts: what tells it from one that runs inside it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BackwardId(usize);

impl BackwardStep<'_> {
    /// How deep the operation lies in the graph: one node below the deepest of its parents. Leaves
    /// lie at 0.
    pub(crate) fn depth(&self) -> usize {
        self.depth
    }

    /// The backward that it is a step of.
    pub(crate) fn backward(&self) -> BackwardId {
        self.backward
    }

    /// Takes the gradient of the output.
    ///
    /// # Panics
    /// If no later operation registered one.
    pub(crate) fn take(&mut self) -> DispatchTensor {
        self.grads.take()
    }

    /// Adds `grad` to parent `index`; does nothing for an untracked parent.
    pub(crate) fn give(&mut self, index: usize, grad: impl FnOnce() -> DispatchTensor) {
        if let Some(id) = self.parents[index] {
            self.grads.add(id, grad());
        }
    }

    /// Adds `grad` to the gradient of any node, which may be of a graph on the CPU, with `grad`.
    pub(crate) fn give_to(&mut self, id: NodeId, grad: DispatchTensor) {
        self.grads.add_elsewhere(id, grad);
    }
}

/// Object-safe view of burn's gradient container.
trait GradStore {
    fn take(&mut self) -> DispatchTensor;
    fn add(&mut self, id: NodeId, grad: DispatchTensor);
    /// Whichever of this crate's backends `grad` is on.
    fn add_elsewhere(&mut self, id: NodeId, grad: DispatchTensor);
}

/// Shared handle of an operation.
pub(crate) type SharedGraphOp = Arc<dyn GraphOp>;

thread_local! {
    /// The number of backwards of operations that run on this thread, one inside the other.
    static RUNNING: Cell<usize> = const { Cell::new(0) };
}

/// Returns true if the backward of an operation runs on this thread: the graph is locked then.
pub(crate) fn is_in_backward() -> bool {
    RUNNING.get() > 0
}

/// Runs the backward of an operation.
fn running(op: &SharedGraphOp, step: &mut BackwardStep<'_>) {
    struct BackwardEnd;
    impl Drop for BackwardEnd {
        fn drop(&mut self) {
            RUNNING.set(RUNNING.get() - 1);
        }
    }
    RUNNING.set(RUNNING.get() + 1);
    let _end = BackwardEnd;
    op.backward(step);
}

/// Records `op` on one parent.
pub(crate) fn unary(parent: DispatchTensor, op: SharedGraphOp) -> DispatchTensor {
    <Dispatch as GraphOps>::graph_unary(parent, op)
}

/// Records `op` on two parents.
pub(crate) fn binary(a: DispatchTensor, b: DispatchTensor, op: SharedGraphOp) -> DispatchTensor {
    <Dispatch as GraphOps>::graph_binary(a, b, op)
}

/// A plain tensor in the place in autodiff that `like` has, untracked.
pub(crate) fn constant(tensor: DispatchTensor, like: &DispatchTensor) -> DispatchTensor {
    match like.autodiff {
        DispatchAutodiffContext::Disabled => tensor,
        autodiff => DispatchTensor { autodiff, ..Dispatch::from_inner(tensor) },
    }
}

/// A new leaf of the graph on `device`, which is to be in the place in autodiff that `like` has; without a value.
pub(crate) fn leaf(device: &Device, like: &DispatchTensor, tracked: bool) -> DispatchTensor {
    let nothing = Dispatch::float_zeros([1].into(), device.as_dispatch(), FloatDType::F32);
    Dispatch::float_set_require_grad(constant(nothing, like), tracked)
}

/// The tensor's node in the graph; `None` on a device without autodiff.
///
/// Two tensors with one node are the same value.
pub(crate) fn node_id(tensor: DispatchTensor) -> Option<NodeId> {
    <Dispatch as GraphOps>::graph_node(tensor)
}

/// Whether operations can be recorded on the device.
pub(crate) fn is_supported(device: &Device) -> bool {
    match device.as_dispatch() {
        #[cfg(feature = "flex")]
        DispatchDevice::Flex(_) => true,
        #[cfg(any(feature = "wgpu", feature = "cuda"))]
        DispatchDevice::Cube(_) => true,
        DispatchDevice::Autodiff(_) => is_supported(&device.clone().inner()),
        // burn may have been built with backends that this crate does not know.
        #[allow(unreachable_patterns)]
        _ => false,
    }
}

/// The backend extension behind [`unary`], [`binary`] and [`node_id`].
#[backend_extension(
    Flex: cfg(feature = "flex"),
    Cube: cfg(any(feature = "wgpu", feature = "cuda")),
    Autodiff
)]
pub(crate) trait GraphOps: Backend {
    fn graph_unary(parent: FloatTensor<Self>, op: SharedGraphOp) -> FloatTensor<Self>;
    fn graph_binary(a: FloatTensor<Self>, b: FloatTensor<Self>, op: SharedGraphOp) -> FloatTensor<Self>;
    fn graph_node(tensor: FloatTensor<Self>) -> Option<NodeId>;
}

macro_rules! plain_backend {
    ($backend:ty) => {
        impl GraphOps for $backend {
            fn graph_unary(parent: FloatTensor<Self>, op: SharedGraphOp) -> FloatTensor<Self> {
                Self::unwrap(op.forward(&[Self::wrap(parent)]))
            }
            fn graph_binary(a: FloatTensor<Self>, b: FloatTensor<Self>, op: SharedGraphOp) -> FloatTensor<Self> {
                Self::unwrap(op.forward(&[Self::wrap(a), Self::wrap(b)]))
            }
            fn graph_node(_: FloatTensor<Self>) -> Option<NodeId> {
                None
            }
        }
    };
}

#[cfg(feature = "flex")]
plain_backend!(burn::backend::Flex);
#[cfg(any(feature = "wgpu", feature = "cuda"))]
plain_backend!(burn::backend::Cube);

/// Moves a backend's float primitive in and out of the dispatch enum.
trait Wrap: Backend {
    fn wrap(tensor: FloatTensor<Self>) -> DispatchTensor;
    fn unwrap(tensor: DispatchTensor) -> FloatTensor<Self>;
}

impl<B: Backend> Wrap for B
where
    DispatchTensor: DispatchKindConversion<B>,
{
    fn wrap(tensor: FloatTensor<Self>) -> DispatchTensor {
        <DispatchTensor as DispatchKindConversion<B>>::from_backend(BackendTensor::Float(tensor))
    }

    fn unwrap(tensor: DispatchTensor) -> FloatTensor<Self> {
        <DispatchTensor as DispatchKindConversion<B>>::try_into_backend(tensor)
            .expect("a graph operation's tensors are plain and on its parents' backend")
            .float()
    }
}
