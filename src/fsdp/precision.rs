//! [`MixedPrecisionPolicy`]: which element types units compute and reduce in.

use burn::tensor::{DType, Device};

use super::FsdpError;
use crate::Result;
use crate::param::{ModelScan, Precision};
use crate::pattern::PathPattern;

/// Which element types a unit computes and reduces in, beside that of its stored shards, in which optimizers step
/// them and records hold them.
///
/// ```text
///   shard f32 ── cast ──> shard bf16 ── all-gather ──> weight bf16 ──┐
///   input f32 ────────────────── cast ───────────────> input bf16 ───┴─> the unit's operations ── cast ──> output
///   shard's gradient f32 <── cast ── reduce-scatter in f32 <── cast ── gradient bf16
/// ```
///
/// Values keep the element type that they have where the policy sets none, except gradients, which are then reduced in
/// that of the stored parameter. A cast to the element type that a value has already costs nothing.
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
        Self { param_dtype: None, reduce_dtype: None, output_dtype: None, cast_forward_inputs: true, keep: Vec::new() }
    }
}

impl MixedPrecisionPolicy {
    /// Everything in the element type that it has.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the element type that weights are gathered and computed with in, which is also that of their gradients
    /// until these are reduced: this rank's shard is cast and then gathered, in forward and again in backward.
    ///
    /// Layers read it by `val()` and `dtensor()`, also outside the unit; [`shard`](super::ParamExt::shard) and
    /// [`full_model`](super::full_model) have the stored value. The cast shard, which is posted for backward as forward
    /// leaves the unit, stays in memory until then.
    pub fn with_param_dtype(mut self, dtype: DType) -> Self {
        self.param_dtype = Some(dtype);
        self
    }

    /// Sets the element type that gradients are added up in, over the data-parallel ranks, over the tensor-parallel
    /// ones, which have terms of it, and over batches that wait for the last one's reduction: each is cast before. The
    /// elements of a group are added up in single precision at least, and then rounded, whatever it is; between the groups
    /// of HSDP, and of tensor parallelism, what is sent has this type.
    ///
    /// The default is the element type that each parameter is stored in, as in PyTorch 2.15: gradients of `f32`
    /// parameters are reduced in `f32`, also where [`with_param_dtype`](Self::with_param_dtype) is `bf16`. Gradients
    /// travel in `bf16` only where this is `bf16`, which may equal `with_param_dtype`.
    ///
    /// A unit makes one reduce-scatter. By default each gradient in it has the stored type of its parameter, so that
    /// one call may carry several types. A type set here is that of all the unit's gradients, including those of
    /// parameters that [`with_excluded`](Self::with_excluded) takes.
    pub fn with_reduce_dtype(mut self, dtype: DType) -> Self {
        self.reduce_dtype = Some(dtype);
        self
    }

    /// Sets the element type of the float tensors that a unit's forward returns, whatever they are in
    /// ([`TensorTree`](super::TensorTree)). Their gradients are cast back.
    pub fn with_output_dtype(mut self, dtype: DType) -> Self {
        self.output_dtype = Some(dtype);
        self
    }

    /// Sets whether the float tensors that a unit's forward is given, whatever they are in
    /// ([`TensorTree`](super::TensorTree)), are cast to [`with_param_dtype`](Self::with_param_dtype), and their
    /// gradients back. Default: they are. Tensors of integers and of booleans never are.
    pub fn with_cast_forward_inputs(mut self, cast: bool) -> Self {
        self.cast_forward_inputs = cast;
        self
    }

    /// Keeps the parameters whose path matches a pattern in the element type that they are stored in. A layer that
    /// computes with one casts its input for itself, or is a unit with a policy of its own, which does.
    pub fn with_excluded<S: Into<String>>(mut self, patterns: impl IntoIterator<Item = S>) -> Self {
        self.keep.extend(patterns.into_iter().map(Into::into));
        self
    }

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
                return Err(FsdpError::ElementType { what, dtype: format!("{dtype:?}") });
            }
            if !device.supports_dtype(dtype) {
                let (dtype, device) = (format!("{dtype:?}"), format!("{device:?}"));
                return Err(FsdpError::DeviceElementType { what, dtype, device });
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
    /// Of ranks that compute on `device`.
    ///
    /// # Errors
    /// As [`MixedPrecisionPolicy`]'s check, and [`ParamError::NoMatch`](crate::param::ParamError::NoMatch) for a
    /// pattern that takes no parameter.
    pub(super) fn new(policy: &MixedPrecisionPolicy, inventory: &ModelScan, device: &Device) -> Result<Self> {
        policy.check(device)?;
        let keep = PathPattern::parse_all(&policy.keep)?;
        inventory.check_params(&keep)?;
        Ok(Self { policy: policy.clone(), keep })
    }

    /// The element type that the parameter at `path` is computed with in; `None`: the stored one.
    pub(super) fn compute(&self, path: &str) -> Option<DType> {
        self.policy.param_dtype.filter(|_| !self.keep.iter().any(|pattern| pattern.matches(path)))
    }

    /// What else a unit computes and reduces in.
    pub(super) fn precision(&self) -> Precision {
        Precision {
            inputs: self.policy.param_dtype.filter(|_| self.policy.cast_forward_inputs),
            outputs: self.policy.output_dtype,
            reduce: self.policy.reduce_dtype,
        }
    }
}
