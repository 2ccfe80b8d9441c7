//! [`DetachedModule`]: a module whose parameters are no part of the graph that its own are leaves of.
//!
//! A node of the graph must hold no tensor of it, which would keep it alive, and a graph cannot be added to while its
//! backward runs. So a checkpointed block computes with copies: untracked for the first time; again, the parameters that
//! no unit gathers are leaves of the block's own graph.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use burn::backend::autodiff::NodeId;
use burn::backend::ops::FloatTensorOps;
use burn::backend::{AutodiffBackend, Dispatch, DispatchTensor};
use burn::module::{Module, ModuleMapper, Param, Reparameterization};
use burn::tensor::Tensor;

use super::leaves::Leaves;
use crate::Result;
use crate::autodiff::{self, node_id};
use crate::param::buffers::unshared;
use crate::param::distributed::DistributedParameter;
use crate::param::states::copying;

/// An untracked tensor of the same memory, on the same device.
pub(super) fn untracked(tensor: DispatchTensor) -> DispatchTensor {
    let autodiff = tensor.autodiff;
    DispatchTensor { autodiff, ..Dispatch::from_inner(Dispatch::inner(tensor)) }
}

/// The same as a leaf.
pub(super) fn leaf(tensor: DispatchTensor) -> DispatchTensor {
    Dispatch::float_set_require_grad(untracked(tensor), true)
}

/// What is known of the copies in a module.
pub(super) struct DetachedModule {
    /// Of each copy its leaf.
    pub(super) leaves: Leaves,
    /// The leaves that no unit gathers, by their copies.
    ordinary: HashMap<NodeId, NodeId>,
    /// Whether a tensor may be a running statistic.
    untrained: bool,
    /// Of each leaf its copy: as long as forward lasts.
    by_leaf: HashMap<NodeId, DispatchTensor>,
    /// A leaf.
    pub(super) first: Option<DispatchTensor>,
}

impl DetachedModule {
    /// The module with copies of its trained parameters.
    pub(super) fn of<M: Module>(module: &M) -> (M, Self) {
        let mut made = Copying::default();
        let module = copying(|| module.clone().map(&mut made));
        let Copying { leaves, gathered, untrained, by_leaf, first, .. } = made;
        let ordinary = leaves.iter().filter(|(copy, _)| !gathered.contains(copy));
        let ordinary = ordinary.map(|(&copy, &leaf)| (copy, leaf)).collect();
        (module, Self { leaves: Arc::new(leaves), ordinary, untrained, by_leaf, first })
    }

    /// The copy of this shard, or an untracked one if the module does not have it.
    pub(super) fn copy_of(&self, base: &DispatchTensor) -> DispatchTensor {
        if !Dispatch::is_tracked(base) {
            return base.clone();
        }
        let known = node_id(base.clone()).and_then(|leaf| self.by_leaf.get(&leaf));
        known.cloned().unwrap_or_else(|| untracked(base.clone()))
    }

    /// Forward is over.
    pub(super) fn forget_leaves(mut self) -> Self {
        (self.by_leaf, self.first) = (HashMap::new(), None);
        self
    }

    /// The module with new leaves in the place of what no unit gathers, and the leaves that those stand for. What its
    /// forward writes, it writes to itself.
    ///
    /// # Errors
    /// [`ParamError::ParamNotVisited`](crate::param::ParamError::ParamNotVisited).
    pub(super) fn with_leaves<M: Module>(&self, module: M) -> Result<(M, Vec<(NodeId, DispatchTensor)>)> {
        let module = if self.untrained { copying(|| unshared(module))? } else { module };
        if self.ordinary.is_empty() {
            return Ok((module, Vec::new()));
        }
        let mut growing = Growing { ordinary: &self.ordinary, grown: HashMap::new() };
        let module = copying(|| module.map(&mut growing));
        Ok((module, growing.grown.into_iter().map(|(copy, leaf)| (self.ordinary[&copy], leaf)).collect()))
    }
}

#[derive(Default)]
struct Copying {
    leaves: HashMap<NodeId, NodeId>,
    /// The copies that units gather.
    gathered: HashSet<NodeId>,
    untrained: bool,
    by_leaf: HashMap<NodeId, DispatchTensor>,
    first: Option<DispatchTensor>,
    /// The copy made last: gathered, if its reparameterization says so.
    last: Option<NodeId>,
}

impl ModuleMapper for Copying {
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
        let copy = self.by_leaf.entry(leaf).or_insert_with(|| untracked(base)).clone();
        let node = node_id(copy.clone()).expect("it is on a device with autodiff");
        self.leaves.insert(node, leaf);
        self.last = Some(node);
        param.map(|_| Tensor::from_dispatch(copy))
    }
}

struct Growing<'a> {
    ordinary: &'a HashMap<NodeId, NodeId>,
    /// The leaves, by the copies that they are made of.
    grown: HashMap<NodeId, DispatchTensor>,
}

impl ModuleMapper for Growing<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let base = param.base().into_dispatch();
        let copy = autodiff::node_id(base.clone()).filter(|copy| self.ordinary.contains_key(copy));
        let Some(copy) = copy else { return param };
        let grown = self.grown.entry(copy).or_insert_with(|| leaf(base)).clone();
        param.map(|_| Tensor::from_dispatch(grown))
    }
}
