//! User-defined collectives of units, and hooks on reduced gradients.

use std::fmt;
use std::sync::Arc;

use burn::backend::ops::FloatTensorOps;
use burn::backend::{Dispatch, DispatchTensor, TensorMetadata};
use burn::tensor::{DType, Shape, Tensor};
use itertools::Itertools;

use super::ParamError;
use crate::Result;
use crate::autodiff;
use crate::comm::{Call, CollectivePlan, Communicator, Work};

/// User-defined replacements for the collectives of units: to count or delay them, to compress
/// data, or to use another network. See
/// [`FsdpModule::set_collectives`](crate::fsdp::FsdpModule::set_collectives).
///
/// Each method has the arguments and the result of [`Communicator::execute_plan`], which the
/// default implementation calls. Its result must have the shapes and dtypes that `plan` describes.
///
/// # Collective
/// Units call the methods on every rank of `group`, in the same order. An implementation must issue
/// the same calls in the same order on all of them.
pub trait UnitCollectives: Send + Sync {
    /// Gathers parameters, for forward or for backward, from this rank's shards in the memory in
    /// which they are stored.
    fn all_gather(
        &self,
        group: &Communicator,
        call: Call,
        plan: &Arc<CollectivePlan>,
        shards: Vec<DispatchTensor>,
    ) -> Work<Vec<DispatchTensor>> {
        group.execute_plan(call, plan, shards)
    }

    /// Reduces full gradients to this rank's shards. The last tensor is not a gradient: it flags
    /// the parameters that this rank used. A flag above 0 must remain above 0 in the result. The
    /// dtype of the flags may differ from that of the gradients.
    fn reduce_scatter(
        &self,
        group: &Communicator,
        call: Call,
        plan: &Arc<CollectivePlan>,
        full_tensors: Vec<DispatchTensor>,
    ) -> Work<Vec<DispatchTensor>> {
        group.execute_plan(call, plan, full_tensors)
    }

    /// Reduces shards over the replicas (HSDP), and gradients of parameters that are replicated on
    /// every rank. The last tensor contains flags, as in [`reduce_scatter`](Self::reduce_scatter).
    fn all_reduce(
        &self,
        group: &Communicator,
        call: Call,
        plan: &Arc<CollectivePlan>,
        tensors: Vec<DispatchTensor>,
    ) -> Work<Vec<DispatchTensor>> {
        group.execute_plan(call, plan, tensors)
    }
}

impl fmt::Debug for dyn UnitCollectives {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("UnitCollectives")
    }
}

/// Shards of a unit's averaged gradients on this rank, the argument of an all-reduce hook. See
/// [`FsdpModule::set_all_reduce_hook`](crate::fsdp::FsdpModule::set_all_reduce_hook).
#[derive(Debug)]
pub struct ReducedGradients {
    /// Path of the unit.
    pub unit: Arc<str>,
    /// Paths of the parameters.
    pub params: Vec<Arc<str>>,
    /// Flattened shard of each parameter's gradient; the full gradient of a parameter that every
    /// rank replicates.
    pub shards: Vec<Tensor<1>>,
}

type HookFn = dyn Fn(ReducedGradients) -> Result<Vec<Tensor<1>>> + Send + Sync;

/// A user-defined function that runs on a unit's averaged gradients before the optimizer gets them.
#[derive(Clone)]
pub(crate) struct AllReduceHook(Arc<HookFn>);

impl AllReduceHook {
    pub(crate) fn new(
        hook: impl Fn(ReducedGradients) -> Result<Vec<Tensor<1>>> + Send + Sync + 'static,
    ) -> Self {
        Self(Arc::new(hook))
    }

    /// Calls the hook with these gradients of these parameters, and returns its checked result in
    /// the original shapes.
    ///
    /// # Errors
    /// Errors of the hook; [`ParamError::HookResult`].
    pub(crate) fn run(
        &self,
        unit: Arc<str>,
        params: Vec<Arc<str>>,
        grads: Vec<DispatchTensor>,
    ) -> Result<Vec<DispatchTensor>> {
        let shapes = grads
            .iter()
            .map(|grad| (grad.shape(), grad.dtype()))
            .collect_vec();
        let shards = grads
            .into_iter()
            .zip(&shapes)
            .map(|(grad, (shape, _))| {
                Tensor::from_dispatch(Dispatch::float_reshape(grad, [shape.num_elements()].into()))
            })
            .collect();
        let made = (self.0)(ReducedGradients {
            unit: unit.clone(),
            params: params.clone(),
            shards,
        })?;
        let made = made
            .into_iter()
            .map(|grad| autodiff::plain(grad.into_dispatch()));
        Ok(hook_result(&unit, &params, shapes, made.collect())?)
    }
}

/// Checks the gradients that a hook has returned for parameters, and gives them these shapes.
///
/// # Errors
/// [`ParamError::HookResult`] for another number, length or dtype.
pub(crate) fn hook_result(
    unit: &str,
    params: &[Arc<str>],
    shapes: Vec<(Shape, DType)>,
    made: Vec<DispatchTensor>,
) -> Result<Vec<DispatchTensor>, ParamError> {
    let wrong = |reason| ParamError::HookResult {
        unit: unit.into(),
        reason,
    };
    if made.len() != params.len() {
        let (found, wanted) = (made.len(), params.len());
        let reason = format!("it returned {found} tensors for {wanted} gradients");
        return Err(wrong(reason));
    }
    let made = made.into_iter().zip(shapes).zip(params);
    let checked = made.map(|((grad, (shape, dtype)), param)| {
        let (len, found, wanted) = (grad.shape().num_elements(), grad.dtype(), shape.num_elements());
        match (len, found) == (wanted, dtype) {
            true => Ok(Dispatch::float_reshape(grad, shape)),
            false => Err(wrong(format!(
                "for `{param}` it returned {len} elements of {found:?} instead of {wanted} of {dtype:?}"
            ))),
        }
    });
    checked.collect()
}

impl fmt::Debug for AllReduceHook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("AllReduceHook")
    }
}
