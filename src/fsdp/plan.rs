//! Plan of one `fully_shard` call: decides which parameter belongs to which unit, before any value
//! moves.

use std::collections::HashSet;
use std::mem;
use std::sync::Arc;

use burn::module::Module;
use burn::tensor::DType;
use itertools::Itertools;

use super::FsdpError;
use super::by_unit::PerUnit;
use super::config::{FullyShard, ParamInfo, ParamPlacement};
use super::dims::FsdpMeshDims;
use super::precision::Policy;
use crate::Result;
use crate::burn_compat::{BurnLayer, Container};
use crate::memory;
use crate::mesh::DeviceMesh;
use crate::param::{
    Layer, ModelScan, OffloadPolicy, ScannedParam, TpPlacement, Unit, UnitName, check_patterns,
};
use crate::pattern::PathPattern;
use crate::placement::{Placement, ShardSizes};

/// A parameter to shard.
pub(super) struct PlannedParam {
    pub(super) path: String,
    /// Shape of the tensor that is sharded: the parameter, or this rank's tensor-parallel shard of
    /// it.
    pub(super) shape: Vec<usize>,
    pub(super) dtype: DType,
    /// The sharded dimension, with the shard sizes; `None` to replicate.
    pub(super) sharding: Option<(usize, ShardSizes)>,
    /// Index, among [`FsdpMeshDims::meshes`], of the mesh that shards it.
    pub(super) data: usize,
    pub(super) unit: UnitName,
    /// Number of path components from the unit's module down to the parameter.
    pub(super) depth: usize,
    /// Tensor-parallel placement by `parallelize`, if any.
    pub(super) parallel: Option<TpPlacement>,
}

/// Plan of one `fully_shard` call.
pub(super) struct ShardingPlan {
    /// The parameters to shard.
    pub(super) params: Vec<PlannedParam>,
    /// Units made by earlier, inner calls, and their paths in this model.
    pub(super) adopted: Vec<(Arc<Unit>, UnitName)>,
    /// Patterns of the parameters that are ignored.
    pub(super) ignored: Arc<[PathPattern]>,
    pub(super) precisions: PerUnit<Policy>,
    pub(super) offloads: PerUnit<OffloadPolicy>,
    /// True if the values of some parameters are not initialized yet.
    pub(super) lazy: bool,
    /// Paths of the parameters to shard that have adapters (LoRA).
    pub(super) adapted: HashSet<String>,
    /// Layers about which the call may warn.
    pub(super) layers: Vec<Layer>,
}

/// Decides the unit, the sharding and the mesh dimensions among `dims` of every parameter of
/// `model` that is neither ignored nor sharded yet.
pub(super) fn plan<M: Module>(
    model: &M,
    mesh: &DeviceMesh,
    config: &FullyShard,
    dims: &mut FsdpMeshDims<'_>,
) -> Result<ShardingPlan> {
    let ignored = PathPattern::parse_all(&config.ignored)?;
    let mut scan = ModelScan::of(model);
    let layers = mem::take(&mut scan.layers);
    // Modules of a sharded model may be combined with parameters of another model, which this call
    // shards. But a parameter that was replaced has lost its tensor-parallel placements, and cannot
    // be placed.
    let full = scan.check_not_replaced();
    let mut distributed = scan.params.iter().flat_map(|found| &found.distributed);
    if distributed.any(|param| !param.is_data_parallel()) {
        full.clone()?;
    }
    let units = UnitsOf::new(config, &scan)?;
    check_patterns(&ignored, "parameter", &scan.paths())?;
    let is_ignored = |path: &str| ignored.iter().any(|pattern| pattern.matches(path));
    scan.check(is_ignored)?;
    let offloads = PerUnit::new(&config.offload, &config.offload_for, |&offload| {
        if offload == OffloadPolicy::Cpu {
            check_host(memory::HAS_HOST)?;
        }
        Ok(offload)
    })?;
    let unit_of = |found: &ScannedParam| found.unit(|module| units.of(module));
    scan.check_devices(mesh, is_ignored, |found| {
        *offloads.of(&unit_of(found).0) == OffloadPolicy::Cpu
    })?;
    let adapted = scan.adapted(is_ignored)?;
    let precisions = PerUnit::new(&config.precision, &config.precision_for, |policy| {
        Policy::new(policy, &scan, mesh.device())
    })?;

    let mut planned = Vec::new();
    let mut lazy = false;
    let mut adopted = Adopted::default();
    for found in scan.params {
        let path = found.path();
        let sharded = found
            .distributed
            .as_ref()
            .filter(|param| param.is_data_parallel());
        if let Some(sharded) = sharded {
            match found.module(sharded) {
                Some(module) if !module.is_empty() => adopted.add(&sharded.unit, module),
                _ => {
                    // A replaced parameter may be the reason for the repeated call, so that error
                    // is returned first.
                    full?;
                    return Err(FsdpError::AlreadySharded {
                        unit: sharded.unit.label().to_string(),
                    }
                    .into());
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
        let mut parallel = found
            .distributed
            .and_then(|param| param.info().parallel.clone());
        let data = dims.of(
            &path,
            over.as_deref(),
            parallel.as_ref().map(|parallel| &*parallel.spec),
        )?;
        parallel
            .iter_mut()
            .for_each(|parallel| parallel.data_dims = dims.data_dims(&parallel.spec));
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
    let of_modules = planned
        .iter()
        .map(|param| &param.unit)
        .filter(|unit| !unit.is_root());
    let of_modules = of_modules
        .flat_map(|unit| unit.modules())
        .map(ToString::to_string);
    let of_modules = of_modules.unique().collect_vec();
    precisions.check_units(&of_modules)?;
    offloads.check_units(&of_modules)?;
    let adopted = adopted.paths();
    let ignored = ignored.into();
    Ok(ShardingPlan {
        params: planned,
        adopted,
        ignored,
        precisions,
        offloads,
        lazy,
        adapted,
        layers,
    })
}

/// Checks that shards can be in host memory.
///
/// # Errors
/// [`FsdpError::NoHost`] without a CPU backend.
fn check_host(has_host: bool) -> Result<(), FsdpError> {
    if has_host {
        Ok(())
    } else {
        Err(FsdpError::NoHost)
    }
}

/// Units made by earlier calls, with the modules of each in this model.
#[derive(Default)]
struct Adopted(Vec<(Arc<Unit>, Vec<String>)>);

impl Adopted {
    /// Adds a module of a unit. If the module of a unit of one module occurs twice, the unit takes
    /// the last path.
    fn add(&mut self, unit: &Arc<Unit>, module: String) {
        // Searched from the end, because the parameters of a unit usually follow one another.
        match self
            .0
            .iter_mut()
            .rfind(|(known, _)| Arc::ptr_eq(known, unit))
        {
            Some((_, modules)) if unit.comm.is_group() => modules.push(module),
            Some((_, modules)) => *modules = vec![module],
            None => self.0.push((unit.clone(), vec![module])),
        }
    }

    fn paths(self) -> Vec<(Arc<Unit>, UnitName)> {
        let path = |modules: Vec<String>| UnitName::of_modules(modules.iter().map(String::as_str));
        self.0
            .into_iter()
            .map(|(unit, modules)| (unit, path(modules)))
            .collect()
    }
}

/// The units that the configuration requests.
struct UnitsOf {
    /// Patterns of modules that each become a unit.
    single: Vec<PathPattern>,
    /// Group units, with the modules of each.
    groups: Vec<UnitName>,
}

impl UnitsOf {
    /// Resolves the patterns of `config`.
    ///
    /// # Errors
    /// [`ParamError::Pattern`](crate::param::ParamError::Pattern),
    /// [`ParamError::NoMatch`](crate::param::ParamError::NoMatch), [`FsdpError::ModuleInTwoUnits`].
    fn new(config: &FullyShard, scan: &ModelScan) -> Result<Self> {
        let single = PathPattern::parse_all(&config.units)?;
        let modules = scan.modules();
        check_patterns(&single, "module", &modules)?;
        let mut groups: Vec<UnitName> = Vec::new();
        for patterns in &config.groups {
            let patterns = PathPattern::parse_all(patterns)?;
            check_patterns(&patterns, "module", &modules)?;
            let group = UnitName::of_modules(
                modules
                    .iter()
                    .filter(|module| patterns.iter().any(|pattern| pattern.matches(module)))
                    .map(String::as_str),
            );
            let is_taken = |module: &&Arc<str>| {
                single.iter().any(|pattern| pattern.matches(module))
                    || groups.iter().any(|other| other.modules().contains(module))
            };
            if let Some(module) = group.modules().iter().find(is_taken) {
                let module = module.to_string();
                let unit = group.label().to_string();
                return Err(FsdpError::ModuleInTwoUnits { module, unit }.into());
            }
            groups.push(group);
        }
        Ok(Self { single, groups })
    }

    /// Returns the unit of the module: the module's own unit or a group unit, if it is in one.
    fn of(&self, module: &str) -> Option<UnitName> {
        match self.single.iter().any(|pattern| pattern.matches(module)) {
            true => Some(UnitName::of(module)),
            false => self
                .groups
                .iter()
                .find(|group| group.modules().iter().any(|other| **other == *module))
                .cloned(),
        }
    }
}

/// A parameter whose stored shape burn-nn reads in forward, where a shard has another shape.
struct StoredShape {
    layer: BurnLayer,
    /// Path of the parameter in the layer.
    field: &'static str,
    /// Placement that keeps the dimensions that the layer reads.
    placement: Placement,
}

const STORED_SHAPES: [StoredShape; 3] = [
    StoredShape {
        layer: BurnLayer::BatchNorm,
        field: "gamma",
        placement: Placement::Replicate,
    },
    StoredShape {
        layer: BurnLayer::RmsNorm,
        field: "gamma",
        placement: Placement::Replicate,
    },
    StoredShape {
        layer: BurnLayer::PositionWiseFeedForward,
        field: "linear_inner.weight",
        placement: Placement::Shard(1),
    },
];

impl StoredShape {
    fn of(found: &ScannedParam) -> Option<&'static Self> {
        STORED_SHAPES.iter().find(|stored| {
            let parts: Vec<_> = stored.field.split('.').collect();
            found
                .path
                .ends_with(&parts.iter().map(ToString::to_string).collect::<Vec<_>>())
                && found.container(parts.len() - 1).and_then(Container::layer) == Some(stored.layer)
        })
    }
}

/// Sharding of a parameter, and the mesh dimensions that its placement names, if any.
type Chosen = (Option<(usize, ShardSizes)>, Option<Vec<String>>);

fn choose_sharding(
    config: &FullyShard,
    found: &ScannedParam,
    path: &str,
) -> Result<Chosen, FsdpError> {
    let shape = &found.shape;
    let stored = StoredShape::of(found);
    let choice = config
        .placement
        .as_ref()
        .and_then(|choose| (choose.0)(ParamInfo { path, shape }));
    let default = stored.map_or(Placement::Shard(0), |stored| stored.placement);
    let ParamPlacement {
        placement,
        lengths,
        over,
    } = choice.unwrap_or_else(|| default.into());
    if let Some(stored) = stored
        && ![stored.placement, Placement::Replicate].contains(&placement)
    {
        return Err(FsdpError::StoredShape {
            param: path.into(),
            module: stored.layer.name(),
            placement: placement.to_string(),
            remedy: stored.placement.to_string(),
        });
    }
    match placement {
        Placement::Replicate => Ok((None, over)),
        Placement::Shard(dim) if dim < shape.len() => Ok((
            Some((
                dim,
                lengths.map_or(ShardSizes::Chunked(shape[dim]), ShardSizes::Uneven),
            )),
            over,
        )),
        placement => Err(FsdpError::Placement {
            param: path.into(),
            shape: shape.to_vec(),
            placement: placement.to_string(),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_cpu_backend_there_is_no_host() {
        assert!(check_host(true).is_ok());
        let error = check_host(false).unwrap_err();
        assert!(
            matches!(error, FsdpError::NoHost) && error.to_string().contains("`flex`"),
            "{error}"
        );
    }
}
