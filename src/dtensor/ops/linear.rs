//! The linear transformation `x @ weight + bias`.
//!
//! If the product is a partial sum, a replicated bias is converted to one: the first rank adds it.
//! This costs no communication in forward or backward, and the product need not be reduced before
//! the bias is added.

use super::{EinsumRule, Operand, apply, product};
use crate::dtensor::DTensor;

const LINEAR: EinsumRule = EinsumRule::new("linear", "..i, io + o* -> ..o").linear(&[0, 1]);

/// Computes `x @ weight + bias`, as burn's [`linear`](burn::tensor::module::linear), for an input
/// `[.., d_in]`, a weight `[d_in, d_out]` and a bias `[d_out]`.
///
/// A partial sum is multiplied before it is reduced, so its product with an infinity may be
/// [NaN](super#infinities-and-ties).
///
/// # Collective
/// If the rule has to redistribute: every rank of the mesh, in forward and in backward.
///
/// # Panics
/// Unwinds with a typed [`Error`](crate::Error) if the shapes do not fit.
#[must_use]
#[track_caller]
pub fn linear<const D: usize>(
    x: impl Into<Operand<D>>,
    weight: DTensor<2>,
    bias: Option<DTensor<1>>,
) -> DTensor<D> {
    apply(&LINEAR, (x.into(), weight, bias), |(x, weight, bias), _| {
        product::linear(x, weight, bias)
    })
}
