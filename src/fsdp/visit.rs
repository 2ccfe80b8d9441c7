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
}

/// The sharded parameters of `module`, in burn's order.
pub(super) fn sharded_parameters<M: Module>(module: &M) -> Vec<Visited> {
    let mut collect = Collect { depth: 0, base: None, found: Vec::new() };
    module.visit(&mut collect);
    collect.found
}

struct Collect {
    depth: usize,
    base: Option<(ParamId, DispatchTensor)>,
    found: Vec<Visited>,
}

impl ModuleVisitor for Collect {
    fn enter_module(&mut self, _: &str, _: &str) {
        self.depth += 1;
    }

    fn exit_module(&mut self, name: &str, _: &str) {
        self.depth -= 1;
        if name == ShardedParameter::NAME
            && let (Some(sharded), Some((id, base))) = (take_visited(), self.base.take())
        {
            self.found.push(Visited { id, sharded, base, depth: self.depth });
        }
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.base = param.is_initialized().then(|| (param.id, param.base().into_dispatch()));
    }
}
