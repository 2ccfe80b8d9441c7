//! What is always alike: planned once, and made again and again.

use std::sync::Arc;

use burn::backend::{DispatchTensor, TensorMetadata};

use crate::comm::arguments::{self, Problem};
use crate::comm::backend::ranges::full;
use crate::comm::backend::{TensorSignature, reduce};
use crate::comm::{Call, CollectivePlan, CommError, Communicator, Op, ReduceOp, ShardedTensor, TensorMeta, Work};
use crate::placement::ShardSizes;

impl Communicator {
    /// A plan to [`all_gather`](Self::all_gather) tensors whose wholes these are: each with the dimension in which it is
    /// cut, and how. Local.
    ///
    /// [`execute_plan`](Self::execute_plan) then takes this rank's parts, of a whole's shape but for the dimension that
    /// is cut, and returns the wholes.
    ///
    /// # Errors
    /// [`CommError::InvalidArgument`] if a cut does not fit.
    pub fn plan_all_gather(
        &self,
        full_tensors: Vec<(TensorMeta, usize, ShardSizes)>,
    ) -> Result<Arc<CollectivePlan>, CommError> {
        let prints = arguments::check_described(&full_tensors, self.group());
        self.planned_as(
            Op::AllGather,
            None,
            prints,
            full_tensors.into_iter().map(|(_, dim, sizes)| (dim, sizes)).collect(),
        )
    }

    /// A plan to [`reduce_scatter`](Self::reduce_scatter) these wholes. Local.
    ///
    /// [`execute_plan`](Self::execute_plan) then takes wholes, and returns this rank's parts of their reductions.
    ///
    /// # Errors
    /// [`CommError::InvalidArgument`] if a cut does not fit, or there is no such reduction of a dtype.
    pub fn plan_reduce_scatter(
        &self,
        full_tensors: Vec<(TensorMeta, usize, ShardSizes)>,
        op: ReduceOp,
    ) -> Result<Arc<CollectivePlan>, CommError> {
        let prints = arguments::check_described(&full_tensors, self.group());
        let prints = prints.and_then(|prints| arguments::all_reducible(&prints, op).map(|()| prints));
        let shardings = full_tensors.into_iter().map(|(_, dim, sizes)| (dim, sizes)).collect();
        self.planned_as(Op::ReduceScatter, Some(op), prints, shardings)
    }

    /// A plan to [`all_reduce`](Self::all_reduce) tensors like these. Local.
    ///
    /// [`execute_plan`](Self::execute_plan) then takes tensors of these shapes, and returns their reductions.
    ///
    /// # Errors
    /// [`CommError::InvalidArgument`] if there is no such reduction of a dtype.
    pub fn plan_all_reduce(&self, metas: &[TensorMeta], op: ReduceOp) -> Result<Arc<CollectivePlan>, CommError> {
        let prints: Vec<_> = metas.iter().map(arguments::described).collect();
        let checked = arguments::all_reducible(&prints, op).map(|()| prints);
        self.planned_as(Op::AllReduce, Some(op), checked, Vec::new())
    }

    /// Carries out `plan`, which was made for a group of as many ranks: with this rank's parts for an all-gather, with
    /// wholes for a reduction. Collective.
    ///
    /// # Errors
    /// The work's: [`CommError::InvalidArgument`] if the tensors are not those of the plan, or the group is of another
    /// size; [`CommError::Mismatch`] if the plans of the ranks differ.
    pub fn execute_plan(
        &self,
        call: Call,
        plan: &Arc<CollectivePlan>,
        tensors: Vec<DispatchTensor>,
    ) -> Work<Vec<DispatchTensor>> {
        match self.at_home(arguments::as_planned(plan, &tensors, self.group()), &tensors) {
            Ok(()) => self.begin(call, plan, tensors),
            Err(problem) => self.refuse(plan.op(), &call, problem),
        }
    }

    fn planned_as(
        &self,
        op: Op,
        reduce: Option<ReduceOp>,
        prints: Result<Vec<TensorSignature>, Problem>,
        shardings: Vec<(usize, ShardSizes)>,
    ) -> Result<Arc<CollectivePlan>, CommError> {
        match prints {
            Ok(prints) => Ok(CollectivePlan::new(op, reduce, prints, shardings, self.group().size()).into()),
            Err(problem) => Err(self.refusal(op, "plan", problem)),
        }
    }

    /// Begins what is planned, of tensors that are found to be right.
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
        let (print, bytes) = (plan.print(&call), plan.bytes());
        self.post(call, print, bytes, |channel, post| match plan.reduce {
            None => channel.all_gather(post, plan.clone(), tensors),
            Some(op) if plan.op() == Op::AllReduce => channel.all_reduce(post, tensors, op),
            Some(op) => channel.reduce_scatter(post, plan.clone(), tensors, op),
        })
    }

    /// Reductions over one rank.
    pub(super) fn of_one(&self, terms: Vec<DispatchTensor>, op: ReduceOp) -> Vec<DispatchTensor> {
        let reduced = |term: DispatchTensor| match op {
            ReduceOp::PremulSum(_) => reduce(&[&term], &full(&term.shape()[..]), op, self.device()),
            _ => term,
        };
        terms.into_iter().map(reduced).collect()
    }
}

/// Tensors and their cuts.
pub(super) fn unpacked(shards: Vec<ShardedTensor>) -> (Vec<DispatchTensor>, Vec<(usize, ShardSizes)>) {
    shards.into_iter().map(|ShardedTensor { tensor, dim, sizes }| (tensor, (dim, sizes))).unzip()
}
