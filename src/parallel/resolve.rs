//! Resolution of a [`Plan`]: it decides the style and placement of every parameter before any value
//! is moved.

use std::collections::HashMap;
use std::sync::Arc;

use burn::tensor::DType;
use itertools::Itertools;

use super::plan::PatternEntry;
use super::prepare::ModuleIoLayouts;
use super::{LayerParam, ParallelError, Plan, PrepareModuleInputOutput, Style};
use crate::Result;
use crate::burn_compat::{BurnLayer, Container};
use crate::mesh::DeviceMesh;
use crate::param::{DistributedParameter, ModelScan, ScannedParam, UnitName, check_patterns};
use crate::pattern::PathPattern;
use crate::placement::{Placement, Placements, ShardSizes};

/// Name of [`nn::CrossAttention`](crate::nn::CrossAttention).
const CROSS_ATTENTION: &str = "CrossAttention";

/// A parameter with its style and placement on each mesh dimension.
pub(super) struct ParallelizedParam {
    pub(super) path: String,
    /// Global shape.
    pub(super) shape: Vec<usize>,
    pub(super) dtype: DType,
    /// For a parameter that `fully_shard` has distributed: its state, and the path in this model of
    /// the unit's module.
    pub(super) sharded: Option<(DistributedParameter, String)>,
    /// One style per mesh dimension.
    pub(super) styles: Vec<Style>,
    pub(super) placements: Placements,
    /// Input and output layouts of the modules around the parameter, each with the number of path
    /// components from the module to the parameter.
    pub(super) modules: Vec<(usize, Arc<ModuleIoLayouts>)>,
    pub(super) unit: UnitName,
    /// Number of path components from the unit's module to the parameter.
    pub(super) depth: usize,
}

/// Checks the plan, and decides the style and placement of every parameter.
pub(super) fn resolve(
    plan: &Plan,
    scan: ModelScan,
    mesh: &DeviceMesh,
) -> Result<Vec<ParallelizedParam>> {
    let styles = Entries::parse(&plan.styles, mesh)?;
    let modules = Entries::parse(&plan.modules, mesh)?;
    let units = PathPattern::parse_all(&plan.units)?;
    scan.check_not_replaced()?;
    // A pattern that matches the empty path selects the model.
    let is_of_part = |pattern: &&PathPattern| !pattern.matches("");
    let present = scan.modules();
    let all = [present.clone(), scan.paths()].concat();
    check_patterns(
        styles.patterns().filter(is_of_part),
        "module or parameter",
        &all,
    )?;
    check_patterns(modules.patterns().filter(is_of_part), "module", &present)?;
    check_patterns(&units, "module", &present)?;
    scan.check(|_| false)?;
    scan.check_not_adapted()?;
    scan.check_devices(mesh, |_| false, |_| false)?;
    let resolver = Resolver {
        styles,
        modules,
        units,
        mesh,
    };
    let mut prepared = HashMap::new();
    scan.params
        .into_iter()
        .map(|found| Ok(resolver.planned(found, &mut prepared)?))
        .collect()
}

/// Entries of a plan, grouped by mesh dimension.
struct Entries<'a, T>(Vec<Vec<(PathPattern, &'a T)>>);

impl<'a, T> Entries<'a, T> {
    fn parse(entries: &'a [PatternEntry<T>], mesh: &DeviceMesh) -> Result<Self> {
        let mut by_dim: Vec<_> = (0..mesh.ndim()).map(|_| Vec::new()).collect();
        for PatternEntry {
            mesh_dim,
            pattern,
            given,
        } in entries
        {
            let dim = match mesh_dim {
                Some(name) => mesh.dim(name)?,
                None if mesh.ndim() == 1 => 0,
                None => {
                    return Err(ParallelError::MeshDims {
                        pattern: pattern.clone(),
                        mesh: mesh.to_string(),
                    }
                    .into());
                }
            };
            by_dim[dim].push((PathPattern::parse(pattern)?, given));
        }
        Ok(Self(by_dim))
    }

    fn patterns(&self) -> impl Iterator<Item = &PathPattern> {
        self.0.iter().flatten().map(|(pattern, _)| pattern)
    }
}

struct Resolver<'a> {
    styles: Entries<'a, Style>,
    modules: Entries<'a, PrepareModuleInputOutput>,
    units: Vec<PathPattern>,
    mesh: &'a DeviceMesh,
}

impl Resolver<'_> {
    fn planned(
        &self,
        found: ScannedParam,
        prepared: &mut HashMap<String, Arc<ModuleIoLayouts>>,
    ) -> Result<ParallelizedParam, ParallelError> {
        let path = found.path();
        let sharded = match &found.distributed {
            None => None,
            Some(param) if param.info().parallel.is_some() => {
                return Err(ParallelError::AlreadyParallelized { param: path });
            }
            Some(param) => match found.module(param) {
                Some(module) => Some((param.clone(), module)),
                None => {
                    return Err(ParallelError::PartOfUnit {
                        param: path,
                        unit: param.unit.label().to_string(),
                    });
                }
            },
        };
        let shape = match &sharded {
            None => found.shape.clone(),
            Some((param, _)) => param.info().shape().to_vec(),
        };
        let styled =
            (0..self.mesh.ndim()).map(|mesh_dim| self.style(&found, &path, &shape, mesh_dim));
        let (styles, placements): (Vec<_>, Placements) = styled
            .collect::<Result<Vec<_>, ParallelError>>()?
            .into_iter()
            .unzip();
        self.check(&found, &path, &shape, &styles, &placements)?;
        if let Some((param, _)) = &sharded
            && let Some((dim, ShardSizes::Uneven(_))) = param.info().sharding()
            && let Some((mesh_dim, _)) = self.cutting(&placements, dim).find(|(_, size)| *size > 1)
        {
            return Err(ParallelError::Lengths {
                param: path,
                dim,
                mesh_dim: self.mesh.names()[mesh_dim].clone(),
            });
        }
        let modules = (1..=found.path.len()).filter_map(|above| {
            let module = found.ancestor(above);
            if let Some(known) = prepared.get(&module) {
                return Some((above, known.clone()));
            }
            let dims = self.modules.0.iter().map(|entries| {
                entries
                    .iter()
                    .rev()
                    .find(|(pattern, _)| pattern.matches(&module))
                    .map(|(_, given)| *given)
            });
            let dims = dims.collect_vec();
            dims.iter().any(Option::is_some).then(|| {
                let layouts = Arc::new(ModuleIoLayouts::new(module.clone(), &dims));
                prepared.insert(module, layouts.clone());
                (above, layouts)
            })
        });
        let modules = modules.collect();
        let is_unit = |module: &str| self.units.iter().any(|unit| unit.matches(module));
        let (unit, depth) = found.unit(|module| is_unit(module).then(|| UnitName::of(module)));
        Ok(ParallelizedParam {
            path,
            shape,
            dtype: found.dtype,
            sharded,
            styles,
            placements,
            modules,
            unit,
            depth,
        })
    }

    /// Returns the style and placement of the parameter on a mesh dimension, from the last entry of
    /// the plan that matches.
    fn style(
        &self,
        found: &ScannedParam,
        path: &str,
        shape: &[usize],
        mesh_dim: usize,
    ) -> Result<(Style, Placement), ParallelError> {
        // Number of path components between the parameter and the module that the pattern matches.
        let above = |pattern: &PathPattern| {
            (0..=found.path.len()).find(|&above| pattern.matches(&found.ancestor(above)))
        };
        let entries = self.styles.0[mesh_dim].iter().rev();
        let taken = entries
            .into_iter()
            .find_map(|(pattern, style)| Some((pattern, *style, above(pattern)?)));
        let Some((pattern, style, above)) = taken else {
            return Ok((Style::placed(Placement::Replicate), Placement::Replicate));
        };
        let name = found.path.last().expect("a parameter has a name");
        let container = found.container(0);
        let param = LayerParam {
            layer: container
                .and_then(Container::struct_name)
                .unwrap_or_default(),
            name,
            shape,
        };
        let layer = container.filter(|_| above <= 1).and_then(Container::layer);
        let placement =
            style
                .placement(param, layer)
                .ok_or_else(|| ParallelError::UnknownLayer {
                    pattern: pattern.text().into(),
                    style: style.to_string(),
                    layer: found
                        .container(above.saturating_sub(1))
                        .and_then(Container::struct_name)
                        .unwrap_or("collection")
                        .into(),
                    param: path.into(),
                    mesh_dim: self.mesh.names()[mesh_dim].clone(),
                })?;
        Ok((*style, placement))
    }

    /// Returns the mesh dimensions that shard dimension `dim`, with their sizes.
    fn cutting<'a>(
        &'a self,
        placements: &'a [Placement],
        dim: usize,
    ) -> impl Iterator<Item = (usize, usize)> + 'a {
        let shardings = placements
            .iter()
            .enumerate()
            .filter(move |(_, placement)| **placement == Placement::Shard(dim));
        shardings.map(|(mesh_dim, _)| (mesh_dim, self.mesh.size_of(mesh_dim)))
    }

    /// Checks that the parameter can have these placements, and that its layer can compute with
    /// them.
    fn check(
        &self,
        found: &ScannedParam,
        path: &str,
        shape: &[usize],
        styles: &[Style],
        placements: &[Placement],
    ) -> Result<(), ParallelError> {
        for (at, (style, &placement)) in styles.iter().zip(placements).enumerate() {
            let param = path.to_string();
            let dim = match placement {
                Placement::Replicate => continue,
                Placement::Shard(dim) if dim < shape.len() => dim,
                _ => {
                    let mesh_dim = self.mesh.names()[at].clone();
                    return Err(ParallelError::Placement {
                        param,
                        shape: shape.to_vec(),
                        placement,
                        mesh_dim,
                    });
                }
            };
            // All mesh dimensions that shard it divide it together.
            let size = self
                .cutting(placements, dim)
                .map(|(_, size)| size)
                .product();
            let mesh_dim = self
                .cutting(placements, dim)
                .map(|(mesh_dim, _)| &self.mesh.names()[mesh_dim])
                .join("`, `");
            let len = shape[dim];
            if let Some(heads) = style.heads()
                && (heads == 0 || !heads.is_multiple_of(size) || !len.is_multiple_of(heads))
            {
                return Err(ParallelError::Heads {
                    param,
                    heads,
                    len,
                    size,
                    mesh_dim,
                });
            }
            // Their forward splits the features into heads, and a rank needs complete heads.
            let attention = found.container(1).and_then(|module| match module.layer() {
                Some(layer @ BurnLayer::MultiHeadAttention) => Some(layer.name()),
                _ => module.is_own(CROSS_ATTENTION).then_some(CROSS_ATTENTION),
            });
            if let Some(layer) = attention.filter(|_| !len.is_multiple_of(size)) {
                return Err(ParallelError::Uneven {
                    param,
                    layer,
                    dim,
                    len,
                    size,
                    mesh_dim,
                });
            }
        }
        Ok(())
    }
}
