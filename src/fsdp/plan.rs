//! Which parameter belongs to which unit, decided before any value moves.

use burn::module::{Module, ModuleVisitor, Param, Reparameterization, Reparameterizer};
use burn::tensor::{Device, Tensor};
use itertools::Itertools;

use super::FsdpError;
use super::config::{FullyShard, ParamInfo};
use super::param::{ShardedParameter, take_visited};
use super::pattern::PathPattern;
use crate::placement::Placement;

/// A parameter to shard.
pub(super) struct Planned {
    pub(super) path: String,
    pub(super) shape: Vec<usize>,
    /// The cut dimension; `None` to replicate.
    pub(super) dim: Option<usize>,
    /// Path of the unit's module.
    pub(super) unit: String,
    /// Path parts from there to the parameter.
    pub(super) depth: usize,
}

/// Marks parameters. burn shows visitors buffers (`RunningState`) and parameters alike, but only a
/// parameter keeps a reparameterization.
#[derive(Module, Debug)]
struct Marker;

impl Reparameterization for Marker {
    const NAME: &'static str = "parameter";

    fn apply<const D: usize>(&self, base: Tensor<D>) -> Tensor<D> {
        base
    }
}

impl Reparameterizer for Marker {
    type Reparam = Marker;

    fn reparameterize<const D: usize>(
        &mut self,
        _: &str,
        param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Option<Marker>) {
        (param, Some(Marker))
    }
}

/// Every float parameter of a marked model, as found before sharding.
#[derive(Default)]
struct Inventory {
    path: Vec<String>,
    /// For each part of the path, the type of the module it is a field of.
    owners: Vec<String>,
    /// The tensor visited last: a parameter if a reparameterization follows, else a buffer.
    last: Option<Found>,
    params: Vec<Found>,
    /// Parameters with a reparameterization of another kind, and its name.
    foreign: Vec<(String, String)>,
}

struct Found {
    path: Vec<String>,
    owners: Vec<String>,
    shape: Vec<usize>,
    /// Its unit, if an earlier call sharded it.
    sharded: Option<ShardedParameter>,
}

impl ModuleVisitor for Inventory {
    fn enter_module(&mut self, name: &str, owner: &str) {
        // What follows a parameter is its own reparameterization, and nothing else is of this type.
        if owner == "Reparameterization"
            && let Some(param) = self.last.take()
        {
            match name {
                Marker::NAME | ShardedParameter::NAME => self.params.push(param),
                _ => self.foreign.push((param.path.join("."), name.into())),
            }
        }
        self.path.push(name.into());
        self.owners.push(owner.into());
    }

    fn exit_module(&mut self, name: &str, owner: &str) {
        self.path.pop();
        self.owners.pop();
        if (name, owner) == (ShardedParameter::NAME, "Reparameterization")
            && let Some(param) = self.params.last_mut()
        {
            param.sharded = take_visited();
        }
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let shape = param.lazy_shape().to_vec();
        let (path, owners) = (self.path.clone(), self.owners.clone());
        self.last = Some(Found { path, owners, shape, sharded: None });
    }
}

/// Decides unit and cut of every parameter of `model` that is neither ignored nor sharded yet.
///
/// Units made by earlier, inner calls get their path in this model.
pub(super) fn plan<M: Module>(model: &M, config: &FullyShard) -> Result<Vec<Planned>, FsdpError> {
    let units = PathPattern::parse_all(&config.units)?;
    let ignored = PathPattern::parse_all(&config.ignored)?;
    let mut inventory = Inventory::default();
    take_visited();
    model.clone().apply_reparameterization(Marker).visit(&mut inventory);
    check_matches(&units, &ignored, &inventory.params)?;
    let mut foreign = inventory.foreign.into_iter();
    if let Some((param, name)) = foreign.find(|(path, _)| !ignored.iter().any(|pattern| pattern.matches(path))) {
        return Err(FsdpError::Reparameterized { param, name });
    }

    let mut planned = Vec::new();
    let mut adopted = Vec::new();
    for Found { path: parts, owners, shape, sharded } in inventory.params {
        let path = parts.join(".");
        if let Some(sharded) = sharded {
            let module = parts.len() - sharded.info().depth;
            if module == 0 {
                return Err(FsdpError::AlreadySharded { unit: sharded.unit.label().to_string() });
            }
            adopted.push((sharded.unit, parts[..module].join(".")));
            continue;
        }
        if ignored.iter().any(|pattern| pattern.matches(&path)) {
            continue;
        }
        let module =
            modules(&parts).rev().find(|module| units.iter().any(|unit| unit.matches(module))).unwrap_or_default();
        let depth = parts.len() - module.split('.').filter(|part| !part.is_empty()).count();
        let stored = StoredShape::of(&parts, &owners);
        let dim = cut(config, stored, &path, &shape)?;
        planned.push(Planned { path, shape, dim, unit: module, depth });
    }
    for (unit, path) in adopted {
        unit.adopt(&path);
    }
    Ok(planned)
}

/// Paths of the modules that hold a parameter, outermost first.
fn modules(parts: &[String]) -> impl DoubleEndedIterator<Item = String> + '_ {
    (1..parts.len()).map(|end| parts[..end].join("."))
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
    fn of(path: &[String], owners: &[String]) -> Option<&'static Self> {
        STORED_SHAPES.iter().find(|stored| {
            let depth = stored.field.split('.').count();
            let Some(start) = path.len().checked_sub(depth) else { return false };
            path[start..].iter().map(String::as_str).eq(stored.field.split('.'))
                && owners[start].strip_prefix("Struct:") == Some(stored.module)
        })
    }
}

fn cut(
    config: &FullyShard,
    stored: Option<&StoredShape>,
    path: &str,
    shape: &[usize],
) -> Result<Option<usize>, FsdpError> {
    let choice = config.placement.as_ref().and_then(|f| f(ParamInfo { path, shape }));
    let default = stored.map_or(Placement::Shard(0), |stored| stored.placement);
    let placement = choice.unwrap_or(default);
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
        Placement::Replicate => Ok(None),
        Placement::Shard(dim) if dim < shape.len() => Ok(Some(dim)),
        placement => {
            Err(FsdpError::Placement { param: path.into(), shape: shape.to_vec(), placement: placement.to_string() })
        }
    }
}

fn check_matches(units: &[PathPattern], ignored: &[PathPattern], params: &[Found]) -> Result<(), FsdpError> {
    let paths = params.iter().map(|param| param.path.join(".")).collect_vec();
    let modules = params.iter().flat_map(|param| modules(&param.path)).unique().collect_vec();
    for (patterns, what, present) in [(units, "module", &modules), (ignored, "parameter", &paths)] {
        for pattern in patterns {
            if !present.iter().any(|path| pattern.matches(path)) {
                return Err(FsdpError::NoMatch {
                    pattern: pattern.text().into(),
                    what,
                    present: present.iter().map(|path| format!("`{path}`")).join(", "),
                });
            }
        }
    }
    Ok(())
}

/// The dtype a lazily initialized float parameter gets on `device`.
pub(super) fn float_dtype(device: &Device) -> burn::tensor::DType {
    Tensor::<1>::empty([0], device).dtype()
}
