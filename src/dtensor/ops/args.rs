//! Arguments as burn accepts them, and the typed error for operands that do not fit.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::slice::from_ref;

use burn::tensor::{AsIndex, Shape};
use smallvec::SmallVec;

use crate::Error;
use crate::dtensor::DTensorError;

/// Returns the dimension `index` of a tensor of `dims` dimensions. A negative index counts from the
/// end.
///
/// # Panics
/// Unwinds with [`DTensorError::Operands`] if the tensor does not have that dimension.
#[track_caller]
pub(super) fn dim_of(operator: &'static str, index: impl AsIndex, dims: usize) -> usize {
    match index.try_dim_index(dims) {
        Ok(dim) => dim,
        Err(_) => {
            let why = format!(
                "dimension {index:?} is out of range for {dims} dimensions. Use one in -{dims}..{dims}"
            );
            operand_error(operator, &[], why).unwind()
        }
    }
}

/// Dimensions of a tensor, in ascending order without duplicates.
pub(super) type TensorDims = SmallVec<[usize; 4]>;

/// Returns [`dim_of`] each of `indices`, sorted and without duplicates.
#[track_caller]
pub(super) fn dims_of(operator: &'static str, indices: &[impl AsIndex], dims: usize) -> TensorDims {
    let mut found = TensorDims::new();
    for &index in indices {
        found.push(dim_of(operator, index, dims));
    }
    found.sort_unstable();
    found.dedup();
    found
}

/// Returns the result of `convert`: burn's conversion of an argument for a tensor of this shape.
/// The argument cannot be validated first, because burn's traits for it only convert.
///
/// # Panics
/// Unwinds with [`DTensorError::Operands`] if the conversion panics. `why` describes the arguments
/// that it accepts.
#[track_caller]
pub(super) fn converted<T>(
    operator: &'static str,
    shape: &Shape,
    convert: impl FnOnce() -> T,
    why: impl FnOnce() -> String,
) -> T {
    match catch_unwind(AssertUnwindSafe(convert)) {
        Ok(converted) => converted,
        Err(_) => operand_error(operator, from_ref(shape), why()).unwind(),
    }
}

/// Makes a [`DTensorError::Operands`] for inputs of these shapes.
pub(crate) fn operand_error(
    operator: &'static str,
    shapes: &[Shape],
    why: impl Into<String>,
) -> Error {
    let shapes = shapes.iter().map(|shape| shape.to_vec()).collect();
    DTensorError::Operands {
        operator,
        shapes,
        why: why.into(),
    }
    .into()
}
