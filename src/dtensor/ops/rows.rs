//! Rows that the tables of many operators share.

use std::iter::repeat_n;

use super::placements::{AVG, MAX, MIN, PRODUCT, S, SUM};
use super::{Strategy, strategy};
use crate::placement::Placement;

/// Every pending reduction.
pub(super) const PARTIALS: &[Placement] = &[SUM, AVG, MAX, MIN, PRODUCT];

/// The dimensions `dims` keep their place: `S(d), S(d), .. -> S(d)` for `inputs` inputs.
pub(super) fn kept(inputs: usize, dims: impl IntoIterator<Item = usize>) -> impl Iterator<Item = Strategy> {
    dims.into_iter().map(move |dim| strategy(repeat_n(S(dim), inputs), [S(dim)]))
}

/// Operators that only move elements go through pending reductions: `P, P, .. -> P`.
pub(super) fn through(inputs: usize, partials: &'static [Placement]) -> impl Iterator<Item = Strategy> {
    partials.iter().map(move |&partial| strategy(repeat_n(partial, inputs), [partial]))
}

/// The pending reductions that leave a constant alone which every rank puts in.
pub(super) fn through_constant(zero: bool) -> &'static [Placement] {
    if zero { PARTIALS } else { &[AVG, MAX, MIN] }
}
