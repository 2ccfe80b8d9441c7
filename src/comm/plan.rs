//! [`CollectivePlan`]: the tensors of a collective that is made again and again.

use std::any::Any;
use std::fmt;
use std::sync::{Arc, OnceLock};

use burn::tensor::DType;

use super::backend::{CallSignature, TensorSignature};
use super::{Call, Op, ReduceOp};
use crate::kernels::ShardedTensorSpec;
use crate::placement::ShardSizes;

/// What one collective does with a list of tensors of certain shapes: checked, described and laid out once, for all the
/// calls that do the same, such as those of a training step.
///
/// ```
/// use burn::tensor::{DType, Shape, Tensor};
/// use burn_dtensor::comm::{Call, Launch, TensorMeta, launch};
/// use burn_dtensor::placement::ShardSizes;
///
/// launch(Launch::threads(2), |world| {
///     let whole = TensorMeta { shape: Shape::from([4, 3]), dtype: DType::F32 };
///     let plan = world.all().plan_all_gather(vec![(whole, 0, ShardSizes::Chunked(4))])?;
///     for step in 0..3 {
///         let part = Tensor::<2>::full([2, 3], step as f32, world.device());
///         let wholes = world.all().execute_plan("step".into(), &plan, vec![part.into_dispatch()]).wait()?;
///         assert_eq!(Tensor::<2>::from_dispatch(wholes[0].clone()).dims(), [4, 3]);
///     }
///     Ok(())
/// })?;
/// # Ok::<_, burn_dtensor::Error>(())
/// ```
pub struct CollectivePlan {
    pub(super) op: Op,
    pub(super) reduce: Option<ReduceOp>,
    /// The wholes.
    pub(super) tensors: Arc<[TensorSignature]>,
    shardings: Box<[(usize, ShardSizes)]>,
    /// In the group.
    pub(super) ranks: usize,
    kept: OnceLock<Box<dyn Any + Send + Sync>>,
}

impl CollectivePlan {
    pub(super) fn new(
        op: Op,
        reduce: Option<ReduceOp>,
        tensors: Vec<TensorSignature>,
        shardings: Vec<(usize, ShardSizes)>,
        ranks: usize,
    ) -> Self {
        Self { op, reduce, tensors: tensors.into(), shardings: shardings.into(), ranks, kept: OnceLock::new() }
    }

    /// The operation.
    pub fn op(&self) -> Op {
        self.op
    }

    /// What a reduction does with values.
    pub fn reduce(&self) -> Option<ReduceOp> {
        self.reduce
    }

    /// The dimension of each tensor that is cut over the group, and how; nothing for tensors that stay whole.
    pub fn shardings(&self) -> &[(usize, ShardSizes)] {
        &self.shardings
    }

    /// The element types of its tensors.
    pub fn dtypes(&self) -> impl Iterator<Item = DType> {
        self.tensors.iter().map(|tensor| tensor.dtype)
    }

    /// What the ranks of a call agree on.
    pub(super) fn print(&self, call: &Call) -> CallSignature {
        CallSignature { reduce: self.reduce, ..CallSignature::new(self.op, call, self.tensors.clone()) }
    }

    /// The tensors, each with its element type.
    pub(super) fn sharded_tensors(&self) -> impl Iterator<Item = (DType, ShardedTensorSpec)> {
        self.tensors.iter().zip(&self.shardings).map(|(TensorSignature { shape, dtype, .. }, (dim, sizes))| {
            (*dtype, ShardedTensorSpec { shape: shape.clone(), dim: *dim, sizes: sizes.clone() })
        })
    }

    /// Bytes of the wholes.
    pub fn bytes(&self) -> u64 {
        self.tensors.iter().map(TensorSignature::bytes).sum()
    }

    /// What an engine makes of the plan, and finds again at every call: always of one type, and the same whoever makes it.
    /// Local; ranks that come at once may each make it, and have the first one's.
    ///
    /// # Panics
    /// If something of another type is there.
    pub fn kept<T: Any + Send + Sync>(&self, make: impl FnOnce() -> T) -> &T {
        let kept = offered(&self.kept, || Box::new(make()));
        kept.downcast_ref().expect("an engine keeps things of one type with a plan")
    }
}

/// What is in `cell`. Ranks that find nothing there make it, and who is first to have it puts it in: to wait for
/// another to do so would take longer.
pub(super) fn offered<T>(cell: &OnceLock<T>, make: impl FnOnce() -> T) -> &T {
    if let Some(value) = cell.get() {
        return value;
    }
    let value = make();
    cell.get_or_init(|| value)
}

impl fmt::Debug for CollectivePlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { op, reduce, tensors, shardings, .. } = self;
        let mut plan = f.debug_struct("CollectivePlan");
        plan.field("op", op).field("reduce", reduce).field("tensors", tensors).field("cuts", shardings).finish()
    }
}
