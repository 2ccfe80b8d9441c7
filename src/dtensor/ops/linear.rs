//! The linear transformation `x @ weight + bias`.
//!
//! Where the product is a sum over ranks, a bias that all of them hold becomes a term of it: the
//! first rank's. That costs nothing, in forward or in backward, and the sum need not be made to
//! add a bias.

use super::{EinsumRule, Operand, apply, product};
use crate::dtensor::DTensor;

const LINEAR: EinsumRule = EinsumRule::new("linear", "..i, io + o* -> ..o").linear(&[0, 1]);

/// `x @ weight + bias`, as burn's [`linear`](burn::tensor::module::linear): of an input
/// `[.., d_in]`, a weight `[d_in, d_out]` and a bias `[d_out]`.
///
/// # Collective
/// If the rule has to redistribute: every rank of the mesh, in forward and in backward.
///
/// # Panics
/// Unwinds with a typed [`Error`](crate::Error) if the shapes do not fit.
#[must_use]
#[track_caller]
pub fn linear<const D: usize>(x: impl Into<Operand<D>>, weight: DTensor<2>, bias: Option<DTensor<1>>) -> DTensor<D> {
    apply(&LINEAR, (x.into(), weight, bias), |(x, weight, bias), _| product::linear(x, weight, bias))
}
