//! Arguments as burn takes them, and the typed error for those that do not fit.

use burn::tensor::{AsIndex, Shape};
use smallvec::SmallVec;

use crate::Error;
use crate::dtensor::DTensorError;

/// The dimension `index` of a tensor of `dims` dimensions, counted from the end if negative.
///
/// # Panics
/// Unwinds with [`DTensorError::Operands`] if there is none.
#[track_caller]
pub(super) fn dim_of(operator: &'static str, index: impl AsIndex, dims: usize) -> usize {
    match index.try_dim_index(dims) {
        Ok(dim) => dim,
        Err(_) => {
            let why = format!("there is no dimension {index:?} of {dims}; use one in -{dims}..{dims}");
            operand_error(operator, &[], why).unwind()
        }
    }
}

/// Dimensions of a tensor, ascending, each once.
pub(super) type TensorDims = SmallVec<[usize; 4]>;

/// [`dim_of`] each of `indices`.
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

/// [`DTensorError::Operands`] for inputs of these shapes.
pub(crate) fn operand_error(operator: &'static str, shapes: &[Shape], why: impl Into<String>) -> Error {
    let shapes = shapes.iter().map(|shape| shape.to_vec()).collect();
    DTensorError::Operands { operator, shapes, why: why.into() }.into()
}
