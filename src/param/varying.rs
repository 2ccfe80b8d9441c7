//! [`Varying`]: a parameter for computations that differ between tensor-parallel ranks.

use std::sync::Arc;

use burn::backend::DispatchTensor;
use parking_lot::Mutex;
use smallvec::SmallVec;

use super::backward_nodes::UnshardedParamNode;
use super::unit_pass::UnitPass;
use crate::autodiff::{self, Retain};
use crate::dtensor::MeshDims;

/// The value of a parameter that is replicated along some tensor-parallel mesh dimensions, for
/// computations that differ along them. Each set of such dimensions has its own node in the graph,
/// made on first use. The gradients that arrive at this node are partial sums. The unit sums all
/// its partial gradients over the same ranks in one collective.
///
/// Ranks of a tensor-parallel mesh run one program, so either all of them use such a node or none
/// does.
#[derive(Debug)]
pub(super) struct Varying {
    pub(super) pass: Arc<UnitPass>,
    pub(super) position: usize,
    /// The shard, or the leaf that replaces it in the graph; `None` for a frozen parameter.
    pub(super) parent: Option<DispatchTensor>,
    pub(super) token: DispatchTensor,
    /// The value for computations that are the same on all tensor-parallel ranks.
    pub(super) value: DispatchTensor,
    pub(super) retain: Retain,
    /// The nodes, one for each set of mesh dimensions along which computations differ.
    pub(super) handles: Mutex<SmallVec<[(MeshDims, DispatchTensor); 1]>>,
}

impl Varying {
    /// Returns the value for computations that differ along these mesh dimensions.
    pub(super) fn get(&self, dims: &[usize]) -> DispatchTensor {
        let mut handles = self.handles.lock();
        if let Some((_, known)) = handles.iter().find(|(known, _)| **known == *dims) {
            return known.clone();
        }
        let handle = self.make(dims);
        handles.push((dims.into(), handle.clone()));
        handle
    }

    fn make(&self, dims: &[usize]) -> DispatchTensor {
        // The gradient of a frozen parameter is not needed, so no partial gradients have to be
        // summed.
        let Some(parent) = &self.parent else {
            return self.value.clone();
        };
        self.pass.grads.lock().expect_partial(self.position, dims);
        let pass = self.pass.clone();
        let value = autodiff::plain(self.value.clone());
        let node =
            UnshardedParamNode::new(pass, self.position, self.retain, value, Some(dims.into()));
        autodiff::binary(parent.clone(), self.token.clone(), node)
    }
}
