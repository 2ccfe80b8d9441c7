//! [`GradientHook`]: a program's own way to sum gradients over ranks, such as a compressed one.

use std::fmt;
use std::sync::Arc;

use burn::backend::ops::FloatTensorOps;
use burn::backend::{Dispatch, DispatchTensor, TensorMetadata};
use burn::tensor::{DType, Shape, Tensor};

use super::custom::hook_result;
use crate::Result;
use crate::autodiff;
use crate::comm::{Call, Communicator, OpTiming, ReduceOp, Work};

/// A way to sum gradients over ranks that takes the place of the all-reduce, for example one that
/// sends fewer bytes (DistributedDataParallel: communication hook).
///
/// A hook sums the buckets of [`replicate`](crate::replicate), and over replicas the reduced shards
/// of [`fully_shard`](crate::fsdp::fully_shard) (HSDP). Set it with
/// [`DataParallel::with_gradient_hook`](crate::replicate::DataParallel::with_gradient_hook) or
/// [`FsdpModule::set_gradient_hook`](crate::fsdp::FsdpModule::set_gradient_hook).
///
/// ```
/// use burn::tensor::Tensor;
/// use burn_dtensor::comm::{Communicator, Work};
/// use burn_dtensor::prelude::*;
/// use burn_dtensor::replicate::{GradientBucket, GradientHook};
///
/// /// Gradients that are clipped on each rank before they are summed.
/// struct Clipped;
///
/// impl GradientHook for Clipped {
///     fn reduce(&self, group: &Communicator, bucket: GradientBucket) -> Result<Work<Vec<Tensor<1>>>> {
///         Ok(bucket.map(|grad| grad.clamp(-1.0, 1.0)).all_reduce(group))
///     }
/// }
/// ```
pub trait GradientHook: Send + Sync {
    /// Starts the reduction of a bucket. The result has the reduced gradients in the order of the
    /// bucket, with the same lengths and dtypes, and the same bits on all ranks; another number,
    /// length or dtype unwinds with [`ParamError::HookResult`](crate::fsdp::ParamError::HookResult).
    /// On a single rank there is nothing to reduce, and it is not called.
    ///
    /// # Collective
    /// Every rank of the group calls it, for the same buckets in the same order. It may wait for
    /// collectives of its own.
    ///
    /// # Errors
    /// An error unwinds the rank in backward.
    fn reduce(&self, group: &Communicator, bucket: GradientBucket) -> Result<Work<Vec<Tensor<1>>>>;
}

impl<H: GradientHook + ?Sized> GradientHook for Arc<H> {
    fn reduce(&self, group: &Communicator, bucket: GradientBucket) -> Result<Work<Vec<Tensor<1>>>> {
        (**self).reduce(group, bucket)
    }
}

impl fmt::Debug for dyn GradientHook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("GradientHook")
    }
}

/// Gradients that are reduced together, the argument of a [`GradientHook`].
#[derive(Debug, Clone)]
pub struct GradientBucket {
    /// Description of the reduction, for the collectives of a hook.
    pub call: Call,
    /// Paths of the parameters.
    pub params: Arc<[Arc<str>]>,
    /// Shapes of the gradients: those of the parameters, or of this rank's shards of them.
    pub shapes: Vec<Shape>,
    /// This rank's gradients, flattened, without autodiff. A parameter that this rank did not use
    /// has zeros.
    pub grads: Vec<Tensor<1>>,
    /// The reduction that is asked for: an average, or a sum with a factor.
    pub op: ReduceOp,
}

impl GradientBucket {
    /// Reduces the gradients as without a hook, in their dtypes.
    ///
    /// # Collective
    /// Every rank of the group.
    pub fn all_reduce(self, group: &Communicator) -> Work<Vec<Tensor<1>>> {
        let tensors = self.grads.into_iter().map(Tensor::into_dispatch).collect();
        let work = group.all_reduce(self.call, tensors, self.op);
        work.then(|reduced| reduced.into_iter().map(Tensor::from_dispatch).collect())
    }

    /// Returns the bucket with `map` applied to each gradient.
    #[must_use]
    pub fn map(mut self, map: impl Fn(Tensor<1>) -> Tensor<1>) -> Self {
        self.grads = self.grads.into_iter().map(map).collect();
        self
    }

    /// Returns the factor between the average over `ranks` ranks and the result that is asked for.
    pub fn times_average(&self, ranks: usize) -> f64 {
        match self.op {
            ReduceOp::PremulSum(factor) => factor.value() * ranks as f64,
            ReduceOp::Sum => ranks as f64,
            _ => 1.0,
        }
    }
}

/// Gradients on their way over the ranks, with the flags of the parameters that a rank has used.
#[derive(Debug)]
pub(crate) struct GradsWork {
    grads: Work<Vec<DispatchTensor>>,
    /// The flags, which a hook does not reduce, and a description of what it must return.
    hooked: Option<Box<Hooked>>,
}

#[derive(Debug)]
struct Hooked {
    /// Label of the reduction.
    label: Arc<str>,
    params: Arc<[Arc<str>]>,
    /// Shape and dtype of each gradient.
    shapes: Vec<(Shape, DType)>,
    flags: Work<Vec<DispatchTensor>>,
}

impl From<Work<Vec<DispatchTensor>>> for GradsWork {
    /// Creates the work of a collective that also sends the flags.
    fn from(grads: Work<Vec<DispatchTensor>>) -> Self {
        Self {
            grads,
            hooked: None,
        }
    }
}

impl GradsWork {
    /// Starts a reduction by a hook. `call` has the names of the gradients.
    ///
    /// # Collective
    /// Every rank of the group.
    ///
    /// # Errors
    /// That of the hook.
    pub(crate) fn hooked(
        hook: &dyn GradientHook,
        group: &Communicator,
        call: Call,
        op: ReduceOp,
        grads: Vec<DispatchTensor>,
        flags: Vec<DispatchTensor>,
    ) -> Result<Self> {
        let names = call.names.clone().unwrap_or_default();
        let of_flags = Call {
            names: None,
            ..call.clone()
        };
        let call = Call {
            digests: None,
            names: None,
            ..call
        };
        let flags = group.all_reduce(of_flags, flags, op);
        let shape = |grad: &DispatchTensor| (grad.shape(), grad.dtype());
        let shapes: Vec<_> = grads.iter().map(shape).collect();
        let label = call.label.clone();
        let flat = |grad: DispatchTensor| {
            let len = grad.shape().num_elements();
            Tensor::from_dispatch(Dispatch::float_reshape(grad, [len].into()))
        };
        let bucket = GradientBucket {
            call,
            params: names.clone(),
            shapes: shapes.iter().map(|(shape, _)| shape.clone()).collect(),
            grads: grads.into_iter().map(flat).collect(),
            op,
        };
        let reduced = hook.reduce(group, bucket)?;
        let grads = reduced.then(|reduced| {
            let plain = |grad: Tensor<1>| autodiff::plain(grad.into_dispatch());
            reduced.into_iter().map(plain).collect()
        });
        let hooked = Hooked {
            label,
            params: names,
            shapes,
            flags,
        };
        Ok(Self {
            grads,
            hooked: Some(hooked.into()),
        })
    }

    /// Waits for the gradients, followed by the flags.
    ///
    /// # Errors
    /// Those of the collectives, and [`ParamError::HookResult`].
    pub(crate) fn wait_with_timing(self) -> Result<(Vec<DispatchTensor>, Option<OpTiming>)> {
        let (mut tensors, timing) = self.grads.wait_with_timing()?;
        if let Some(hooked) = self.hooked {
            let Hooked {
                label,
                params,
                shapes,
                flags,
            } = *hooked;
            tensors = hook_result(&label, &params, shapes, tensors)?;
            tensors.extend(flags.wait()?);
        }
        Ok((tensors, timing))
    }
}
