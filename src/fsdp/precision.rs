//! [`MixedPrecisionPolicy`]: element types in which units compute and reduce.

use burn::tensor::{DType, Device};

use super::FsdpError;
use crate::Result;
use crate::param::{ModelScan, Precision, check_patterns};
use crate::pattern::PathPattern;

/// Element types in which a unit computes and reduces. Stored shards keep their own element type,
/// in which optimizers step them and records store them.
///
/// ```text
///   shard f32 ── cast ──> shard bf16 ── all-gather ──> weight bf16 ──┐
///   input f32 ────────────────── cast ───────────────> input bf16 ───┴─> the unit's operations ── cast ──> output
///   shard's gradient f32 <── cast ── reduce-scatter in f32 <── cast ── gradient bf16
/// ```
///
/// If the policy sets no element type, values keep theirs, except gradients: they are reduced in
/// the element type of the stored parameter. A cast to the element type that a value already has
/// costs nothing.
///
/// ```
/// # use burn::tensor::DType;
/// # use burn_dtensor::fsdp::{FullyShard, MixedPrecisionPolicy};
/// let half = MixedPrecisionPolicy::new().with_param_dtype(DType::BF16).with_reduce_dtype(DType::F32);
/// let config = FullyShard::new()
///     .with_units(["blocks.*"])
///     .with_mixed_precision(half.clone().with_output_dtype(DType::F32)) // of the model: logits are f32
///     .with_mixed_precision_for(["blocks.*"], half);
/// ```
#[derive(Debug, Clone)]
pub struct MixedPrecisionPolicy {
    param_dtype: Option<DType>,
    reduce_dtype: Option<DType>,
    output_dtype: Option<DType>,
    cast_forward_inputs: bool,
    keep: Vec<String>,
}

impl Default for MixedPrecisionPolicy {
    fn default() -> Self {
        Self {
            param_dtype: None,
            reduce_dtype: None,
            output_dtype: None,
            cast_forward_inputs: true,
            keep: Vec::new(),
        }
    }
}

impl MixedPrecisionPolicy {
    /// Creates a policy that sets no element type.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the element type in which weights are gathered and used in computations. Gradients have
    /// it too, until they are reduced. This rank's shard is cast and then gathered, in forward and
    /// a second time in backward.
    ///
    /// `val()` and `dtensor()` return the cast value, also outside the unit;
    /// [`shard`](super::ParamExt::shard) and [`full_model`](super::full_model) return the stored
    /// one. When forward leaves the unit, the cast shard is posted for the all-gather of backward.
    /// It stays in memory until then.
    pub fn with_param_dtype(mut self, dtype: DType) -> Self {
        self.param_dtype = Some(dtype);
        self
    }

    /// Sets the element type in which gradients are summed. Each gradient is cast before it is
    /// summed over the data-parallel ranks, over the tensor-parallel ranks that have partial
    /// gradients, or over batches whose gradients are accumulated without reduction. Within a
    /// group, elements are summed in single precision at least, and the result is rounded to this
    /// type. Between the groups of HSDP, and of tensor parallelism, values are sent in this type.
    ///
    /// By default, the element type is that in which each parameter is stored, as in PyTorch 2.15:
    /// gradients of `f32` parameters are reduced in `f32`, also if
    /// [`with_param_dtype`](Self::with_param_dtype) is `bf16`. Gradients are sent in `bf16` only if
    /// this type is `bf16`; it may equal `with_param_dtype`.
    ///
    /// A unit makes one reduce-scatter. By default each gradient in it has the stored type of its
    /// parameter, so one call may contain several types. A type set here applies to all the unit's
    /// gradients, including those of parameters that [`with_excluded`](Self::with_excluded)
    /// matches.
    pub fn with_reduce_dtype(mut self, dtype: DType) -> Self {
        self.reduce_dtype = Some(dtype);
        self
    }

    /// Sets the element type of the float tensors that a unit's forward returns, in any container
    /// ([`TensorTree`](super::TensorTree)). Their gradients are cast back.
    pub fn with_output_dtype(mut self, dtype: DType) -> Self {
        self.output_dtype = Some(dtype);
        self
    }

    /// Sets whether the float inputs of a unit's forward, in any container
    /// ([`TensorTree`](super::TensorTree)), are cast to
    /// [`with_param_dtype`](Self::with_param_dtype), and their gradients back. Default: true.
    /// Integer and boolean tensors are never cast.
    pub fn with_cast_forward_inputs(mut self, cast: bool) -> Self {
        self.cast_forward_inputs = cast;
        self
    }

    /// Keeps the parameters whose path matches a pattern in the element type in which they are
    /// stored. A layer that computes with such a parameter must cast its input, or be a unit with
    /// another policy, which casts it.
    pub fn with_excluded<S: Into<String>>(mut self, patterns: impl IntoIterator<Item = S>) -> Self {
        self.keep.extend(patterns.into_iter().map(Into::into));
        self
    }

    /// Checks that the element types are floats that `device` supports.
    ///
    /// # Errors
    /// [`FsdpError::ElementType`] and [`FsdpError::DeviceElementType`].
    fn check(&self, device: &Device) -> Result<(), FsdpError> {
        let named = [
            ("param_dtype", self.param_dtype),
            ("reduce_dtype", self.reduce_dtype),
            ("output_dtype", self.output_dtype),
        ];
        for (what, dtype) in named {
            let Some(dtype) = dtype else { continue };
            if !matches!(dtype, DType::F64 | DType::F32 | DType::F16 | DType::BF16) {
                return Err(FsdpError::ElementType {
                    what,
                    dtype: format!("{dtype:?}"),
                });
            }
            if !device.supports_dtype(dtype) {
                let dtype = format!("{dtype:?}");
                let device = format!("{device:?}");
                return Err(FsdpError::DeviceElementType {
                    what,
                    dtype,
                    device,
                });
            }
        }
        Ok(())
    }
}

/// A policy, with its patterns parsed.
pub(super) struct Policy {
    policy: MixedPrecisionPolicy,
    keep: Vec<PathPattern>,
}

impl Policy {
    /// Parses and checks a policy for ranks that compute on `device`.
    ///
    /// # Errors
    /// Those of [`MixedPrecisionPolicy`]'s check, and
    /// [`ParamError::NoMatch`](crate::param::ParamError::NoMatch) for a pattern that matches no
    /// parameter.
    pub(super) fn new(
        policy: &MixedPrecisionPolicy,
        scan: &ModelScan,
        device: &Device,
    ) -> Result<Self> {
        policy.check(device)?;
        let keep = PathPattern::parse_all(&policy.keep)?;
        check_patterns(&keep, "parameter", &scan.paths())?;
        Ok(Self {
            policy: policy.clone(),
            keep,
        })
    }

    /// Returns the element type in which the parameter at `path` is used in computations; `None` if
    /// it is the stored one.
    pub(super) fn compute(&self, path: &str) -> Option<DType> {
        self.policy
            .param_dtype
            .filter(|_| !self.keep.iter().any(|pattern| pattern.matches(path)))
    }

    /// Returns the other element types of the unit: those of inputs, outputs and reductions.
    pub(super) fn precision(&self) -> Precision {
        Precision {
            inputs: self
                .policy
                .param_dtype
                .filter(|_| self.policy.cast_forward_inputs),
            outputs: self.policy.output_dtype,
            reduce: self.policy.reduce_dtype,
        }
    }
}
