//! [`FlaggedGrads`]: gradients, with flags that say which parameters a rank used.

use burn::backend::{DispatchDevice, DispatchTensor, TensorMetadata};
use burn::tensor::{DType, Device, Tensor, TensorData};

use crate::comm::ReduceOp;

/// This rank's gradients of some of a unit's parameters. A parameter that the rank did not use has
/// zeros.
///
/// If no rank used a parameter, it has no gradient, as without sharding, and an optimizer does not
/// step it. If only some ranks used it, its gradient is averaged over all ranks, and the others
/// count as zeros. Each reduction therefore also transfers one flag per parameter, which says that
/// the rank used it.
#[derive(Debug)]
pub(super) struct FlaggedGrads {
    pub(super) grads: Vec<DispatchTensor>,
    pub(super) used: Vec<bool>,
}

impl FlaggedGrads {
    pub(super) fn new(
        grads: Vec<Option<DispatchTensor>>,
        zeros: impl Fn(usize) -> DispatchTensor,
    ) -> Self {
        let used = grads.iter().map(Option::is_some).collect();
        let grads = grads
            .into_iter()
            .enumerate()
            .map(|(at, grad)| grad.unwrap_or_else(|| zeros(at)))
            .collect();
        Self { grads, used }
    }

    /// Returns flags of shape `[ranks, parameters]`, to be reduced by `op`. All rows are equal, so
    /// that after a reduce-scatter each rank has one complete row.
    pub(super) fn flags(&self, ranks: usize, op: ReduceOp) -> DispatchTensor {
        let device = self.grads[0].device();
        let dtype = self.grads[0].dtype();
        let (used, dtype) = match op {
            // The reduction multiplies flags by the factor, too. A flag of 1 could round to 0, for
            // instance if the factor is the reciprocal of a number of tokens. So the flag is the
            // reciprocal of the factor. Neither number needs to be in the range of f16.
            ReduceOp::PremulSum(factor) => (
                1.0 / factor.value(),
                if dtype == DType::F16 {
                    DType::F32
                } else {
                    dtype
                },
            ),
            _ => (1.0, dtype),
        };
        flags(&self.used, ranks, used, device, dtype)
    }
}

/// Returns `rows` equal rows of flags. Their element type is that of a gradient where that type can
/// represent them, so that all tensors of the collective have one type. The flag is `one` for a
/// parameter that this rank used, and 0 otherwise. Each rank that used a parameter adds about 1 to
/// its reduced flag, or its share of an average.
pub(super) fn flags(
    used: &[bool],
    rows: usize,
    one: f64,
    device: DispatchDevice,
    dtype: DType,
) -> DispatchTensor {
    let row = used.iter().map(|&used| if used { one } else { 0.0 });
    let all: Vec<f64> = std::iter::repeat_with(|| row.clone())
        .take(rows)
        .flatten()
        .collect();
    Tensor::<2>::from_data(
        TensorData::new(all, [rows, used.len()]),
        (&Device::new(device), dtype),
    )
    .into_dispatch()
}

/// Returns the reduced gradients, with `None` for each parameter that no rank used. `flags` is read
/// only if this rank left a parameter unused, because reading waits for the device.
pub(super) fn without_unused(
    reduced: Vec<DispatchTensor>,
    flags: DispatchTensor,
    used: &[bool],
) -> Vec<Option<DispatchTensor>> {
    if used.iter().all(|&used| used) {
        return reduced.into_iter().map(Some).collect();
    }
    let flags = Tensor::<2>::from_dispatch(flags).into_data();
    reduced
        .into_iter()
        .zip(flags.iter::<f32>())
        .map(|(grad, flag)| (flag > 0.0).then_some(grad))
        .collect()
}
