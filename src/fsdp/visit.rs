//! Walking a module's sharded parameters.

use burn::backend::DispatchTensor;
use burn::module::{Module, ModuleVisitor, Param, ParamId, Reparameterization};
use burn::tensor::Tensor;

use super::param::{ShardedParameter, take_visited};

/// One sharded parameter of a visited module.
pub(super) struct Visited {
    pub(super) id: ParamId,
    pub(super) sharded: ShardedParameter,
    /// This rank's shard, as the optimizer sees it.
    pub(super) base: DispatchTensor,
    /// Path parts from the visited module down to the parameter.
    pub(super) depth: usize,
    /// Those parts, where asked for.
    pub(super) path: Option<String>,
}

/// The sharded parameters of `module`, in burn's order.
pub(super) fn sharded_parameters<M: Module>(module: &M) -> Vec<Visited> {
    collect(module, None)
}

/// [`sharded_parameters`] with their paths.
pub(super) fn sharded_parameters_with_paths<M: Module>(module: &M) -> Vec<Visited> {
    collect(module, Some(Vec::new()))
}

fn collect<M: Module>(module: &M, path: Option<Vec<String>>) -> Vec<Visited> {
    let mut collect = Collect { depth: 0, path, last: None, found: Vec::new() };
    take_visited();
    module.visit(&mut collect);
    collect.found
}

struct Collect {
    depth: usize,
    path: Option<Vec<String>>,
    /// The tensor visited last: sharded, if its reparameterization follows.
    last: Option<(ParamId, DispatchTensor)>,
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
        if name == ShardedParameter::NAME
            && let (Some(sharded), Some((id, base))) = (take_visited(), self.last.take())
        {
            let path = self.path.as_ref().map(|path| path.join("."));
            self.found.push(Visited { id, sharded, base, depth: self.depth, path });
        }
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.last = param.is_initialized().then(|| (param.id, param.base().into_dispatch()));
    }
}
