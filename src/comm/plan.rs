//! [`CollectivePlan`]: a collective that is prepared once and executed many times.

use std::any::Any;
use std::fmt;
use std::sync::{Arc, OnceLock};

use burn::tensor::DType;
use serde::{Deserialize, Serialize};

use super::backend::TensorSignature;
use super::{Op, ReduceOp};
use crate::kernels::ShardedTensorSpec;
use crate::placement::ShardSizes;

/// A collective on tensors of given shapes, prepared once and executed many times, as in every
/// training step (MPI-4: persistent collective). Its arguments are checked and its layout is
/// computed only once.
///
/// ```
/// use burn::tensor::{DType, Shape, Tensor};
/// use burn_dtensor::comm::{Call, Launch, TensorMeta, launch};
/// use burn_dtensor::placement::ShardSizes;
///
/// launch(Launch::threads(2), |world| {
///     let full = TensorMeta { shape: Shape::from([4, 3]), dtype: DType::F32 };
///     let plan = world.all().plan_all_gather(vec![(full, 0, ShardSizes::Chunked(4))])?;
///     for step in 0..3 {
///         let shard = Tensor::<2>::full([2, 3], step as f32, world.device());
///         let full = world.all().execute_plan("step".into(), &plan, vec![shard.into_dispatch()]).wait()?;
///         assert_eq!(Tensor::<2>::from_dispatch(full[0].clone()).dims(), [4, 3]);
///     }
///     Ok(())
/// })?;
/// # Ok::<_, burn_dtensor::Error>(())
/// ```
#[derive(Serialize, Deserialize)]
pub struct CollectivePlan {
    pub(super) op: Op,
    pub(super) reduce: Option<ReduceOp>,
    /// Signatures of the full tensors.
    pub(super) tensors: Arc<[TensorSignature]>,
    shardings: Box<[(usize, ShardSizes)]>,
    /// Number of ranks in the group.
    pub(super) ranks: usize,
    #[serde(skip)]
    kept: KeptCell,
}

/// A value that a backend keeps with a plan, and the next one, which has another type.
struct KeptValue {
    value: Box<dyn Any + Send + Sync>,
    next: KeptCell,
}

type KeptCell = OnceLock<Box<KeptValue>>;

impl CollectivePlan {
    pub(super) fn new(
        op: Op,
        reduce: Option<ReduceOp>,
        tensors: Vec<TensorSignature>,
        shardings: Vec<(usize, ShardSizes)>,
        ranks: usize,
    ) -> Self {
        Self {
            op,
            reduce,
            tensors: tensors.into(),
            shardings: shardings.into(),
            ranks,
            kept: OnceLock::new(),
        }
    }

    /// Returns the operation.
    pub fn op(&self) -> Op {
        self.op
    }

    /// Returns the reduction, if the operation reduces.
    pub fn reduce(&self) -> Option<ReduceOp> {
        self.reduce
    }

    /// Returns the sharded dimension and the shard sizes of each tensor. Empty if the operation
    /// does not shard tensors.
    pub fn shardings(&self) -> &[(usize, ShardSizes)] {
        &self.shardings
    }

    /// Returns the signatures of the full tensors.
    pub fn tensors(&self) -> &[TensorSignature] {
        &self.tensors
    }

    /// Returns the number of ranks in the group.
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// Returns the dtypes of the tensors.
    pub fn dtypes(&self) -> impl Iterator<Item = DType> {
        self.tensors.iter().map(|tensor| tensor.dtype)
    }

    /// Returns the dtype and the sharding of each tensor.
    pub(super) fn sharded_tensors(&self) -> impl Iterator<Item = (DType, ShardedTensorSpec)> {
        self.tensors.iter().zip(&self.shardings).map(
            |(TensorSignature { shape, dtype, .. }, (dim, sizes))| {
                (
                    *dtype,
                    ShardedTensorSpec {
                        shape: shape.clone(),
                        dim: *dim,
                        sizes: sizes.clone(),
                    },
                )
            },
        )
    }

    /// Returns the number of bytes of the full tensors.
    pub fn bytes(&self) -> u64 {
        self.tensors.iter().map(TensorSignature::bytes).sum()
    }

    /// Returns the value of type `T` that a backend has stored with the plan; calls `make` to create
    /// it if there is none. Local; several ranks may call it at the same time and create a value each,
    /// and all receive the one stored first.
    pub fn kept<T: Any + Send + Sync>(&self, make: impl Fn() -> T) -> &T {
        let mut cell = &self.kept;
        loop {
            let kept = offered(cell, || {
                Box::new(KeptValue {
                    value: Box::new(make()),
                    next: KeptCell::new(),
                })
            });
            match kept.value.downcast_ref() {
                Some(value) => return value,
                None => cell = &kept.next,
            }
        }
    }
}

/// Returns the value of `cell`. If it is empty, the caller creates a value, and the first one
/// stored is kept. Several ranks may create a value at the same time, because waiting for another
/// rank would take longer.
pub(super) fn offered<T>(cell: &OnceLock<T>, make: impl FnOnce() -> T) -> &T {
    if let Some(value) = cell.get() {
        return value;
    }
    let value = make();
    cell.get_or_init(|| value)
}

impl fmt::Debug for CollectivePlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            op,
            reduce,
            tensors,
            shardings,
            ..
        } = self;
        let mut plan = f.debug_struct("CollectivePlan");
        plan.field("op", op)
            .field("reduce", reduce)
            .field("tensors", tensors)
            .field("shardings", shardings)
            .finish()
    }
}
