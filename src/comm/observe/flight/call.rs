//! Translation of a call to the terms of the flight recorder's format.

use std::hash::{Hash, Hasher};

use burn::tensor::DType;
use burn_dtensor_flight::format::{ElementType, PostedCall, Reduction, StableHasher};

use super::super::event::Posting;
use crate::comm::backend::CallSignature;
use crate::comm::{ReduceOp, TensorMeta};

/// Returns a call in the terms of the format.
pub(super) fn describe<'a>(posting: &Posting<'a>) -> PostedCall<'a> {
    let Posting {
        channel,
        seq,
        signature,
        phase,
        bytes,
        peer,
        ..
    } = *posting;
    PostedCall {
        channel,
        seq,
        op: signature.op,
        phase,
        bytes,
        label: &signature.label,
        reduction: signature.reduce.map(reduction),
        root: signature.root,
        peer,
        is_of_pairs: signature.is_of_pairs(),
        agreement: agreement(signature),
    }
}

/// Iterates over shape and type of each tensor. For an all-to-all of lists, these are the tensors
/// that are sent.
pub(super) fn tensors(
    signature: &CallSignature,
) -> impl Iterator<Item = Option<(&[usize], ElementType)>> {
    let tensors = signature
        .tensors
        .iter()
        .map(|tensor| Some((&tensor.shape[..], element_type(tensor.dtype))));
    let given = signature.pairs.iter().flat_map(|pairs| &pairs.sent);
    tensors.chain(given.map(move |given| {
        given
            .as_ref()
            .map(|TensorMeta { shape, dtype }| (&shape[..], element_type(*dtype)))
    }))
}

fn reduction(reduce: ReduceOp) -> Reduction {
    match reduce {
        ReduceOp::Sum => Reduction::Sum,
        ReduceOp::Avg => Reduction::Average,
        ReduceOp::Min => Reduction::Minimum,
        ReduceOp::Max => Reduction::Maximum,
        ReduceOp::Product => Reduction::Product,
        ReduceOp::BitAnd => Reduction::And,
        ReduceOp::BitOr => Reduction::Or,
        ReduceOp::BitXor => Reduction::ExclusiveOr,
        ReduceOp::PremulSum(_) => Reduction::SumOfMultiples,
    }
}

fn element_type(dtype: DType) -> ElementType {
    match dtype {
        DType::F64 => ElementType::F64,
        DType::F32 => ElementType::F32,
        DType::Flex32 => ElementType::Flex32,
        DType::F16 => ElementType::F16,
        DType::BF16 => ElementType::BF16,
        DType::I64 => ElementType::I64,
        DType::I32 => ElementType::I32,
        DType::I16 => ElementType::I16,
        DType::I8 => ElementType::I8,
        DType::U64 => ElementType::U64,
        DType::U32 => ElementType::U32,
        DType::U16 => ElementType::U16,
        DType::U8 => ElementType::U8,
        DType::Bool(_) => ElementType::Bool,
        DType::QFloat(_) => ElementType::QFloat,
    }
}

/// Returns a hash of everything that all ranks must agree on.
fn agreement(signature: &CallSignature) -> u64 {
    let CallSignature {
        op,
        label,
        reduce,
        root,
        model,
        forward_index,
        global_tensor,
        operand_shapes,
        names,
        tensors,
        any: _,
        pairs: _,
        digests: _,
        decision: _,
        exchange: _,
    } = signature;
    let mut hasher = StableHasher::default();
    (
        op,
        label,
        reduce,
        root,
        model,
        forward_index,
        global_tensor,
        operand_shapes,
        names,
        tensors,
    )
        .hash(&mut hasher);
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use burn::tensor::BoolStore;

    use super::*;

    #[test]
    fn dtypes_have_burns_names() {
        let dtypes = [
            DType::F64,
            DType::F32,
            DType::Flex32,
            DType::F16,
            DType::BF16,
            DType::I64,
            DType::I32,
            DType::I16,
            DType::I8,
            DType::U64,
            DType::U32,
            DType::U16,
            DType::U8,
            DType::Bool(BoolStore::Native),
        ];
        for dtype in dtypes {
            assert_eq!(element_type(dtype).name(), dtype.name());
        }
    }
}
