//! Visitor that collects a module's distributed parameters.

use burn::backend::DispatchTensor;
use burn::module::{Module, ModuleVisitor, Param, ParamId, Reparameterization};
use burn::tensor::Tensor;

use super::distributed::{DistributedParameter, take_visited};
use super::read::value;
use super::states::ParamStateHandle;
use crate::Result;

/// Function that reads a parameter whose number of dimensions is erased.
type ReadFn = fn(&DistributedParameter, DispatchTensor) -> Result<()>;

/// One distributed parameter of a visited module.
pub(crate) struct Visited {
    pub(crate) id: ParamId,
    pub(crate) param: DistributedParameter,
    /// This rank's shard, as the optimizer sees it.
    pub(crate) base: DispatchTensor,
    /// Reads the full parameter by [`value`], with its number of dimensions.
    pub(crate) read: ReadFn,
    /// Number of path components from the visited module down to the parameter.
    pub(crate) depth: usize,
    /// The path, if it was requested.
    pub(crate) path: Option<String>,
}

/// Parameters and other tensors that a visitor finds in a module.
pub(crate) struct Walk {
    /// The module's distributed parameters, in burn's order.
    pub(crate) distributed: Vec<Visited>,
    /// Number of float tensors that are not distributed parameters: buffers, and parameters that are not
    /// distributed.
    pub(super) others: usize,
}

impl Visited {
    /// Returns its index in its unit, its state, and its shard.
    pub(super) fn shard(self) -> (usize, ParamStateHandle, DispatchTensor) {
        (self.param.index, self.param.state, self.base)
    }
}

/// Collects the distributed parameters of `module`.
pub(crate) fn walk<M: Module>(module: &M) -> Walk {
    collect(module, None)
}

/// Like [`walk`], and records the paths of the parameters.
pub(crate) fn walk_with_paths<M: Module>(module: &M) -> Walk {
    collect(module, Some(Vec::new()))
}

fn collect<M: Module>(module: &M, path: Option<Vec<String>>) -> Walk {
    let mut collect = Collect { depth: 0, path, last: None, floats: 0, found: Vec::new() };
    take_visited();
    module.visit(&mut collect);
    Walk { others: collect.floats - collect.found.len(), distributed: collect.found }
}

struct Collect {
    depth: usize,
    path: Option<Vec<String>>,
    /// The tensor visited last. It is distributed if its reparameterization follows.
    last: Option<(ParamId, DispatchTensor, ReadFn)>,
    floats: usize,
    found: Vec<Visited>,
}

impl ModuleVisitor for Collect {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.depth += 1;
        if let Some(path) = &mut self.path {
            path.push(name.into());
        }
    }

    fn exit_module(&mut self, name: &str, _: &str) {
        self.depth -= 1;
        if let Some(path) = &mut self.path {
            path.pop();
        }
        if name == DistributedParameter::NAME
            && let (Some(param), Some((id, base, read))) = (take_visited(), self.last.take())
        {
            let path = self.path.as_ref().map(|path| path.join("."));
            self.found.push(Visited { id, param, base, read, depth: self.depth, path });
        }
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.floats += 1;
        let read = |param: &DistributedParameter, base| value(param, Tensor::<D>::from_dispatch(base)).map(drop);
        self.last = param.is_initialized().then(|| (param.id, param.base().into_dispatch(), read as _));
    }
}
