//! [`Plan`]: which layers are split how.

use burn::tensor::DType;

use super::{ParallelError, Style};
use crate::mesh::DeviceMesh;
use crate::param::{DistributedParameter, Found, Inventory};
use crate::pattern::PathPattern;
use crate::placement::{Cut, Placement};

/// Path patterns and the [`Style`]s of what they match; see [`parallelize`](super::parallelize).
///
/// ```
/// use burn_dtensor::parallel::{Plan, Style};
/// use burn_dtensor::placement::Placement::Shard;
///
/// // A transformer, sequence parallel between its blocks' layers.
/// let plan = Plan::new()
///     .with("embedding", Style::rowwise().with_output(Shard(1)))
///     .with("blocks.*.norm?", Style::sequence_parallel())
///     .with("blocks.*.attention.*", Style::colwise().with_heads(8))
///     .with("blocks.*.attention.output", Style::rowwise().with_heads(8).with_output(Shard(1)))
///     .with("blocks.*.mlp.up", Style::colwise())
///     .with("blocks.*.mlp.down", Style::rowwise().with_output(Shard(1)))
///     .units(["blocks.*"]);
/// ```
#[derive(Debug, Clone, Default)]
pub struct Plan {
    entries: Vec<(String, Style)>,
    units: Vec<String>,
}

impl Plan {
    /// Every parameter `Replicate`, in one unit.
    pub fn new() -> Self {
        Self::default()
    }

    /// Gives a style to the modules and parameters whose path matches a pattern.
    ///
    /// A pattern is a path whose parts may hold `*`, `?` and `[0-9]`; `**` spans parts, and the
    /// empty pattern is the model itself. One that names a module takes all parameters inside.
    /// Where several take one parameter, the last given counts: write the general before the
    /// particular.
    pub fn with(mut self, pattern: impl Into<String>, style: impl Into<Style>) -> Self {
        self.entries.push((pattern.into(), style.into()));
        self
    }

    /// Makes a unit of every module whose path matches a pattern, for [`unit`](fn@crate::fsdp::unit)
    /// to mark: gradients that ranks have terms of are added up a unit at a time.
    ///
    /// [`fully_shard`](crate::fsdp::fully_shard) makes units of its own.
    pub fn units<S: Into<String>>(mut self, patterns: impl IntoIterator<Item = S>) -> Self {
        self.units.extend(patterns.into_iter().map(Into::into));
        self
    }

    /// Decides what becomes of every parameter, before any value moves.
    pub(super) fn resolve(&self, inventory: Inventory, mesh: &DeviceMesh) -> crate::Result<Vec<Planned>> {
        let texts: Vec<String> = self.entries.iter().map(|(pattern, _)| pattern.clone()).collect();
        let patterns = PathPattern::parse_all(&texts)?;
        let units = PathPattern::parse_all(&self.units)?;
        inventory.check_whole()?;
        inventory.check_any(&patterns)?;
        inventory.check_modules(&units)?;
        inventory.check(|_| false)?;
        inventory.check_devices(mesh, |_| false)?;
        let entries: Vec<_> = patterns.iter().zip(self.entries.iter().map(|(_, style)| *style)).collect();
        let planned = |found| Ok(planned(found, &entries, &units, mesh)?);
        inventory.params.into_iter().map(planned).collect()
    }
}

/// A parameter to parallelize.
pub(super) struct Planned {
    pub(super) path: String,
    /// Its global shape.
    pub(super) shape: Vec<usize>,
    pub(super) dtype: DType,
    /// How `fully_shard` distributed it, and the path of that unit's module.
    pub(super) sharded: Option<(DistributedParameter, String)>,
    pub(super) style: Style,
    pub(super) placement: Placement,
    /// Path of the unit's module.
    pub(super) unit: String,
    /// Path parts from there to the parameter.
    pub(super) depth: usize,
}

fn planned(
    found: Found,
    entries: &[(&PathPattern, Style)],
    units: &[PathPattern],
    mesh: &DeviceMesh,
) -> Result<Planned, ParallelError> {
    let path = found.path();
    let sharded = match &found.distributed {
        None => None,
        Some(param) if param.info().parallel.is_some() => {
            return Err(ParallelError::AlreadyParallelized { param: path });
        }
        Some(param) => match found.module(param) {
            Some(module) => Some((param.clone(), module)),
            None => return Err(ParallelError::PartOfUnit { param: path, unit: param.unit.label().to_string() }),
        },
    };
    let shape = match &sharded {
        None => found.shape.clone(),
        Some((param, _)) => param.info().shape.clone(),
    };
    // The last entry that takes the parameter, and how many parts above it what it names is.
    let above = |pattern: &PathPattern| (0..=found.path.len()).find(|&above| pattern.matches(&found.ancestor(above)));
    let taken = entries.iter().rev().find_map(|(pattern, style)| Some((pattern, *style, above(pattern)?)));
    let (style, placement) = match taken {
        None => (Style::placed(Placement::Replicate), Placement::Replicate),
        Some((pattern, style, above)) => {
            // What a layer becomes is known of the layer itself, not of modules around it.
            let layer = found.owner(above.saturating_sub(1)).unwrap_or("collection");
            let name = found.path.last().expect("a parameter has a name");
            let known = if above <= 1 { style.placement(found.owner(0), name) } else { style.placement(None, name) };
            let placement = known.ok_or_else(|| ParallelError::UnknownLayer {
                pattern: pattern.text().into(),
                style: style.to_string(),
                layer: layer.into(),
                param: path.clone(),
                mesh_dim: mesh.names()[0].clone(),
            })?;
            (style, placement)
        }
    };
    check(&found, &path, &shape, style, placement, mesh)?;
    if let Some((param, _)) = &sharded
        && let Some((dim, Cut::Lengths(_))) = param.info().cut
        && placement == Placement::Shard(dim)
        && mesh.size() > 1
    {
        return Err(ParallelError::Lengths { param: path, dim, mesh_dim: mesh.names()[0].clone() });
    }
    let (unit, depth) = found.unit(units);
    Ok(Planned { path, shape, dtype: found.dtype, sharded, style, placement, unit, depth })
}

/// Checks that the parameter can be placed so, and its layer can compute with it.
fn check(
    found: &Found,
    path: &str,
    shape: &[usize],
    style: Style,
    placement: Placement,
    mesh: &DeviceMesh,
) -> Result<(), ParallelError> {
    let (param, mesh_dim, size) = (path.to_string(), mesh.names()[0].clone(), mesh.size());
    let dim = match placement {
        Placement::Replicate => return Ok(()),
        Placement::Shard(dim) if dim < shape.len() => dim,
        _ => return Err(ParallelError::Placement { param, shape: shape.to_vec(), placement, mesh_dim }),
    };
    let len = shape[dim];
    if let Some(heads) = style.heads()
        && (heads == 0 || !heads.is_multiple_of(size) || !len.is_multiple_of(heads))
    {
        return Err(ParallelError::Heads { param, heads, len, size, mesh_dim });
    }
    // Their forward splits features into heads, which a rank must hold whole.
    let attention = ["MultiHeadAttention", "CrossAttention"];
    if let Some(layer) = attention.into_iter().find(|layer| found.owner(1) == Some(layer))
        && !len.is_multiple_of(size)
    {
        return Err(ParallelError::Uneven { param, layer, dim, len, size, mesh_dim });
    }
    Ok(())
}
