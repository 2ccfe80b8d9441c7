//! The way in which each reduction is carried out.
//!
//! | operation | dtypes | way |
//! |---|---|---|
//! | `Sum`, `Avg` | f64, f32, f16, bf16 | NCCL's reduction |
//! | `Sum` | i64, i32, i8, u64, u32, u8 | NCCL's reduction |
//! | `Product` | f64, f32, and the integers above | NCCL's reduction |
//! | `Min`, `Max` | the integers above | NCCL's reduction |
//! | `Avg` | integers | gather and reduce: NCCL adds in the integer's own width, which overflows |
//! | `Min`, `Max` | floats | gather and reduce: NCCL ignores NaN, where any rank's NaN is the result |
//! | `Product` | f16, bf16 | gather and reduce: NCCL rounds after every rank |
//! | `Sum`, `Product`, `Min`, `Max` | i16, u16 | gather and reduce: NCCL has no such type |
//! | `BitAnd`, `BitOr`, `BitXor`, `PremulSum` | all | gather and reduce: NCCL has no such operation, or none for numbers of the host |
//! | several dtypes in one call | | gather and reduce |
//!
//! To gather and reduce, each rank receives the operands of all ranks and reduces them in the fixed
//! tree, as it does on the other planes. In the tree mode all reductions do.

use burn::tensor::DType;

use super::api::NativeOp;
use crate::comm::ReduceOp;

/// Returns NCCL's reduction for operands of `dtype`; `None` if operands are gathered and reduced.
pub(super) fn native(op: ReduceOp, dtype: DType) -> Option<NativeOp> {
    let is_wide_float = matches!(dtype, DType::F64 | DType::F32 | DType::Flex32);
    let is_float = is_wide_float || matches!(dtype, DType::F16 | DType::BF16);
    let is_integer = matches!(
        dtype,
        DType::I64 | DType::I32 | DType::I8 | DType::U64 | DType::U32 | DType::U8
    );
    match op {
        ReduceOp::Sum if is_float || is_integer => Some(NativeOp::Sum),
        ReduceOp::Avg if is_float => Some(NativeOp::Avg),
        ReduceOp::Product if is_wide_float || is_integer => Some(NativeOp::Product),
        ReduceOp::Min if is_integer => Some(NativeOp::Min),
        ReduceOp::Max if is_integer => Some(NativeOp::Max),
        _ => None,
    }
}

/// Returns NCCL's reduction for tensors of these dtypes, which must be one.
pub(super) fn native_of_all(
    op: ReduceOp,
    dtypes: impl IntoIterator<Item = DType>,
) -> Option<(NativeOp, DType)> {
    let mut dtypes = dtypes.into_iter();
    let first = dtypes.next()?;
    let is_one = dtypes.all(|dtype| dtype == first);
    let native = is_one.then(|| native(op, first)).flatten()?;
    Some((native, first))
}
