//! [`fully_shard`].

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use burn::module::{Module, Param, Reparameterizer};
use burn::tensor::Tensor;
use itertools::Itertools;

use super::FsdpError;
use super::config::{FullyShard, ReshardAfterForward};
use super::param::ShardedParameter;
use super::plan::{self, Planned, plan};
use super::unit::{Unit, UnitParam};
use crate::comm::{Call, Communicator};
use crate::dtensor::send_parts;
use crate::mesh::DeviceMesh;
use crate::placement::{Layout, Placement};
use crate::{Error, Result};

/// Cuts the parameters of any burn module over the ranks of `mesh`.
///
/// The model's type does not change. Each parameter becomes this rank's shard; reading it
/// (`param.val()`, as every layer does) returns the whole, gathered with its unit. See
/// [`unit`](fn@super::unit) for when that happens, [`FullyShard`] for the choices.
///
/// A 1-D mesh shards over its dimension: placements `[S(0)]`. A 2-D mesh replicates over the first
/// and shards over the second (HSDP): `[R, S(0)]`. Values are those of the mesh's first rank, and
/// only that rank initializes parameters that are still lazy; the others draw no random numbers.
///
/// Modules sharded by an earlier call keep their units: shard inner modules first, then the model.
///
/// burn allows one reparameterization a parameter: a module with LoRA adapters is refused, and
/// adapters must not be applied to a sharded module, whose shards they would replace.
///
/// # Collective
/// Every rank of the mesh must call it with an equal model and configuration.
///
/// # Errors
/// [`FsdpError`] for a wrong mesh, pattern or placement, before any value moves;
/// [`Error::Comm`] if another rank fails.
pub fn fully_shard<M: Module>(model: M, mesh: &DeviceMesh, config: FullyShard) -> Result<M> {
    let shard_dim = match mesh.ndim() {
        1 => 0,
        2 => 1,
        _ => return Err(FsdpError::MeshDims { mesh: mesh.to_string() }.into()),
    };
    let groups = Groups::new(mesh, shard_dim, config.reshard)?;
    let planned = plan(&model, &config)?;
    let units = make_units(&planned, mesh, config.reshard, &groups);
    let queue = planned
        .iter()
        .map(|param| {
            let unit = units[&param.unit].clone();
            let index = unit.params.iter().position(|candidate| candidate.path == param.path);
            let index = index.expect("every planned parameter is in its unit");
            (param.path.clone(), ShardedParameter { unit, index })
        })
        .collect();
    let mut sharder = Sharder { queue, failed: None };
    let model = model.apply_reparameterization(&mut sharder);
    if let Some(error) = sharder.failed {
        return Err(error);
    }
    match sharder.queue.pop_front() {
        Some((param, _)) => Err(FsdpError::NotMet { param }.into()),
        None => Ok(model),
    }
}

/// The communicators a fully sharded module needs.
struct Groups {
    shard: Arc<dyn Communicator>,
    replicate: Option<Arc<dyn Communicator>>,
    neighbours: Option<Arc<dyn Communicator>>,
}

impl Groups {
    fn new(mesh: &DeviceMesh, shard_dim: usize, reshard: ReshardAfterForward) -> Result<Self> {
        let shard = mesh.communicator(shard_dim)?.clone();
        let replicate = match shard_dim {
            0 => None,
            _ => Some(mesh.communicator(0)?.clone()),
        };
        let neighbours = match reshard {
            ReshardAfterForward::Ranks(ranks) => {
                let group = shard.group();
                if ranks == 0 || group.size() % ranks != 0 {
                    let dim = mesh.names()[shard_dim].to_string();
                    return Err(FsdpError::ReshardRanks { ranks, size: group.size(), dim }.into());
                }
                let first = group.rank() / ranks * ranks;
                Some(mesh.world().group(&group.ranks()[first..first + ranks])?)
            }
            _ => None,
        };
        Ok(Self { shard, replicate, neighbours })
    }
}

fn make_units(
    planned: &[Planned],
    mesh: &DeviceMesh,
    reshard: ReshardAfterForward,
    groups: &Groups,
) -> HashMap<String, Arc<Unit>> {
    let by_unit = planned.iter().map(|param| (param.unit.clone(), param)).into_group_map();
    let unit = |path: String, params: Vec<&Planned>| {
        let params = params
            .into_iter()
            .map(|param| {
                let mut placements = vec![Placement::Replicate; mesh.ndim()];
                if let Some(dim) = param.dim {
                    placements[mesh.ndim() - 1] = Placement::Shard(dim);
                }
                UnitParam {
                    path: param.path.clone(),
                    depth: param.depth,
                    shape: param.shape.clone(),
                    dim: param.dim,
                    layout: Layout::new(mesh.shape(), &placements)
                        .expect("one placement a mesh dimension, on a dimension of the tensor"),
                }
            })
            .collect();
        let unit = Unit::new(
            &path,
            mesh.clone(),
            params,
            reshard,
            groups.shard.clone(),
            groups.replicate.clone(),
            groups.neighbours.clone(),
        );
        (path, Arc::new(unit))
    };
    by_unit.into_iter().map(|(path, params)| unit(path, params)).collect()
}

/// Replaces each planned parameter by this rank's shard of it.
struct Sharder {
    /// Planned parameters in burn's order.
    queue: VecDeque<(String, ShardedParameter)>,
    failed: Option<Error>,
}

impl Reparameterizer for &mut Sharder {
    type Reparam = ShardedParameter;

    fn reparameterize<const D: usize>(
        &mut self,
        path: &str,
        param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Option<ShardedParameter>) {
        if self.failed.is_some() || self.queue.front().is_none_or(|(next, _)| next != path) {
            return (param, None);
        }
        let (_, sharded) = self.queue.pop_front().expect("the front was just looked at");
        match self.shard(&sharded, param.clone()) {
            Ok(param) => (param, Some(sharded)),
            Err(error) => {
                self.failed = Some(error);
                (param, None)
            }
        }
    }
}

impl Sharder {
    fn shard<const D: usize>(&self, sharded: &ShardedParameter, param: Param<Tensor<D>>) -> Result<Param<Tensor<D>>> {
        let info = sharded.info();
        let device = param.lazy_device();
        let dtype = if param.is_initialized() { param.base().dtype() } else { plan::float_dtype(&device) };
        let spec = sharded.spec(dtype)?;
        // Reading a lazy parameter draws its values: only the rank they are taken from does.
        let first = spec.coordinate().iter().all(|&index| index == 0);
        let whole = first.then(|| param.base().inner());
        let mut shard = send_parts(whole, &spec, &Call::new(format!("fully_shard {}", info.path)))?;

        let strategy = Tensor::<1>::empty([0], &device).gradient_checkpointing_strategy();
        if let Some(strategy) = strategy {
            shard = shard.autodiff().with_gradient_checkpointing_strategy(strategy);
        }
        // A parameter that is still lazy must not be initialized to be replaced: that would draw
        // random numbers. Loading a value keeps its id, mappers and training state.
        let param = if param.is_initialized() {
            param
        } else {
            let id = param.id;
            param.transform_for_load(Tensor::zeros(info.shape.clone(), &device), id)
        };
        let require_grad = param.is_require_grad();
        Ok(param.map(|_| shard.set_require_grad(require_grad)))
    }
}
