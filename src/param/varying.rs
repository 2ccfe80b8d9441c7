//! [`Varying`]: a parameter as computations read it that differ between tensor-parallel ranks.

use std::sync::Arc;

use burn::backend::DispatchTensor;
use parking_lot::Mutex;
use smallvec::SmallVec;

use super::backward_nodes::PartialGradParamNode;
use super::shards::plain;
use super::unit_pass::UnitPass;
use crate::autodiff::{self, Retain};
use crate::dtensor::MeshDims;

/// The value of a parameter that the ranks along some tensor-parallel mesh dimensions hold whole, with a node of
/// its own in the graph for those along which computations differ, made when it is first asked for: the gradients
/// that arrive there are terms of a sum, and the unit adds up all its terms over the same ranks at once.
///
/// Ranks of a tensor-parallel mesh run one program, so all of them ask, or none does.
#[derive(Debug)]
pub(super) struct Varying {
    pub(super) pass: Arc<UnitPass>,
    pub(super) position: usize,
    /// The shard, or what stands for it in the graph; `None` of a frozen parameter.
    pub(super) parent: Option<DispatchTensor>,
    pub(super) token: DispatchTensor,
    /// The value for computations that are the same on all tensor-parallel ranks.
    pub(super) value: DispatchTensor,
    pub(super) retain: Retain,
    /// By the mesh dimensions along which computations differ.
    pub(super) handles: Mutex<SmallVec<[(MeshDims, DispatchTensor); 1]>>,
}

impl Varying {
    /// The handle for computations that differ along these mesh dimensions.
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
        // Nobody wants the gradient of a frozen parameter, so its terms need not be added up.
        let Some(parent) = &self.parent else { return self.value.clone() };
        self.pass.buffer.expect_term(self.position, dims);
        let op = PartialGradParamNode {
            pass: self.pass.clone(),
            position: self.position,
            dims: dims.into(),
            retain: self.retain,
            value: Mutex::new(Some(plain(self.value.clone()))),
        };
        autodiff::binary(parent.clone(), self.token.clone(), Arc::new(op))
    }
}
