//! Generic operation in burn's autodiff graph.
//!
//! Every differentiable operation of this crate (a redistribution, a gathered parameter, the inputs
//! and outputs of a unit) is a [`GraphOp`]: a value that computes forward on plain tensors and
//! distributes a gradient in backward. [`unary`] and [`binary`] record it. All operations use one
//! backend extension, so a new operation needs no new backend code.
//!
//! A parent on a device without autodiff is a constant. If no parent is tracked, the graph stores
//! nothing.

mod record;

use std::cell::Cell;
use std::fmt::{self, Debug};
use std::sync::Arc;

use burn::backend::autodiff::NodeId;
use burn::backend::ops::FloatTensorOps;
use burn::backend::tensor::FloatTensor;
use burn::backend::{
    AutodiffBackend, Backend, BackendTensor, Dispatch, DispatchAutodiffContext, DispatchDevice,
    DispatchKindConversion, DispatchTensor, backend_extension,
};
use burn::tensor::{Device, FloatDType};

/// Policy for an operation's output: whether the graph keeps it for the operations that read it in
/// backward.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Retain {
    /// Keeps the output. No recomputation crosses this operation.
    Output,
    /// Keeps nothing: [`GraphOp::recompute`] computes the output when backward first needs it,
    /// under every gradient-checkpointing strategy. The output is dropped after its last use.
    Recompute,
}

/// Operation with one float output and one or two float parents.
///
/// All tensors are plain (no autodiff).
pub(crate) trait GraphOp: Debug + Send + Sync + 'static {
    /// Computes the output.
    fn forward(&self, parents: &[DispatchTensor]) -> DispatchTensor;

    /// Computes the output a second time, during backward. Untracked parents are omitted from
    /// `parents`.
    fn recompute(&self, parents: &[DispatchTensor]) -> DispatchTensor {
        self.forward(parents)
    }

    /// Returns the policy for keeping the output.
    fn retain(&self) -> Retain {
        Retain::Output
    }

    /// Passes the output's gradient to the parents.
    fn backward(&self, step: &mut BackwardStep<'_>);
}

/// The graph's gradients, as seen by one step of a backward.
pub(crate) struct BackwardStep<'a> {
    node: NodeId,
    depth: usize,
    parents: &'a [Option<NodeId>],
    grads: &'a mut dyn GradStore,
}

/// Number of one call of `backward`. No other call in the process has the same number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BackwardId(usize);

impl BackwardStep<'_> {
    /// Returns the operation's node in the graph.
    pub(crate) fn node(&self) -> NodeId {
        self.node
    }

    /// Writes burn's debug text of the checkpointer of this backward.
    pub(crate) fn write_checkpointer(&self, to: &mut dyn fmt::Write) -> fmt::Result {
        self.grads.write_checkpointer(to)
    }

    /// Returns the depth of the operation in the graph: one more than the maximum of its parents.
    /// Leaves have depth 0.
    pub(crate) fn depth(&self) -> usize {
        self.depth
    }

    /// Returns the backward to which this step belongs.
    pub(crate) fn backward(&mut self) -> BackwardId {
        self.grads.backward()
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

    /// Adds `grad` to the gradient of any node, which may belong to a graph on the CPU if `grad` is
    /// on the CPU.
    pub(crate) fn give_to(&mut self, id: NodeId, grad: DispatchTensor) {
        self.grads.add_elsewhere(id, grad);
    }
}

/// Object-safe view of burn's gradient container.
trait GradStore {
    /// Returns the backward that created the container.
    fn backward(&mut self) -> BackwardId;
    fn write_checkpointer(&self, to: &mut dyn fmt::Write) -> fmt::Result;
    fn take(&mut self) -> DispatchTensor;
    fn add(&mut self, id: NodeId, grad: DispatchTensor);
    /// Adds a gradient that may be on another of this crate's backends.
    fn add_elsewhere(&mut self, id: NodeId, grad: DispatchTensor);
}

/// Shared handle to an operation.
pub(crate) type SharedGraphOp = Arc<dyn GraphOp>;

thread_local! {
    /// Number of operations whose backward is running on this thread, nested in each other.
    static RUNNING: Cell<usize> = const { Cell::new(0) };
}

/// Returns true if the backward of an operation is running on this thread. The graph is then
/// locked.
pub(crate) fn is_in_backward() -> bool {
    RUNNING.get() > 0
}

/// Runs the backward of an operation, and counts it as running.
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

/// Returns the plain `tensor` with the autodiff context of `like`, untracked.
pub(crate) fn constant(tensor: DispatchTensor, like: &DispatchTensor) -> DispatchTensor {
    match like.autodiff {
        DispatchAutodiffContext::Disabled => tensor,
        autodiff => DispatchTensor {
            autodiff,
            ..Dispatch::from_inner(tensor)
        },
    }
}

/// Creates a leaf of the graph on `device`, with the autodiff context of `like`. It has no
/// meaningful value.
pub(crate) fn leaf(device: &Device, like: &DispatchTensor, tracked: bool) -> DispatchTensor {
    let nothing = Dispatch::float_zeros([1].into(), device.as_dispatch(), FloatDType::F32);
    Dispatch::float_set_require_grad(constant(nothing, like), tracked)
}

/// Returns the tensor's node in the graph, or `None` on a device without autodiff.
///
/// Two tensors with one node are the same value.
pub(crate) fn node_id(tensor: DispatchTensor) -> Option<NodeId> {
    <Dispatch as GraphOps>::graph_node(tensor)
}

/// Returns the tensor without autodiff.
pub(crate) fn plain(tensor: DispatchTensor) -> DispatchTensor {
    match tensor.autodiff {
        DispatchAutodiffContext::Disabled => tensor,
        DispatchAutodiffContext::Enabled(_) => Dispatch::inner(tensor),
    }
}

/// Returns true if operations can be recorded on the device.
pub(crate) fn is_supported(device: &Device) -> bool {
    match device.as_dispatch() {
        #[cfg(feature = "flex")]
        DispatchDevice::Flex(_) => true,
        #[cfg(any(feature = "wgpu", feature = "cuda"))]
        DispatchDevice::Cube(_) => true,
        DispatchDevice::Autodiff(_) => is_supported(&device.clone().inner()),
        // burn may have been built with backends that this crate does not support.
        #[allow(unreachable_patterns)]
        _ => false,
    }
}

/// Backend extension that implements [`unary`], [`binary`] and [`node_id`].
#[backend_extension(
    Flex: cfg(feature = "flex"),
    Cube: cfg(any(feature = "wgpu", feature = "cuda")),
    Autodiff
)]
pub(crate) trait GraphOps: Backend {
    fn graph_unary(parent: FloatTensor<Self>, op: SharedGraphOp) -> FloatTensor<Self>;
    fn graph_binary(
        a: FloatTensor<Self>,
        b: FloatTensor<Self>,
        op: SharedGraphOp,
    ) -> FloatTensor<Self>;
    fn graph_node(tensor: FloatTensor<Self>) -> Option<NodeId>;
}

macro_rules! plain_backend {
    ($backend:ty) => {
        impl GraphOps for $backend {
            fn graph_unary(parent: FloatTensor<Self>, op: SharedGraphOp) -> FloatTensor<Self> {
                Self::unwrap(op.forward(&[Self::wrap(parent)]))
            }
            fn graph_binary(
                a: FloatTensor<Self>,
                b: FloatTensor<Self>,
                op: SharedGraphOp,
            ) -> FloatTensor<Self> {
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

/// Converts a backend's float primitive to and from the dispatch enum.
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
