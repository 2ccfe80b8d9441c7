//! [`graph_depth`]: how deep in the autodiff graph a tensor lies.

use std::sync::{Arc, OnceLock};

use burn::backend::DispatchTensor;
use burn::tensor::Tensor;

use crate::autodiff::{self, BackwardStep, GraphOp};
use crate::dtensor::{DTensor, Kind, is_tracked};

/// How deep a tensor lies in the autodiff graph of the calling rank, once backward has come by.
#[derive(Debug, Clone, Default)]
pub struct GraphDepth(Arc<OnceLock<usize>>);

impl GraphDepth {
    /// The number of nodes on the longest way from a leaf. `None` of a tensor that is not tracked,
    /// and as long as no backward has reached it.
    pub fn get(&self) -> Option<usize> {
        self.0.get().copied()
    }
}

/// The same tensor, one node deeper, and the depth at which it lay.
///
/// Burn runs backward by depth, the deepest node first. So that all ranks run the collectives of
/// backward in one order, what an operator gives back must lie equally deep on every rank, whatever
/// the shape of its part: compare the depths of all ranks.
///
/// ```
/// use burn::tensor::Tensor;
/// use burn_dtensor::dtensor::DTensor;
/// use burn_dtensor::placement::Placement::Shard;
/// use burn_dtensor::testing::{MeshTest, graph_depth};
///
/// let depths = MeshTest::new([2], ["dp"]).run(|mesh| {
///     let leaf = Tensor::<2>::ones([3, 4], &mesh.device().clone().autodiff()).require_grad();
///     let x = DTensor::distribute_replicated(leaf, mesh, &[Shard(0)])?;
///     let (y, depth) = graph_depth(x.exp().log());
///     assert_eq!(depth.get(), None);
///     y.sum().full_tensor()?.backward();
///     Ok(depth.get())
/// });
/// assert_eq!(depths, [Some(2), Some(2)]);
/// ```
pub fn graph_depth<const D: usize, K: Kind>(x: DTensor<D, K>) -> (DTensor<D, K>, GraphDepth) {
    let depth = GraphDepth::default();
    if !is_tracked(x.local()) {
        return (x, depth);
    }
    let spec = x.spec().clone();
    let local = autodiff::unary(x.to_local().into_dispatch(), Arc::new(DepthProbe(depth.clone())));
    (DTensor::from_parts(Tensor::from_dispatch(local), spec), depth)
}

/// Passes value and gradient on, and notes the depth of its parent.
#[derive(Debug)]
struct DepthProbe(GraphDepth);

impl GraphOp for DepthProbe {
    fn forward(&self, parents: &[DispatchTensor]) -> DispatchTensor {
        parents[0].clone()
    }

    fn backward(&self, step: &mut BackwardStep<'_>) {
        self.0.0.set(step.depth() - 1).expect("a node's backward runs once");
        let grad = step.take();
        step.give(0, || grad);
    }
}
