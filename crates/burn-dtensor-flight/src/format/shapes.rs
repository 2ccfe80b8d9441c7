//! Compact encoding of shapes and dtypes, for as many tensors of a call as fit.
//!
//! ```text
//! dtype  dimensions  length of each, seven bits per byte
//! ┌──────┬──────────┬───┬───┬──
//! │ 1    │ 2        │ 4 │ 8 │     [4, 8] f64
//! └──────┴──────────┴───┴───┴──
//! ```

use std::fmt;

use super::bytes::{FixedBuf, take_number};

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

/// Type of a tensor's elements. The encoding is the number of the variant; 0 stands for no tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(missing_docs, reason = "named as in burn")]
pub enum ElementType {
    F64 = 1,
    F32,
    Flex32,
    F16,
    BF16,
    I64,
    I32,
    I16,
    I8,
    U64,
    U32,
    U16,
    U8,
    Bool,
    QFloat,
}

/// Burn's names of the element types; their encoding is the index.
const NAMES: [&str; 16] = [
    NONE, "f64", "f32", "flex32", "f16", "bf16", "i64", "i32", "i16", "i8", "u64", "u32", "u16",
    "u8", "bool", "qfloat",
];

impl ElementType {
    /// Returns burn's name of the type.
    pub fn name(self) -> &'static str {
        NAMES[self as usize]
    }
}

/// Appends shape and element type of each tensor of a call, until one does not fit completely.
/// Returns the number of all tensors.
pub(super) fn push<'a, const N: usize>(
    tensors: impl Iterator<Item = Option<(&'a [usize], ElementType)>>,
    text: &mut FixedBuf<N>,
) -> usize {
    let mut count = 0;
    let mut is_full = false;
    for tensor in tensors {
        count += 1;
        let before = text.bytes().len();
        let (shape, dtype) = tensor.map_or((&[][..], 0), |(shape, dtype)| (shape, dtype as u8));
        let fits = !is_full
            && text.push(&[dtype, shape.len() as u8])
            && shape.iter().all(|length| text.push_number(*length as u64));
        if !fits {
            is_full = true;
            text.truncate(before);
        }
    }
    count
}

/// Decodes the tensors that [`push`] has written.
pub(super) fn read(mut bytes: &[u8]) -> Vec<Tensor> {
    std::iter::from_fn(|| {
        let dtype = bytes.split_off_first()?;
        let dims = bytes.split_off_first()?;
        let shape = (0..*dims)
            .map(|_| Some(take_number(&mut bytes)? as usize))
            .collect::<Option<_>>()?;
        Some(Tensor {
            shape,
            dtype: NAMES.get(usize::from(*dtype))?,
        })
    })
    .collect()
}
