//! Visitors of a module's distributed parameters: [`walk`] and [`check_not_replaced`].

use std::sync::Arc;

use burn::backend::{DispatchTensor, TensorMetadata};
use burn::module::{Module, ModuleVisitor, Param, ParamId, Reparameterization};
use burn::tensor::Tensor;
use itertools::Itertools;

use super::ParamError;
use super::distributed::{DistributedParameter, take_visited};
use super::model_scan::{ModelScan, ScannedParam};
use super::states::ParamStateHandle;
use super::unit::Unit;
use crate::dtensor::DTensorSpec;
use crate::pattern::PathPattern;

/// One distributed parameter of a visited module.
pub(crate) struct Visited {
    pub(crate) id: ParamId,
    pub(crate) param: DistributedParameter,
    /// This rank's shard, as the optimizer sees it.
    pub(crate) base: DispatchTensor,
    /// Number of path components from the visited module down to the parameter.
    pub(crate) depth: usize,
    /// The path, if it was requested.
    pub(crate) path: Option<String>,
}

/// Parameters and other tensors that a visitor finds in a module.
pub(crate) struct Walk {
    /// The module's distributed parameters, in burn's order.
    pub(crate) distributed: Vec<Visited>,
    /// Number of float tensors that are not distributed parameters: buffers, and parameters that
    /// are not distributed.
    pub(super) others: usize,
}

/// The shards of one unit's parameters that a model holds.
pub(crate) struct UnitShards {
    pub(crate) unit: Arc<Unit>,
    /// The shards, in the order of the unit.
    pub(crate) shards: Vec<UnitShard>,
}

/// This rank's shard of one parameter, as the optimizer sees it.
pub(crate) struct UnitShard {
    pub(crate) id: ParamId,
    pub(crate) shard: DispatchTensor,
    /// Spec of the parameter over all mesh dimensions that place it, of which `shard` is the local
    /// tensor.
    pub(crate) spec: Arc<DTensorSpec>,
}

impl Walk {
    /// Returns the shards by unit. Units are in the order in which the model first holds a
    /// parameter of theirs, which is the same on all ranks.
    pub(crate) fn unit_shards(&self) -> Vec<UnitShards> {
        let mut units: Vec<(Arc<Unit>, Vec<&Visited>)> = Vec::new();
        for visited in &self.distributed {
            let unit = &visited.param.unit;
            match units.iter_mut().find(|(known, _)| Arc::ptr_eq(known, unit)) {
                Some((_, params)) => params.push(visited),
                None => units.push((unit.clone(), vec![visited])),
            }
        }
        let mut all = Vec::new();
        for (unit, mut params) in units {
            params.sort_by_key(|visited| visited.param.index);
            params.dedup_by_key(|visited| visited.param.index);
            let shards = params.into_iter().map(Visited::unit_shard).collect();
            all.push(UnitShards { unit, shards });
        }
        all
    }
}

impl Visited {
    fn unit_shard(&self) -> UnitShard {
        UnitShard {
            id: self.id,
            shard: self.base.clone(),
            spec: self.param.spec(self.base.dtype()),
        }
    }

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
    let mut collect = Collect {
        depth: 0,
        path,
        last: None,
        floats: 0,
        found: Vec::new(),
    };
    take_visited();
    module.visit(&mut collect);
    Walk {
        others: collect.floats - collect.found.len(),
        distributed: collect.found,
    }
}

struct Collect {
    depth: usize,
    path: Option<Vec<String>>,
    /// The tensor visited last. It is distributed if its reparameterization follows.
    last: Option<(ParamId, DispatchTensor)>,
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
            && let (Some(param), Some((id, base))) = (take_visited(), self.last.take())
        {
            let path = self.path.as_ref().map(|path| path.join("."));
            self.found.push(Visited {
                id,
                param,
                base,
                depth: self.depth,
                path,
            });
        }
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.floats += 1;
        self.last = param
            .is_initialized()
            .then(|| (param.id, param.base().into_dispatch()));
    }
}

/// Checks that no parameter inside `module` has been replaced since it was distributed.
///
/// Local. The check costs nothing if every tensor of `module` is distributed, and almost nothing if
/// the module, or a clone of it, passed before.
///
/// # Errors
/// [`ParamError::Replaced`].
///
/// A parameter that the program assigns, or makes from the old one (`param.map(..)`,
/// `param.set_require_grad(..)`), has lost its
/// [`DistributedParameter`](super::DistributedParameter). It is not gathered, its gradient is not
/// reduced, and the ranks drift apart. The other parameters show for which module the distributing
/// call was made, because each knows its path in that module:
///
/// ```text
///   when distributed   blocks.0.weight       blocks.0.weight      blocks.0.weight      weight
///   now                blocks.0.weight       0.weight             net.blocks.0.weight  blocks.0.weight
///   the call was for   this module           one around it        `net`                `blocks.0`
/// ```
///
/// All parameters in that module were distributed then, except those ignored. Nothing is known of
/// parameters outside it, nor of a module in which no parameter is distributed any more.
pub(crate) fn check_not_replaced<M: Module>(module: &M, walk: &Walk) -> Result<(), ParamError> {
    let Some(first) = walk.distributed.first() else {
        return Ok(());
    };
    let key = [
        first.depth,
        first.param.index,
        walk.distributed.len(),
        walk.others,
    ];
    if walk.others == 0 {
        return Ok(());
    }
    first
        .param
        .unit
        .check_once(key, || ModelScan::of(module).check_not_replaced())
}

impl ModelScan {
    /// Checks that no parameter has been replaced since the others of its module were distributed.
    ///
    /// # Errors
    /// [`ParamError::Replaced`].
    pub(crate) fn check_not_replaced(&self) -> Result<(), ParamError> {
        let calls = self.params.iter().filter_map(DistributeCall::of);
        let calls = calls
            .unique_by(|call| (call.around, call.inside, call.ignored.as_ptr()))
            .collect_vec();
        let own = self
            .params
            .iter()
            .filter(|found| found.distributed.is_none())
            .map(|found| &found.path);
        let lost = own.chain(self.foreign.iter().map(|(path, _)| path));
        let mut lost = lost.flat_map(|path| calls.iter().filter_map(|call| call.lost(path)));
        lost.next()
            .map_or(Ok(()), |param| Err(ParamError::Replaced { param }))
    }
}

/// A call that distributed a module, seen from the module that is checked.
struct DistributeCall<'a> {
    /// Path of the call's module in the checked module.
    around: &'a [String],
    /// Path of the checked module in the call's module.
    inside: &'a str,
    ignored: &'a [PathPattern],
}

impl<'a> DistributeCall<'a> {
    /// Returns the call that distributed a parameter, or `None` if the parameter was moved to
    /// another path since.
    fn of(found: &'a ScannedParam) -> Option<Self> {
        let param = found.distributed.as_ref()?;
        let before = param
            .info()
            .path
            .split('.')
            .filter(|part| !part.is_empty())
            .collect_vec();
        let ignored = param
            .unit
            .spec()
            .data
            .as_ref()
            .map_or(&[][..], |data| &data.ignored);
        let common = before.len().min(found.path.len());
        let (around, end) = found.path.split_at(found.path.len() - common);
        if !end.iter().eq(&before[before.len() - common..]) {
            return None;
        }
        let inside = param.info().path.len() - end.join(".").len();
        Some(Self {
            around,
            inside: &param.info().path[..inside],
            ignored,
        })
    }

    /// Returns the path under which this call should have distributed a parameter that is not
    /// distributed. Returns `None` if the parameter is outside the call's module or was ignored.
    fn lost(&self, path: &[String]) -> Option<String> {
        let path = path.strip_prefix(self.around)?;
        let path = format!("{}{}", self.inside, path.join("."));
        (!self.ignored.iter().any(|pattern| pattern.matches(&path))).then_some(path)
    }
}
