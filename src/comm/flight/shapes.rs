//! Compact encoding of shapes and dtypes, for as many tensors of a call as fit.
//!
//! ```text
//! dtype  dimensions  length of each, seven bits per byte
//! ┌──────┬──────────┬───┬───┬──
//! │ 1    │ 2        │ 4 │ 8 │     [4, 8] f64
//! └──────┴──────────┴───┴───┴──
//! ```

use std::fmt;

use burn::tensor::DType;

use super::bytes::{Room, take_number};
use crate::comm::TensorMeta;
use crate::comm::backend::CallSignature;

/// Shape and dtype of one tensor of an operation. Displays as `[4, 8] f32`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tensor {
    /// Shape of the full tensor.
    pub shape: Vec<usize>,
    /// Burn's name of the element type; `none` if no tensor is sent to a rank.
    pub dtype: &'static str,
}

impl fmt::Display for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.dtype {
            NONE => f.write_str(NONE),
            dtype => write!(f, "{:?} {dtype}", self.shape),
        }
    }
}

const NONE: &str = "none";

/// Names of the dtypes; their encoding is the index.
const NAMES: [&str; 16] = [
    NONE, "f64", "f32", "flex32", "f16", "bf16", "i64", "i32", "i16", "i8", "u64", "u32", "u16", "u8", "bool", "qfloat",
];

fn number(dtype: DType) -> u8 {
    match dtype {
        DType::F64 => 1,
        DType::F32 => 2,
        DType::Flex32 => 3,
        DType::F16 => 4,
        DType::BF16 => 5,
        DType::I64 => 6,
        DType::I32 => 7,
        DType::I16 => 8,
        DType::I8 => 9,
        DType::U64 => 10,
        DType::U32 => 11,
        DType::U16 => 12,
        DType::U8 => 13,
        DType::Bool(_) => 14,
        DType::QFloat(_) => 15,
    }
}

/// Appends shape and dtype of each tensor of a call, until one does not fit completely. For an all-to-all of
/// lists, these are the tensors that are sent. Returns the number of all tensors.
pub(super) fn push<const N: usize>(print: &CallSignature, room: &mut Room<N>) -> usize {
    let tensors = print.tensors.iter().map(|tensor| Some((&tensor.shape, tensor.dtype)));
    let given = print.pairs.iter().flat_map(|pairs| &pairs.given);
    let given = given.map(|meta| meta.as_ref().map(|TensorMeta { shape, dtype }| (shape, *dtype)));
    let (mut count, mut is_full) = (0, false);
    for tensor in tensors.chain(given) {
        count += 1;
        let before = room.bytes().len();
        let (shape, dtype) = tensor.map_or((&[][..], 0), |(shape, dtype)| (&shape[..], number(dtype)));
        let fits = !is_full
            && room.push(&[dtype, shape.len() as u8])
            && shape.iter().all(|length| room.push_number(*length as u64));
        if !fits {
            is_full = true;
            room.truncate(before);
        }
    }
    count
}

/// Decodes the tensors that [`push`] has written.
pub(super) fn read(mut bytes: &[u8]) -> Vec<Tensor> {
    std::iter::from_fn(|| {
        let (dtype, dims) = (bytes.split_off_first()?, bytes.split_off_first()?);
        let shape = (0..*dims).map(|_| Some(take_number(&mut bytes)? as usize)).collect::<Option<_>>()?;
        Some(Tensor { shape, dtype: NAMES.get(usize::from(*dtype))? })
    })
    .collect()
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
            assert_eq!(NAMES[usize::from(number(dtype))], dtype.name());
        }
    }
}
