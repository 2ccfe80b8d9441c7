//! [`DetachedModule`]: copy of a module whose parameters are not connected to the program's autodiff graph.
//!
//! An autodiff node must not hold a tensor of its own graph, which would keep the graph alive.
//! Also, no node can be added to a graph while its backward runs. So a checkpointed block computes
//! with copies. They are untracked in forward. In the recomputation, the copies of parameters that
//! no unit gathers are leaves of the block's private graph.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use burn::backend::autodiff::NodeId;
use burn::backend::ops::FloatTensorOps;
use burn::backend::{AutodiffBackend, Dispatch, DispatchTensor};
use burn::module::{Module, ModuleMapper, Param, Reparameterization};
use burn::tensor::Tensor;

use crate::Result;
use crate::autodiff::{self, node_id};
use crate::param::buffers::unshared;
use crate::param::copied_leaves::Leaves;
use crate::param::distributed::DistributedParameter;
use crate::param::distributed::copying;

/// Returns an untracked tensor with the same memory and device.
pub(super) fn untracked(tensor: DispatchTensor) -> DispatchTensor {
    let autodiff = tensor.autodiff;
    DispatchTensor {
        autodiff,
        ..Dispatch::from_inner(Dispatch::inner(tensor))
    }
}

/// Returns a tensor with the same memory and device that is a leaf.
pub(super) fn leaf(tensor: DispatchTensor) -> DispatchTensor {
    Dispatch::float_set_require_grad(untracked(tensor), true)
}

/// The relation between the copies in a module and the original leaves.
#[derive(Default)]
pub(super) struct DetachedModule {
    /// Leaf of each copy.
    pub(super) leaves: Leaves,
    /// The copies that units gather.
    gathered: HashSet<NodeId>,
    /// True if the module has an untracked tensor, which may be a running statistic.
    untrained: bool,
    /// Copy of each leaf, kept only during forward.
    by_leaf: HashMap<NodeId, DispatchTensor>,
    /// A leaf of the module, if it has one.
    pub(super) first: Option<DispatchTensor>,
    /// The most recent copy. A unit gathers it if a reparameterization of this crate follows.
    last: Option<NodeId>,
}

impl DetachedModule {
    /// Returns the module with copies of its trained parameters.
    pub(super) fn of<M: Module>(module: &M) -> (M, Self) {
        let mut detached = Self::default();
        let module = copying(|| module.clone().map(&mut detached));
        (module, detached)
    }

    /// Returns the copy of this shard, or an untracked one if the module does not contain the
    /// shard.
    pub(super) fn copy_of(&self, base: &DispatchTensor) -> DispatchTensor {
        if !Dispatch::is_tracked(base) {
            return base.clone();
        }
        let known = node_id(base.clone()).and_then(|leaf| self.by_leaf.get(&leaf));
        known.cloned().unwrap_or_else(|| untracked(base.clone()))
    }

    /// Drops the leaves at the end of forward.
    pub(super) fn forget_leaves(mut self) -> Self {
        (self.by_leaf, self.first) = (HashMap::new(), None);
        self
    }

    /// Returns the module with new leaves in place of the copies that no unit gathers, together
    /// with the original leaves. Updates of running statistics in its forward stay inside the
    /// returned module.
    ///
    /// # Errors
    /// [`ParamError::ParamNotVisited`](crate::param::ParamError::ParamNotVisited).
    pub(super) fn with_leaves<M: Module>(
        &self,
        module: M,
    ) -> Result<(M, Vec<(NodeId, DispatchTensor)>)> {
        let module = if self.untrained {
            copying(|| unshared(module))?
        } else {
            module
        };
        if self.leaves.len() == self.gathered.len() {
            return Ok((module, Vec::new()));
        }
        let mut growing = Growing {
            detached: self,
            grown: HashMap::new(),
        };
        let module = copying(|| module.map(&mut growing));
        Ok((
            module,
            growing
                .grown
                .into_iter()
                .map(|(copy, leaf)| (self.leaves[&copy], leaf))
                .collect(),
        ))
    }

    /// Returns true if the node is a copy that no unit gathers.
    fn is_ordinary(&self, node: NodeId) -> bool {
        self.leaves.contains_key(&node) && !self.gathered.contains(&node)
    }
}

impl ModuleMapper for DetachedModule {
    fn enter_module(&mut self, name: &str, _: &str) {
        if name == DistributedParameter::NAME {
            self.gathered.extend(self.last.take());
        }
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let base = param.base().into_dispatch();
        self.last = None;
        let Some(leaf) = node_id(base.clone()).filter(|_| Dispatch::is_tracked(&base)) else {
            self.untrained = true;
            return param;
        };
        self.first.get_or_insert_with(|| base.clone());
        let copy = self
            .by_leaf
            .entry(leaf)
            .or_insert_with(|| untracked(base))
            .clone();
        let node = node_id(copy.clone()).expect("it is on a device with autodiff");
        Arc::make_mut(&mut self.leaves).insert(node, leaf);
        self.last = Some(node);
        param.map(|_| Tensor::from_dispatch(copy))
    }
}

struct Growing<'a> {
    detached: &'a DetachedModule,
    /// The new leaves, by the copies from which they are made.
    grown: HashMap<NodeId, DispatchTensor>,
}

impl ModuleMapper for Growing<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let base = param.base().into_dispatch();
        let copy = autodiff::node_id(base.clone()).filter(|&copy| self.detached.is_ordinary(copy));
        let Some(copy) = copy else { return param };
        let grown = self.grown.entry(copy).or_insert_with(|| leaf(base)).clone();
        param.map(|_| Tensor::from_dispatch(grown))
    }
}
