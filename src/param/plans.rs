//! [`Plans`]: what a unit's collectives do step after step, planned once.

use std::sync::Arc;

use burn::backend::{DispatchTensor, TensorMetadata};
use itertools::Itertools;
use parking_lot::Mutex;
use smallvec::SmallVec;

use super::unit::{Unit, UnitParam, over_neighbours};
use crate::comm::{Call, CommError, Communicator, Plan, ReduceOp, TensorMeta, Work};
use crate::placement::Cut;

/// A collective of a unit, on tensors of some of its parameters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Exchange {
    /// All-gather of the shards of those that are cut.
    Shards,
    /// All-gather of the parts that neighbours keep of them.
    Parts,
    /// Reduce-scatter of their gradients, with a row of flags for each rank.
    Gradients,
    /// All-reduce of gradients of those that are not cut, and flags.
    Uncut,
    /// All-reduce of what this rank has of the gradients of all, and flags.
    All,
}

impl Exchange {
    fn is_of(self, param: &UnitParam) -> bool {
        match self {
            Self::Shards | Self::Parts | Self::Gradients => param.cut.is_some(),
            Self::Uncut => param.cut.is_none(),
            Self::All => true,
        }
    }
}

/// The plans that were made.
#[derive(Debug, Default)]
pub(super) struct Plans(Mutex<SmallVec<[Known; 3]>>);

#[derive(Debug, Clone)]
struct Known {
    exchange: Exchange,
    members: Arc<[usize]>,
    /// Of the parameters whose tensors travel.
    names: Arc<[Arc<str>]>,
    plan: Arc<Plan>,
}

/// How many a unit remembers: a step has five at most, of one set of parameters.
const MAX_PLANS: usize = 16;

impl Unit {
    /// A collective of the parameters at `members`: `tensors` are of those of them that it is of, and the flags.
    ///
    /// # Collective
    /// Of the ranks of `group`.
    pub(super) fn exchange(
        &self,
        exchange: Exchange,
        group: &Communicator,
        call: Call,
        members: &[usize],
        tensors: Vec<DispatchTensor>,
    ) -> Work<Vec<DispatchTensor>> {
        match self.plan(exchange, group, members, &tensors) {
            Ok(Known { names, plan, .. }) => group.planned(Call { names: Some(names), ..call }, &plan, tensors),
            Err(error) => Work::failed(error),
        }
    }

    fn plan(
        &self,
        exchange: Exchange,
        group: &Communicator,
        members: &[usize],
        tensors: &[DispatchTensor],
    ) -> Result<Known, CommError> {
        let is_this = |known: &&Known| {
            let dtypes = || tensors.iter().map(DispatchTensor::dtype);
            known.exchange == exchange && *known.members == *members && known.plan.dtypes().eq(dtypes())
        };
        if let Some(known) = self.plans.0.lock().iter().find(is_this) {
            return Ok(known.clone());
        }
        let params = members.iter().map(|&member| &self.params[member]).filter(|param| exchange.is_of(param));
        let names = params.clone().map(|param| param.path.clone()).collect();
        let metas = tensors.iter().map(|tensor| TensorMeta { shape: tensor.shape(), dtype: tensor.dtype() });
        let cuts = params.filter_map(|param| param.cut.clone());
        let plan = match exchange {
            Exchange::Shards => group.plan_all_gather(wholes(metas, cuts)),
            Exchange::Parts => {
                let cuts = cuts.map(|(dim, cut)| (dim, over_neighbours(&cut)));
                group.plan_all_gather(wholes(metas, cuts))
            }
            Exchange::Gradients => {
                let flags = (0, Cut::Chunks(group.group().size()));
                group.plan_reduce_scatter(wholes(metas, cuts.chain([flags])), ReduceOp::Avg)
            }
            Exchange::Uncut | Exchange::All => group.plan_all_reduce(&metas.collect_vec(), ReduceOp::Avg),
        };
        let known = Known { exchange, members: members.into(), names, plan: plan? };
        let mut plans = self.plans.0.lock();
        if plans.len() == MAX_PLANS {
            plans.clear();
        }
        plans.push(known.clone());
        Ok(known)
    }
}

/// The wholes of tensors, whole or cut.
fn wholes(
    metas: impl Iterator<Item = TensorMeta>,
    cuts: impl Iterator<Item = (usize, Cut)>,
) -> Vec<(TensorMeta, usize, Cut)> {
    let whole = |(mut meta, (dim, cut)): (TensorMeta, (usize, Cut))| {
        meta.shape[dim] = cut.total();
        (meta, dim, cut)
    };
    metas.zip_eq(cuts).map(whole).collect()
}
