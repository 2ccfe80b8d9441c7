//! [`graph_depth`]: depth of a tensor in the autodiff graph.

use std::sync::{Arc, OnceLock};

use burn::backend::DispatchTensor;
use burn::tensor::Tensor;

use crate::autodiff::{self, BackwardStep, GraphOp};
use crate::dtensor::{DTensor, Kind, is_tracked};

/// Depth of a tensor in the autodiff graph of the calling rank. It is known once backward has
/// passed the tensor.
#[derive(Debug, Clone, Default)]
pub struct GraphDepth(Arc<OnceLock<usize>>);

impl GraphDepth {
    /// Returns the number of nodes on the longest path from a leaf. `None` for a tensor that is not
    /// tracked, and until backward reaches it.
    pub fn get(&self) -> Option<usize> {
        self.0.get().copied()
    }
}

/// Returns the tensor one node deeper in the graph, and a handle with the depth at which it was.
/// Local; every rank of the mesh must call it, so that the graphs stay equally deep.
///
/// burn runs backward by depth, the deepest node first. All ranks must run the collectives of
/// backward in the same order, so the result of an operator must have the same depth on every rank,
/// whatever the shape of its local tensor. To check this, compare the depths of all ranks.
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
    let local = autodiff::unary(
        x.to_local().into_dispatch(),
        Arc::new(DepthProbe(depth.clone())),
    );
    (
        DTensor::from_parts(Tensor::from_dispatch(local), spec),
        depth,
    )
}

/// Graph node that passes value and gradient through unchanged and records the depth of its parent.
#[derive(Debug)]
struct DepthProbe(GraphDepth);

impl GraphOp for DepthProbe {
    fn forward(&self, parents: &[DispatchTensor]) -> DispatchTensor {
        parents[0].clone()
    }

    fn backward(&self, step: &mut BackwardStep<'_>) {
        self.0
            .0
            .set(step.depth() - 1)
            .expect("a node's backward runs once");
        let grad = step.take();
        step.give(0, || grad);
    }
}
