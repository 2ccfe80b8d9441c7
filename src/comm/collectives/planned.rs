//! Collectives with a [`CollectivePlan`], prepared once and executed many times.

use std::sync::Arc;

use burn::backend::{DispatchTensor, TensorMetadata};

use crate::comm::arguments::{self, Problem};
use crate::comm::backend::ranges::full;
use crate::comm::backend::{CallSignature, TensorSignature, reduce};
use crate::comm::{
    Call, CollectivePlan, CommError, Communicator, Op, ReduceOp, ShardedTensor, TensorMeta, Work,
};
use crate::placement::ShardSizes;

impl Communicator {
    /// Prepares an [`all_gather`](Self::all_gather). `full_tensors` contains the description of
    /// each full tensor, the dimension along which it is sharded, and its shard sizes. Local.
    ///
    /// [`execute_plan`](Self::execute_plan) then takes this rank's shards and returns the full
    /// tensors.
    ///
    /// # Errors
    /// [`CommError::InvalidArgument`] if a sharding does not fit.
    pub fn plan_all_gather(
        &self,
        full_tensors: Vec<(TensorMeta, usize, ShardSizes)>,
    ) -> Result<Arc<CollectivePlan>, CommError> {
        self.planned_shards(Op::AllGather, None, full_tensors)
    }

    /// Prepares a [`reduce_scatter`](Self::reduce_scatter) of these full tensors. Local.
    ///
    /// [`execute_plan`](Self::execute_plan) then takes full tensors and returns this rank's shards
    /// of their reductions.
    ///
    /// # Errors
    /// [`CommError::InvalidArgument`] if a sharding does not fit, or `op` cannot reduce a dtype.
    pub fn plan_reduce_scatter(
        &self,
        full_tensors: Vec<(TensorMeta, usize, ShardSizes)>,
        op: ReduceOp,
    ) -> Result<Arc<CollectivePlan>, CommError> {
        self.planned_shards(Op::ReduceScatter, Some(op), full_tensors)
    }

    fn planned_shards(
        &self,
        op: Op,
        reduce: Option<ReduceOp>,
        full_tensors: Vec<(TensorMeta, usize, ShardSizes)>,
    ) -> Result<Arc<CollectivePlan>, CommError> {
        let (metas, shardings): (Vec<_>, Vec<_>) = full_tensors
            .into_iter()
            .map(|(meta, dim, sizes)| (meta, (dim, sizes)))
            .unzip();
        let signatures = arguments::all_described(&metas)
            .and_then(|signatures| arguments::sharded(signatures, &shardings, self.group()));
        self.planned_as(op, reduce, signatures, shardings)
    }

    /// Prepares an [`all_reduce`](Self::all_reduce) of tensors with these descriptions. Local.
    ///
    /// [`execute_plan`](Self::execute_plan) then takes tensors of these shapes and returns their
    /// reductions.
    ///
    /// # Errors
    /// [`CommError::InvalidArgument`] if `op` cannot reduce a dtype.
    pub fn plan_all_reduce(
        &self,
        metas: &[TensorMeta],
        op: ReduceOp,
    ) -> Result<Arc<CollectivePlan>, CommError> {
        self.planned_as(
            Op::AllReduce,
            Some(op),
            arguments::all_described(metas),
            Vec::new(),
        )
    }

    /// Executes `plan`, which was made for a group of the same size. It takes this rank's shards
    /// for an all-gather, and full tensors for a reduction.
    ///
    /// # Collective
    /// Called by all ranks of the group, with equal plans.
    ///
    /// # Errors
    /// Returned by the work: [`CommError::InvalidArgument`] if the tensors do not match the plan or
    /// the group has another size; [`CommError::Mismatch`] if the plans of the ranks differ.
    pub fn execute_plan(
        &self,
        call: Call,
        plan: &Arc<CollectivePlan>,
        tensors: Vec<DispatchTensor>,
    ) -> Work<Vec<DispatchTensor>> {
        accepted!(
            self.on_own_device(
                arguments::as_planned(plan, &tensors, self.group()),
                &tensors
            ),
            self,
            plan.op(),
            call
        );
        self.begin(call, plan, tensors)
    }

    fn planned_as(
        &self,
        op: Op,
        reduce: Option<ReduceOp>,
        signatures: Result<Vec<TensorSignature>, Problem>,
        shardings: Vec<(usize, ShardSizes)>,
    ) -> Result<Arc<CollectivePlan>, CommError> {
        let reducible = signatures.and_then(|signatures| {
            if let Some(op) = reduce {
                arguments::all_reducible(&signatures, op)?;
            }
            Ok(signatures)
        });
        match reducible {
            Ok(signatures) => {
                Ok(
                    CollectivePlan::new(op, reduce, signatures, shardings, self.group().size())
                        .into(),
                )
            }
            Err(problem) => Err(self.refusal(op, "plan", problem)),
        }
    }

    /// Posts the collective of `plan`, with tensors that were already checked.
    pub(super) fn begin(
        &self,
        call: Call,
        plan: &Arc<CollectivePlan>,
        tensors: Vec<DispatchTensor>,
    ) -> Work<Vec<DispatchTensor>> {
        if self.is_alone() {
            return Work::done(match plan.reduce {
                Some(op) => self.of_one(tensors, op),
                None => tensors,
            });
        }
        let signature = CallSignature {
            reduce: plan.reduce,
            ..CallSignature::new(plan.op, &call, plan.tensors.clone())
        };
        self.post(None, call, signature, None, |group, context| {
            match plan.reduce {
                None => group.all_gather(context, plan.clone(), tensors),
                Some(op) if plan.op() == Op::AllReduce => group.all_reduce(context, tensors, op),
                Some(op) => group.reduce_scatter(context, plan.clone(), tensors, op),
            }
        })
    }

    /// Reduces over a group of one rank, which only applies the factor of [`ReduceOp::PremulSum`].
    pub(super) fn of_one(&self, terms: Vec<DispatchTensor>, op: ReduceOp) -> Vec<DispatchTensor> {
        let reduced = |term: DispatchTensor| match op {
            ReduceOp::PremulSum(_) => reduce(&[&term], &full(&term.shape()[..]), op, self.device()),
            _ => term,
        };
        terms.into_iter().map(reduced).collect()
    }
}

/// Splits sharded tensors into tensors and shardings.
pub(super) fn unpacked(
    shards: Vec<ShardedTensor>,
) -> (Vec<DispatchTensor>, Vec<(usize, ShardSizes)>) {
    shards
        .into_iter()
        .map(|ShardedTensor { tensor, dim, sizes }| (tensor, (dim, sizes)))
        .unzip()
}
