//! The collectives of a unit, executed by cached [plans](super::plan_cache::PlanCache).

use burn::backend::{DispatchTensor, TensorMetadata};
use itertools::Itertools;

use super::gather::over_neighbours;
use super::plan_cache::{CachedPlan, UnitCollectiveKind};
use super::unit::{Unit, UnitParam};
use crate::comm::{Call, CommError, Communicator, ShardedModel, TensorMeta, Work};
use crate::placement::ShardSizes;

impl Unit {
    /// Starts a collective of the unit over `group`. `members` are indices of parameters. `tensors` are those of the
    /// members that this kind of collective transfers, followed by the flags for a reduction.
    ///
    /// # Collective
    /// Every rank of `group`.
    pub(super) fn exchange(
        &self,
        exchange: UnitCollectiveKind,
        group: &Communicator,
        call: Call,
        members: &[usize],
        tensors: Vec<DispatchTensor>,
    ) -> Work<Vec<DispatchTensor>> {
        match self.plan(exchange, group, members, &tensors) {
            Ok(CachedPlan { names, plan, .. }) => {
                let model = call.model.map(|model| ShardedModel { number: self.model_number(exchange), ..model });
                let call = Call { names: Some(names), model, ..call };
                let custom = self.control.lock().collectives.clone();
                match custom {
                    Some(custom) => custom.exchange(exchange, group, call, &plan, tensors),
                    None => group.execute_plan(call, &plan, tensors),
                }
            }
            Err(error) => Work::failed(error),
        }
    }

    /// Returns the number of the unit's model among the models of the ranks that participate in this collective.
    fn model_number(&self, exchange: UnitCollectiveKind) -> u64 {
        let model = &self.data().model;
        match exchange {
            UnitCollectiveKind::Shards | UnitCollectiveKind::Gradients | UnitCollectiveKind::ReplicatedGradients => {
                model.shard
            }
            UnitCollectiveKind::Parts => model.post_forward_group,
            UnitCollectiveKind::All => model.replicate,
        }
    }

    fn plan(
        &self,
        exchange: UnitCollectiveKind,
        group: &Communicator,
        members: &[usize],
        tensors: &[DispatchTensor],
    ) -> Result<CachedPlan, CommError> {
        if let Some(known) = self.plans.find(exchange, members, tensors.iter().map(DispatchTensor::dtype)) {
            return Ok(known);
        }
        let params = members.iter().map(|&member| &self.params[member]).filter(|param| is_of(exchange, param));
        let names = params.clone().map(|param| param.path.clone()).collect();
        let metas = tensors.iter().map(|tensor| TensorMeta { shape: tensor.shape(), dtype: tensor.dtype() });
        let shardings = params.filter_map(|param| param.sharding.clone());
        let plan = match exchange {
            UnitCollectiveKind::Shards => group.plan_all_gather(full_metas(metas, shardings)),
            UnitCollectiveKind::Parts => {
                let shardings = shardings.map(|(dim, sizes)| (dim, over_neighbours(&sizes)));
                group.plan_all_gather(full_metas(metas, shardings))
            }
            UnitCollectiveKind::Gradients => {
                let flags = (0, ShardSizes::Chunked(group.group().size()));
                group.plan_reduce_scatter(full_metas(metas, shardings.chain([flags])), self.averaging().shard)
            }
            UnitCollectiveKind::ReplicatedGradients => {
                group.plan_all_reduce(&metas.collect_vec(), self.averaging().shard)
            }
            UnitCollectiveKind::All => group.plan_all_reduce(&metas.collect_vec(), self.averaging().replicate),
        };
        let known = CachedPlan { exchange, members: members.into(), names, plan: plan? };
        self.plans.keep(known.clone());
        Ok(known)
    }
}

/// Returns the metadata of the full tensors of which these are the metadata of shards, with their shardings. Full
/// tensors, whose metadata does not change, are accepted too.
fn full_metas(
    metas: impl Iterator<Item = TensorMeta>,
    shardings: impl Iterator<Item = (usize, ShardSizes)>,
) -> Vec<(TensorMeta, usize, ShardSizes)> {
    let full = |(mut meta, (dim, sizes)): (TensorMeta, (usize, ShardSizes))| {
        meta.shape[dim] = sizes.total();
        (meta, dim, sizes)
    };
    metas.zip_eq(shardings).map(full).collect()
}

fn is_of(exchange: UnitCollectiveKind, param: &UnitParam) -> bool {
    match exchange {
        UnitCollectiveKind::Shards | UnitCollectiveKind::Parts | UnitCollectiveKind::Gradients => {
            param.sharding.is_some()
        }
        UnitCollectiveKind::ReplicatedGradients => param.sharding.is_none(),
        UnitCollectiveKind::All => true,
    }
}
