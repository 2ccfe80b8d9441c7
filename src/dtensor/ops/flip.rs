//! Reordering of elements along dimensions: flips and rolls.

use burn::tensor::AsIndex;
use itertools::Itertools;
use smallvec::SmallVec;

use super::args::{dim_of, operand_error};
use super::partial_rules::MOVED;
use super::{EinsumRule, apply};
use crate::dtensor::{DTensor, Kind};

const fn reordered(name: &'static str) -> EinsumRule {
    EinsumRule::new(name, "..D.. -> ..D..").with_partial_rules(MOVED)
}

impl<const D: usize, K: Kind> DTensor<D, K> {
    /// Reverses the elements along `axes`, as burn's [`flip`](burn::tensor::Tensor::flip).
    #[must_use]
    #[track_caller]
    pub fn flip<const N: usize>(self, axes: [impl AsIndex; N]) -> Self {
        let axes = axes.map(|axis| dim_of("flip", axis, D));
        if !axes.iter().all_unique() {
            let why = format!("the axes {axes:?} are not different. Pass each axis once");
            operand_error("flip", &[self.shape()], why).unwind();
        }
        apply(&const { reordered("flip") }.at(axes), self, |x, _| {
            x.flip(axes)
        })
    }

    /// Moves the elements by `shift` along `dim`, with wrap-around, as burn's
    /// [`roll_dim`](burn::tensor::Tensor::roll_dim).
    #[must_use]
    #[track_caller]
    pub fn roll_dim<Shift: AsIndex, Dim: AsIndex>(self, shift: Shift, dim: Dim) -> Self {
        let dim = dim_of("roll_dim", dim, D);
        apply(&const { reordered("roll_dim") }.at([dim]), self, |x, _| {
            x.roll_dim(shift, dim)
        })
    }

    /// Moves the elements by `shifts` along `dims`, with wrap-around, as burn's
    /// [`roll`](burn::tensor::Tensor::roll).
    #[must_use]
    #[track_caller]
    pub fn roll<Shift: AsIndex, Dim: AsIndex>(self, shifts: &[Shift], dims: &[Dim]) -> Self {
        if shifts.len() != dims.len() {
            let why = format!(
                "{} shifts for {} dimensions. Pass equally many",
                shifts.len(),
                dims.len()
            );
            operand_error("roll", &[self.shape()], why).unwind();
        }
        let dims: SmallVec<[usize; 4]> = dims.iter().map(|&dim| dim_of("roll", dim, D)).collect();
        apply(
            &const { reordered("roll") }.at(dims.iter().copied()),
            self,
            |x, _| x.roll(shifts, &dims),
        )
    }
}
