//! What a program may put in the place of a unit's collectives, or behind them.

use std::fmt;
use std::sync::Arc;

use burn::backend::ops::FloatTensorOps;
use burn::backend::{Dispatch, DispatchTensor, TensorMetadata};
use burn::tensor::{DType, Shape, Tensor};
use itertools::Itertools;

use super::ParamError;
use super::plan_cache::UnitCollectiveKind;
use super::shards::plain;
use crate::Result;
use crate::comm::{Call, CollectivePlan, Communicator, Work};

/// Collectives of units in the place of those of their groups: to count or delay them, to send less, or over another
/// network. See [`FsdpModule::set_collectives`](super::FsdpModule::set_collectives).
///
/// Each has the arguments and the result of [`Communicator::execute_plan`], which is what it does unless it is
/// implemented: tensors of the shapes and element types that `plan` says. Ranks of `group` must call alike.
pub trait UnitCollectives: Send + Sync {
    /// Gathers parameters, for forward or for backward: from this rank's shards, where they are.
    fn all_gather(
        &self,
        group: &Communicator,
        call: Call,
        plan: &Arc<CollectivePlan>,
        shards: Vec<DispatchTensor>,
    ) -> Work<Vec<DispatchTensor>> {
        group.execute_plan(call, plan, shards)
    }

    /// Reduces whole gradients to this rank's shards. The last tensor is no gradient: it says which parameters this
    /// rank has used, by numbers of which those above 0 must stay above 0. Its element type need not be that of the
    /// gradients.
    fn reduce_scatter(
        &self,
        group: &Communicator,
        call: Call,
        plan: &Arc<CollectivePlan>,
        full_tensors: Vec<DispatchTensor>,
    ) -> Work<Vec<DispatchTensor>> {
        group.execute_plan(call, plan, full_tensors)
    }

    /// Reduces shards over the replicas (HSDP), and gradients of parameters that every rank holds whole. The last
    /// tensor is as in [`reduce_scatter`](Self::reduce_scatter).
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

/// Those that the program has given.
#[derive(Clone)]
pub(super) struct Collectives(Arc<dyn UnitCollectives>);

impl Collectives {
    pub(super) fn new(collectives: impl UnitCollectives + 'static) -> Self {
        Self(Arc::new(collectives))
    }

    pub(super) fn exchange(
        &self,
        exchange: UnitCollectiveKind,
        group: &Communicator,
        call: Call,
        plan: &Arc<CollectivePlan>,
        tensors: Vec<DispatchTensor>,
    ) -> Work<Vec<DispatchTensor>> {
        match exchange {
            UnitCollectiveKind::Shards | UnitCollectiveKind::Parts => self.0.all_gather(group, call, plan, tensors),
            UnitCollectiveKind::Gradients => self.0.reduce_scatter(group, call, plan, tensors),
            UnitCollectiveKind::ReplicatedGradients | UnitCollectiveKind::All => {
                self.0.all_reduce(group, call, plan, tensors)
            }
        }
    }
}

impl fmt::Debug for Collectives {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("UnitCollectives")
    }
}

/// This rank's shards of a unit's averaged gradients; see
/// [`FsdpModule::set_all_reduce_hook`](super::FsdpModule::set_all_reduce_hook).
#[derive(Debug)]
pub struct ReducedGradients {
    /// The unit's path.
    pub unit: Arc<str>,
    /// Paths of the parameters.
    pub params: Vec<Arc<str>>,
    /// Of each the shard, flat; the whole of one that every rank holds whole.
    pub shards: Vec<Tensor<1>>,
}

type HookFn = dyn Fn(ReducedGradients) -> Result<Vec<Tensor<1>>> + Send + Sync;

/// What becomes of a unit's averaged gradients before the optimizer has them.
#[derive(Clone)]
pub(super) struct AllReduceHook(Arc<HookFn>);

impl AllReduceHook {
    pub(super) fn new(hook: impl Fn(ReducedGradients) -> Result<Vec<Tensor<1>>> + Send + Sync + 'static) -> Self {
        Self(Arc::new(hook))
    }

    /// What it makes of these gradients of these parameters.
    ///
    /// # Errors
    /// The hook's own; [`ParamError::HookResult`].
    pub(super) fn run(
        &self,
        unit: Arc<str>,
        params: Vec<Arc<str>>,
        grads: Vec<DispatchTensor>,
    ) -> Result<Vec<DispatchTensor>> {
        let shapes = grads.iter().map(|grad| (grad.shape(), grad.dtype())).collect_vec();
        let flat = |(grad, (shape, _)): (DispatchTensor, &(Shape, DType))| {
            Tensor::from_dispatch(Dispatch::float_reshape(grad, [shape.num_elements()].into()))
        };
        let shards = grads.into_iter().zip(&shapes).map(flat).collect();
        let made = (self.0)(ReducedGradients { unit: unit.clone(), params: params.clone(), shards })?;
        let wrong = |reason: String| ParamError::HookResult { unit: unit.to_string(), reason };
        if made.len() != params.len() {
            return Err(wrong(format!("it has returned {} tensors of {}", made.len(), params.len())).into());
        }
        let checked = made.into_iter().zip(shapes).zip(&params).map(|((made, (shape, dtype)), param)| {
            let (len, made_dtype) = (made.dims()[0], made.dtype());
            if (len, made_dtype) != (shape.num_elements(), dtype) {
                let wanted = shape.num_elements();
                return Err(
                    wrong(format!("`{param}` has become {len} of {made_dtype:?}, of {wanted} of {dtype:?}")).into()
                );
            }
            Ok(Dispatch::float_reshape(plain(made.into_dispatch()), shape))
        });
        checked.collect()
    }
}

impl fmt::Debug for AllReduceHook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("AllReduceHook")
    }
}
