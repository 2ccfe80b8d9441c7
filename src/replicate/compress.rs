//! [`Compress`]: gradients that travel in another float type.

use burn::tensor::{FloatDType, Tensor};

use super::{GradientBucket, GradientHook};
use crate::Result;
use crate::comm::{Communicator, Work};

/// The all-reduce that gradients have without a hook, for hooks around it.
#[derive(Debug, Clone, Copy, Default)]
pub struct PlainAllReduce;

impl GradientHook for PlainAllReduce {
    fn reduce(&self, group: &Communicator, bucket: GradientBucket) -> Result<Work<Vec<Tensor<1>>>> {
        Ok(bucket.all_reduce(group))
    }
}

/// Hook that casts gradients to a smaller float type before another hook reduces them, and back
/// after it (PyTorch's `bf16_compress_hook`, `fp16_compress_wrapper`).
///
/// A sum of `F16` or `BF16` is accumulated in `F32` and rounded once.
///
/// ```
/// use burn::tensor::FloatDType;
/// use burn_dtensor::replicate::{Compress, DataParallel, PowerSgd};
///
/// let config = DataParallel::new().with_gradient_hook(Compress::new(FloatDType::BF16));
/// let chained = Compress::new(FloatDType::F16).around(PowerSgd::new(2));
/// let config = DataParallel::new().with_gradient_hook(chained);
/// ```
#[derive(Debug, Clone)]
pub struct Compress<H = PlainAllReduce> {
    dtype: FloatDType,
    inner: H,
}

impl Compress {
    /// Creates a hook that all-reduces gradients in this type.
    pub fn new(dtype: FloatDType) -> Self {
        Self {
            dtype,
            inner: PlainAllReduce,
        }
    }
}

impl<H> Compress<H> {
    /// Reduces the gradients by another hook, which gets them in the smaller type.
    #[must_use]
    pub fn around<I: GradientHook>(self, inner: I) -> Compress<I> {
        Compress {
            dtype: self.dtype,
            inner,
        }
    }
}

impl<H: GradientHook> GradientHook for Compress<H> {
    fn reduce(&self, group: &Communicator, bucket: GradientBucket) -> Result<Work<Vec<Tensor<1>>>> {
        let dtypes: Vec<_> = bucket.grads.iter().map(Tensor::dtype).collect();
        let reduced = self
            .inner
            .reduce(group, bucket.map(|grad| grad.cast(self.dtype)))?;
        Ok(reduced.then(|grads| {
            let cast = grads.into_iter().zip(dtypes);
            cast.map(|(grad, dtype)| grad.cast(dtype)).collect()
        }))
    }
}
