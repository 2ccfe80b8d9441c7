//! Elementwise losses: pointwise, followed by a [`Reduction`].

use burn::tensor::activation::log_sigmoid;

use super::super::args::operand_error;
use super::super::partial_rules::NO_PARTIAL;
use super::super::{EinsumRule, apply};
use super::Reduction;
use crate::dtensor::DTensor;

/// Returns the mean or sum of `(x - target)²`, as burn-nn's `MseLoss`.
///
/// # Collective
/// If the inputs are placed differently: every rank of the mesh, in forward and in backward.
///
/// # Panics
/// Unwinds with a typed [`Error`](crate::Error) if the shapes differ.
#[must_use]
#[track_caller]
pub fn mse_loss<const D: usize>(
    x: DTensor<D>,
    target: DTensor<D>,
    reduction: Reduction,
) -> DTensor<1> {
    check_same_layout("mse_loss", &x, &target);
    let rule = const { EinsumRule::pointwise("mse_loss", NO_PARTIAL) };
    reduced(
        apply(&rule, (x, target), |(x, target), _| (x - target).square()),
        reduction,
    )
}

/// Returns the mean or sum of `-(target log p + (1 - target) log (1 - p))` with `p =
/// sigmoid(logits)`, as burn-nn's `BinaryCrossEntropyLoss` for logits. Targets are in `0..=1`.
///
/// # Collective
/// If the inputs are placed differently: every rank of the mesh, in forward and in backward.
///
/// # Panics
/// Unwinds with a typed [`Error`](crate::Error) if the shapes differ.
#[must_use]
#[track_caller]
pub fn binary_cross_entropy_with_logits<const D: usize>(
    logits: DTensor<D>,
    target: DTensor<D>,
    reduction: Reduction,
) -> DTensor<1> {
    let name = "binary_cross_entropy_with_logits";
    check_same_layout(name, &logits, &target);
    let rule = const { EinsumRule::pointwise("binary_cross_entropy_with_logits", NO_PARTIAL) };
    let losses = apply(&rule, (logits, target), |(x, target), _| {
        (target.neg() + 1.0) * x.clone() - log_sigmoid(x)
    });
    reduced(losses, reduction)
}

fn reduced<const D: usize>(losses: DTensor<D>, reduction: Reduction) -> DTensor<1> {
    match reduction {
        Reduction::Mean => losses.mean(),
        Reduction::Sum => losses.sum(),
    }
}

#[track_caller]
fn check_same_layout<const D: usize>(operator: &'static str, x: &DTensor<D>, target: &DTensor<D>) {
    if x.dims() != target.dims() {
        let why = "every element needs a target. Make the shapes equal";
        operand_error(operator, &[x.shape(), target.shape()], why).unwind()
    }
}
