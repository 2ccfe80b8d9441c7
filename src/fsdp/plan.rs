//! Which parameter belongs to which unit, decided before any value moves.

use std::collections::HashSet;
use std::sync::Arc;

use burn::module::Module;
use burn::tensor::DType;
use itertools::Itertools;

use super::by_unit::PerUnit;
use super::config::{FullyShard, ParamInfo, ParamPlacement};
use super::dims::FsdpMeshDims;
use super::precision::Policy;
use super::{FsdpError, MixedPrecisionPolicy};
use crate::Result;
use crate::memory;
use crate::mesh::DeviceMesh;
use crate::param::{ModelScan, OffloadPolicy, ScannedParam, TpPlacement, Unit, UnitName};
use crate::pattern::PathPattern;
use crate::placement::{Placement, ShardSizes};

/// A parameter to shard.
pub(super) struct PlannedParam {
    pub(super) path: String,
    /// Shape of what is cut: the parameter, or this rank's tensor-parallel shard of it.
    pub(super) shape: Vec<usize>,
    pub(super) dtype: DType,
    /// The cut dimension, and how it is cut; `None` to replicate.
    pub(super) sharding: Option<(usize, ShardSizes)>,
    /// Which mesh cuts it, of [`FsdpMeshDims::meshes`].
    pub(super) data: usize,
    pub(super) unit: UnitName,
    /// Path parts from the unit's module to the parameter.
    pub(super) depth: usize,
    /// What `parallelize` made of it.
    pub(super) parallel: Option<TpPlacement>,
}

/// What a call of `fully_shard` does.
pub(super) struct ShardingPlan {
    /// The parameters to shard.
    pub(super) params: Vec<PlannedParam>,
    /// Units made by earlier, inner calls, and their paths in this model.
    pub(super) adopted: Vec<(Arc<Unit>, UnitName)>,
    /// What it leaves out.
    pub(super) ignored: Arc<[PathPattern]>,
    pub(super) precisions: PerUnit<Policy>,
    pub(super) offloads: PerUnit<OffloadPolicy>,
    /// Whether the values of some are not drawn yet.
    pub(super) lazy: bool,
    /// Paths of the parameters with adapters, if there are any to shard.
    pub(super) adapted: HashSet<String>,
}

/// Decides unit and cut of every parameter of `model` that is neither ignored nor sharded yet, and over which of `dims`.
pub(super) fn plan<M: Module>(
    model: &M,
    mesh: &DeviceMesh,
    config: &FullyShard,
    dims: &mut FsdpMeshDims<'_>,
) -> Result<ShardingPlan> {
    let ignored = PathPattern::parse_all(&config.ignored)?;
    let inventory = ModelScan::of(model);
    // Parts of a sharded model may stand beside parameters of another, which this call shards; what has lost its
    // tensor-parallel placements it cannot place.
    let full = inventory.check_not_replaced();
    let is_parallel = |found: &ScannedParam| found.distributed.as_ref().is_some_and(|param| !param.is_data_parallel());
    if inventory.params.iter().any(is_parallel) {
        full.clone()?;
    }
    let units = UnitsOf::new(config, &inventory)?;
    inventory.check_params(&ignored)?;
    let is_ignored = |path: &str| ignored.iter().any(|pattern| pattern.matches(path));
    inventory.check(is_ignored)?;
    let offloads = PerUnit::new(&config.offload, &config.offload_for, |&offload| {
        if offload == OffloadPolicy::Cpu {
            check_host(memory::HAS_HOST)?;
        }
        Ok(offload)
    })?;
    let unit_of = |found: &ScannedParam| found.unit(|module| units.of(module));
    inventory.check_devices(mesh, is_ignored, |found| *offloads.of(&unit_of(found).0) == OffloadPolicy::Cpu)?;
    let adapted = inventory.adapted(is_ignored)?;
    let policy = |policy: &MixedPrecisionPolicy| Policy::new(policy, &inventory, mesh.device());
    let precisions = PerUnit::new(&config.precision, &config.precision_for, policy)?;

    let mut planned = Vec::new();
    let mut lazy = false;
    let mut adopted = Adopted::default();
    for found in inventory.params {
        let path = found.path();
        let sharded = found.distributed.as_ref().filter(|param| param.is_data_parallel());
        if let Some(sharded) = sharded {
            match found.module(sharded) {
                Some(module) if !module.is_empty() => adopted.add(&sharded.unit, module),
                _ => {
                    // What was replaced may be why it is called again.
                    full?;
                    return Err(FsdpError::AlreadySharded { unit: sharded.unit.label().to_string() }.into());
                }
            }
            continue;
        }
        if is_ignored(&path) {
            continue;
        }
        let (sharding, over) = choose_sharding(config, &found, &path)?;
        lazy |= found.lazy;
        let (unit, depth) = unit_of(&found);
        let mut parallel = found.distributed.and_then(|param| param.info().parallel.clone());
        let data = dims.of(&path, over.as_deref(), parallel.as_ref().map(|parallel| &*parallel.spec))?;
        parallel.iter_mut().for_each(|parallel| parallel.data_dims = dims.data_dims(&parallel.spec));
        planned.push(PlannedParam {
            path,
            shape: found.shape,
            dtype: found.dtype,
            sharding,
            data,
            unit,
            depth,
            parallel,
        });
    }
    let of_modules = planned.iter().map(|param| &param.unit).filter(|unit| !unit.is_root());
    let of_modules = of_modules.flat_map(|unit| unit.modules()).map(ToString::to_string);
    let of_modules = of_modules.unique().collect_vec();
    precisions.check_units(&of_modules)?;
    offloads.check_units(&of_modules)?;
    let (adopted, ignored) = (adopted.paths(), ignored.into());
    Ok(ShardingPlan { params: planned, adopted, ignored, precisions, offloads, lazy, adapted })
}

/// # Errors
/// [`FsdpError::NoHost`] unless there is a CPU backend.
fn check_host(has_host: bool) -> Result<(), FsdpError> {
    if has_host { Ok(()) } else { Err(FsdpError::NoHost) }
}

/// Units of earlier calls, and the modules of each in this model.
#[derive(Default)]
struct Adopted(Vec<(Arc<Unit>, Vec<String>)>);

impl Adopted {
    /// A module of a unit. A unit of one module that is here twice is called by the last.
    fn add(&mut self, unit: &Arc<Unit>, module: String) {
        // From the end: parameters of one unit mostly come one after the other.
        match self.0.iter_mut().rfind(|(known, _)| Arc::ptr_eq(known, unit)) {
            Some((_, modules)) if unit.is_group() => modules.push(module),
            Some((_, modules)) => *modules = vec![module],
            None => self.0.push((unit.clone(), vec![module])),
        }
    }

    fn paths(self) -> Vec<(Arc<Unit>, UnitName)> {
        let path = |modules: Vec<String>| UnitName::of_modules(modules.iter().map(String::as_str));
        self.0.into_iter().map(|(unit, modules)| (unit, path(modules))).collect()
    }
}

/// Which modules the configuration makes units of.
struct UnitsOf {
    /// Of one module each.
    single: Vec<PathPattern>,
    /// Of several, with the modules of each.
    groups: Vec<UnitName>,
}

impl UnitsOf {
    /// # Errors
    /// [`ParamError::Pattern`](crate::param::ParamError::Pattern), [`ParamError::NoMatch`](crate::param::ParamError::NoMatch),
    /// [`FsdpError::ModuleInTwoUnits`].
    fn new(config: &FullyShard, inventory: &ModelScan) -> Result<Self> {
        let single = PathPattern::parse_all(&config.units)?;
        inventory.check_modules(&single)?;
        let modules = inventory.modules();
        let mut groups: Vec<UnitName> = Vec::new();
        for patterns in &config.groups {
            let patterns = PathPattern::parse_all(patterns)?;
            inventory.check_modules(&patterns)?;
            let takes = |module: &&String| patterns.iter().any(|pattern| pattern.matches(module));
            let group = UnitName::of_modules(modules.iter().filter(takes).map(String::as_str));
            let is_taken = |module: &&Arc<str>| {
                single.iter().any(|pattern| pattern.matches(module))
                    || groups.iter().any(|other| other.modules().contains(module))
            };
            if let Some(module) = group.modules().iter().find(is_taken) {
                let (module, unit) = (module.to_string(), group.label().to_string());
                return Err(FsdpError::ModuleInTwoUnits { module, unit }.into());
            }
            groups.push(group);
        }
        Ok(Self { single, groups })
    }

    /// The unit that the module is in, if it is in one of its own or of a group.
    fn of(&self, module: &str) -> Option<UnitName> {
        let is_in = |group: &&UnitName| group.modules().iter().any(|other| **other == *module);
        match self.single.iter().any(|pattern| pattern.matches(module)) {
            true => Some(UnitName::of(module)),
            false => self.groups.iter().find(is_in).cloned(),
        }
    }
}

/// A parameter of which burn-nn reads the stored shape in forward, where a shard has another one.
struct StoredShape {
    /// The layer.
    module: &'static str,
    /// The parameter's path in it.
    field: &'static str,
    /// What leaves the part of the shape that is read as it is.
    placement: Placement,
}

const STORED_SHAPES: [StoredShape; 3] = [
    StoredShape { module: "BatchNorm", field: "gamma", placement: Placement::Replicate },
    StoredShape { module: "RmsNorm", field: "gamma", placement: Placement::Replicate },
    StoredShape { module: "PositionWiseFeedForward", field: "linear_inner.weight", placement: Placement::Shard(1) },
];

impl StoredShape {
    fn of(found: &ScannedParam) -> Option<&'static Self> {
        STORED_SHAPES.iter().find(|stored| {
            let parts: Vec<_> = stored.field.split('.').collect();
            found.path.ends_with(&parts.iter().map(ToString::to_string).collect::<Vec<_>>())
                && found.owner(parts.len() - 1) == Some(stored.module)
        })
    }
}

/// How a parameter is cut, and over which mesh dimensions if its placement names them.
type Chosen = (Option<(usize, ShardSizes)>, Option<Vec<String>>);

fn choose_sharding(config: &FullyShard, found: &ScannedParam, path: &str) -> Result<Chosen, FsdpError> {
    let shape = &found.shape;
    let stored = StoredShape::of(found);
    let choice = config.placement.as_ref().and_then(|f| f(ParamInfo { path, shape }));
    let default = stored.map_or(Placement::Shard(0), |stored| stored.placement);
    let ParamPlacement { placement, lengths, over } = choice.unwrap_or_else(|| default.into());
    if let Some(stored) = stored
        && ![stored.placement, Placement::Replicate].contains(&placement)
    {
        return Err(FsdpError::StoredShape {
            param: path.into(),
            module: stored.module,
            placement: placement.to_string(),
            remedy: stored.placement.to_string(),
        });
    }
    match placement {
        Placement::Replicate => Ok((None, over)),
        Placement::Shard(dim) if dim < shape.len() => {
            Ok((Some((dim, lengths.map_or(ShardSizes::Chunked(shape[dim]), ShardSizes::Uneven))), over))
        }
        placement => {
            Err(FsdpError::Placement { param: path.into(), shape: shape.to_vec(), placement: placement.to_string() })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_cpu_backend_there_is_no_host() {
        assert!(check_host(true).is_ok());
        let error = check_host(false).unwrap_err();
        assert!(matches!(error, FsdpError::NoHost) && error.to_string().contains("`flex`"), "{error}");
    }
}
