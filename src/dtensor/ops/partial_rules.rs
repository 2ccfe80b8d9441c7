//! [`PartialRules`]: how an operator goes through partial inputs, whose value is yet to be reduced over
//! the ranks.

use std::iter::repeat_n;
use std::ptr;

use super::placements::{AVG, MAX, MIN, PRODUCT, R, SUM};
use super::{Strategy, strategy};
use crate::placement::Placement;

/// A row: how inputs are placed, and the outputs.
pub type PlacementList = (&'static [Placement], Placement);

/// Rows in which an operator goes through partial inputs.
#[derive(Debug, Clone, Copy)]
pub struct PartialRules {
    /// All inputs and outputs have one of these.
    same_for_all: &'static [Placement],
    /// The first input has one of these, the others are `R`.
    first: &'static [Placement],
    /// Any others.
    rows: &'static [PlacementList],
    /// Any others, of floats alone.
    of_floats: &'static [PlacementList],
}

impl PartialRules {
    /// These rows.
    pub const fn new(rows: &'static [PlacementList]) -> Self {
        Self { same_for_all: &[], first: &[], rows, of_floats: &[] }
    }

    /// Of inputs that are all partial in one of these ways the result is too.
    pub const fn same_for_all(same_for_all: &'static [Placement]) -> Self {
        Self { same_for_all, ..NO_PARTIAL }
    }

    /// Of a first input that is partial in one of these ways, and others that are `R`, the result is too.
    pub const fn of_first(first: &'static [Placement]) -> Self {
        Self { first, ..NO_PARTIAL }
    }

    /// And these rows.
    ///
    /// # Panics
    /// If it has rows of [`new`](Self::new) or of another `and`: say all of them at once.
    #[must_use]
    pub const fn and(self, rows: &'static [PlacementList]) -> Self {
        assert!(self.rows.is_empty(), "it has rows: say all of them at once");
        Self { rows, ..self }
    }

    /// And these for floats alone: where integers would wrap around, which keeps no order (of bytes
    /// `-max(0, 5)` is 251, and `min(-0, -5)` 0), or be rounded.
    ///
    /// # Panics
    /// If it has such rows.
    #[must_use]
    pub const fn of_floats(self, rows: &'static [PlacementList]) -> Self {
        assert!(self.of_floats.is_empty(), "it has rows of floats: say all of them at once");
        Self { of_floats: rows, ..self }
    }

    /// The rows, of an operator of so many inputs, and outputs that are placed alike.
    pub(super) fn rows(self, inputs: usize, outputs: usize) -> impl Iterator<Item = Strategy> {
        let to = move |inputs: &mut dyn Iterator<Item = Placement>, output| strategy(inputs, repeat_n(output, outputs));
        let same = self.same_for_all.iter().map(move |&one| to(&mut repeat_n(one, inputs), one));
        let first = move |&one| to(&mut std::iter::once(one).chain(repeat_n(R, inputs - 1)), one);
        let row = move |(inputs, output): &PlacementList| to(&mut inputs.iter().copied(), *output);
        let of_floats = self.of_floats.iter().map(move |of_floats| row(of_floats).if_floats());
        same.chain(self.first.iter().map(first)).chain(self.rows.iter().map(row)).chain(of_floats)
    }
}

/// The same rows, by address.
impl PartialEq for PartialRules {
    fn eq(&self, other: &Self) -> bool {
        ptr::eq(self.same_for_all, other.same_for_all)
            && ptr::eq(self.first, other.first)
            && ptr::eq(self.rows, other.rows)
            && ptr::eq(self.of_floats, other.of_floats)
    }
}

impl Eq for PartialRules {}

/// Nothing goes through: partial inputs are reduced first.
pub const NO_PARTIAL: PartialRules = PartialRules::new(&[]);
/// Elements are only moved: all of it goes through.
pub const MOVED: PartialRules = PartialRules::same_for_all(&[SUM, AVG, MAX, MIN, PRODUCT]);
/// Elements are moved as other inputs, that all ranks hold, say.
pub const MOVED_BY: PartialRules = PartialRules::of_first(&[SUM, AVG, MAX, MIN, PRODUCT]);
/// Elements are moved, and a constant joins them that is its own average, maximum and minimum; zero, as
/// [`MOVED`], also its own sum and product.
pub const MOVED_WITH_CONSTANT: PartialRules = PartialRules::same_for_all(&[AVG, MAX, MIN]);
/// `f(a + b) = f(a) + f(b)`.
///
/// Of numbers. Terms are added up later than on one device: where a term is zero (other ranks' rows of
/// a table are) and the factor infinite, or both terms overflow, one gives NaN and the other an infinity.
pub const LINEAR: PartialRules = PartialRules::same_for_all(&[SUM, AVG]);
/// `f(max(a, b)) = max(f(a), f(b))`.
///
/// `f` and its derivative must be numbers of everything that ranks may hold, and what an extremum
/// leaves out may be as far from it as it likes (a rank without elements holds an infinity): no
/// number in one term is none in the result, and a gradient of zero times an infinite derivative
/// is none either. Hence the two halves below. Of NaN `f` must be NaN: so is an extremum of which one
/// term is. And where several terms become one number they share the gradient of the greatest: `f` must
/// be flat there, as `relu` is; else, of terms so close that `f` rounds them to one, neighbours do.
pub const INCREASING: PartialRules = PartialRules::same_for_all(&[MAX, MIN]);
/// Increasing, and defined from some number on, as `log`.
pub const INCREASING_FROM: PartialRules = PartialRules::same_for_all(&[MIN]);
/// Increasing, and finite up to some number, as `exp`.
pub const INCREASING_TO: PartialRules = PartialRules::same_for_all(&[MAX]);
/// `f(max(a, b)) = min(f(a), f(b))`.
pub const DECREASING: PartialRules = PartialRules::new(&[(&[MAX], MIN), (&[MIN], MAX)]);
/// `x -> -x`.
pub const NEGATION: PartialRules = LINEAR.of_floats(&[(&[MAX], MIN), (&[MIN], MAX)]);
/// `x -> x + c`.
///
/// No extremum goes through: a sum is rounded, and terms that it rounds to one number would share
/// the gradient of the greatest.
pub const SHIFT: PartialRules = PartialRules::same_for_all(&[AVG]);
/// `a + b` and `a - b`; of extrema as [`SHIFT`].
pub const ADDITION: PartialRules = LINEAR.and(&[(&[AVG, R], AVG), (&[R, AVG], AVG)]);
/// `a * b`.
pub const BILINEAR: PartialRules =
    PartialRules::new(&[(&[SUM, R], SUM), (&[R, SUM], SUM), (&[AVG, R], AVG), (&[R, AVG], AVG)]);
/// `x / c`. A quotient of integers is rounded.
pub const QUOTIENT: PartialRules = NO_PARTIAL.of_floats(&[(&[SUM], SUM), (&[AVG], AVG)]);
/// `a / b`. A quotient of integers is rounded.
pub const LINEAR_IN_FIRST: PartialRules = NO_PARTIAL.of_floats(&[(&[SUM, R], SUM), (&[AVG, R], AVG)]);
/// `max(a, b)`.
///
/// Not of a minimum: of `max(min(a, b), c)` the terms that `c` replaces are equal and share the gradient, also one
/// that was `c` before and is not the minimum.
pub const MAXIMUM: PartialRules = PartialRules::same_for_all(&[MAX]).and(&[(&[MAX, R], MAX), (&[R, MAX], MAX)]);
/// `min(a, b)`; not of a maximum, as [`MAXIMUM`] not of a minimum.
pub const MINIMUM: PartialRules = PartialRules::same_for_all(&[MIN]).and(&[(&[MIN, R], MIN), (&[R, MIN], MIN)]);
/// `a or b`, the maximum of what has no gradient.
pub const DISJUNCTION: PartialRules =
    PartialRules::same_for_all(&[MAX]).and(&[(&[MAX, R], MAX), (&[R, MAX], MAX), (&[MIN, R], MIN), (&[R, MIN], MIN)]);
/// `a and b`, the minimum of what has no gradient.
pub const CONJUNCTION: PartialRules =
    PartialRules::same_for_all(&[MIN]).and(&[(&[MIN, R], MIN), (&[R, MIN], MIN), (&[MAX, R], MAX), (&[R, MAX], MAX)]);
