//! [`PartialRules`]: the partial inputs that an operator can process before they are reduced over the ranks.

use std::iter::repeat_n;
use std::ptr;

use super::placements::{AVG, MAX, MIN, PRODUCT, R, SUM};
use super::{Strategy, strategy};
use crate::placement::Placement;

/// Placements of the inputs and of the outputs in one strategy.
pub type PlacementList = (&'static [Placement], Placement);

/// Strategies in which an operator accepts partial inputs.
#[derive(Debug, Clone, Copy)]
pub struct PartialRules {
    /// Placements that all inputs and outputs may have together.
    same_for_all: &'static [Placement],
    /// Placements that the first input and the outputs may have together, while the other inputs
    /// are `R`.
    first: &'static [Placement],
    /// Other strategies.
    rows: &'static [PlacementList],
    /// Other strategies, for floats only.
    of_floats: &'static [PlacementList],
}

impl PartialRules {
    /// Makes rules of these strategies.
    pub const fn new(rows: &'static [PlacementList]) -> Self {
        Self {
            same_for_all: &[],
            first: &[],
            rows,
            of_floats: &[],
        }
    }

    /// Makes rules in which all inputs and outputs have the same placement, one of these.
    pub const fn same_for_all(same_for_all: &'static [Placement]) -> Self {
        Self {
            same_for_all,
            ..NO_PARTIAL
        }
    }

    /// Makes rules in which the first input and the outputs have the same placement, one of these,
    /// and the other inputs are `R`.
    pub const fn of_first(first: &'static [Placement]) -> Self {
        Self {
            first,
            ..NO_PARTIAL
        }
    }

    /// Adds these strategies.
    ///
    /// # Panics
    /// If strategies were already set by [`new`](Self::new) or `and`.
    #[must_use]
    pub const fn and(self, rows: &'static [PlacementList]) -> Self {
        assert!(
            self.rows.is_empty(),
            "these rules already have strategies. Pass all in one call"
        );
        Self { rows, ..self }
    }

    /// Adds strategies that hold for floats only. Integers may wrap around, which does not preserve
    /// order (with bytes, `-max(0, 5)` is 251 and `min(-0, -5)` is 0), or be rounded.
    ///
    /// # Panics
    /// If such strategies were already set.
    #[must_use]
    pub const fn of_floats(self, rows: &'static [PlacementList]) -> Self {
        assert!(
            self.of_floats.is_empty(),
            "these rules already have strategies for floats. Pass all in one call"
        );
        Self {
            of_floats: rows,
            ..self
        }
    }

    /// Returns the strategies of an operator with so many inputs and outputs. All outputs have the
    /// same placement.
    pub(super) fn rows(self, inputs: usize, outputs: usize) -> impl Iterator<Item = Strategy> {
        let to = move |inputs: &mut dyn Iterator<Item = Placement>, output| {
            strategy(inputs, repeat_n(output, outputs))
        };
        let same = self
            .same_for_all
            .iter()
            .map(move |&one| to(&mut repeat_n(one, inputs), one));
        let first = move |&one| {
            to(
                &mut std::iter::once(one).chain(repeat_n(R, inputs - 1)),
                one,
            )
        };
        let row = move |(inputs, output): &PlacementList| to(&mut inputs.iter().copied(), *output);
        let of_floats = self
            .of_floats
            .iter()
            .map(move |of_floats| row(of_floats).if_floats());
        same.chain(self.first.iter().map(first))
            .chain(self.rows.iter().map(row))
            .chain(of_floats)
    }
}

/// Compares the lists by address.
impl PartialEq for PartialRules {
    fn eq(&self, other: &Self) -> bool {
        ptr::eq(self.same_for_all, other.same_for_all)
            && ptr::eq(self.first, other.first)
            && ptr::eq(self.rows, other.rows)
            && ptr::eq(self.of_floats, other.of_floats)
    }
}

impl Eq for PartialRules {}

/// Rules that accept no partial inputs: all are reduced first.
pub const NO_PARTIAL: PartialRules = PartialRules::new(&[]);
/// Rules for operators that only move elements: every reduction can be deferred.
pub const MOVED: PartialRules = PartialRules::same_for_all(&[SUM, AVG, MAX, MIN, PRODUCT]);
/// Rules for operators that only move elements of the first input, as directed by other inputs that
/// are replicated.
pub const MOVED_BY: PartialRules = PartialRules::of_first(&[SUM, AVG, MAX, MIN, PRODUCT]);
/// Rules for operators that move elements and insert a constant: it is its own average, maximum and
/// minimum. Zero is also its own sum and product, so that [`MOVED`] applies.
pub const MOVED_WITH_CONSTANT: PartialRules = PartialRules::same_for_all(&[AVG, MAX, MIN]);
/// Rules for linear functions: `f(a + b) = f(a) + f(b)`.
///
/// This holds for finite numbers only, because partial values are summed later than on one device.
/// If a partial value is zero (as for rows of a table that other ranks hold) and the factor is
/// infinite, or if two partial values overflow, one order gives NaN and the other an infinity.
pub const LINEAR: PartialRules = PartialRules::same_for_all(&[SUM, AVG]);
/// Rules for increasing functions: `f(max(a, b)) = max(f(a), f(b))`.
///
/// `f` must satisfy three conditions:
///
/// 1. `f` and its derivative are numbers for every value that a rank may hold. Values that the
///    reduction discards may be arbitrarily far from the result: a rank without elements holds an
///    infinity. A NaN in one partial value would become NaN in the result, and so would a zero
///    gradient times an infinite derivative. [`INCREASING_FROM`] and [`INCREASING_TO`] are for
///    functions that satisfy this in one direction only.
/// 2. `f(NaN)` is NaN, because an extremum is NaN if one partial value is.
/// 3. Partial values that `f` maps to one number share the gradient of the greatest. `f` must
///    therefore be flat there, as `relu` is; elsewhere only neighboring numbers may be rounded to
///    one.
pub const INCREASING: PartialRules = PartialRules::same_for_all(&[MAX, MIN]);
/// Rules for increasing functions that are defined from some number on, such as `log`.
pub const INCREASING_FROM: PartialRules = PartialRules::same_for_all(&[MIN]);
/// Rules for increasing functions that are finite up to some number, such as `exp`.
pub const INCREASING_TO: PartialRules = PartialRules::same_for_all(&[MAX]);
/// Rules for decreasing functions: `f(max(a, b)) = min(f(a), f(b))`.
pub const DECREASING: PartialRules = PartialRules::new(&[(&[MAX], MIN), (&[MIN], MAX)]);
/// Rules for the negation `x -> -x`.
pub const NEGATION: PartialRules = LINEAR.of_floats(&[(&[MAX], MIN), (&[MIN], MAX)]);
/// Rules for `x -> x + c`.
///
/// Extrema must be reduced first: the addition rounds, and partial values that it rounds to one
/// number would share the gradient of the greatest.
pub const SHIFT: PartialRules = PartialRules::same_for_all(&[AVG]);
/// Rules for `a + b` and `a - b`. Extrema must be reduced first, as for [`SHIFT`].
pub const ADDITION: PartialRules = LINEAR.and(&[(&[AVG, R], AVG), (&[R, AVG], AVG)]);
/// Rules for `a * b`.
pub const BILINEAR: PartialRules = PartialRules::new(&[
    (&[SUM, R], SUM),
    (&[R, SUM], SUM),
    (&[AVG, R], AVG),
    (&[R, AVG], AVG),
]);
/// Rules for `x / c` of floats. A quotient of integers is rounded.
pub const QUOTIENT: PartialRules = NO_PARTIAL.of_floats(&[(&[SUM], SUM), (&[AVG], AVG)]);
/// Rules for `a / b` of floats. A quotient of integers is rounded.
pub const LINEAR_IN_FIRST: PartialRules =
    NO_PARTIAL.of_floats(&[(&[SUM, R], SUM), (&[AVG, R], AVG)]);
/// Rules for `max(a, b)`.
///
/// A partial minimum must be reduced first: in `max(min(a, b), c)`, partial values that `c`
/// replaces become equal and share the gradient. One of them may have been equal to `c` before
/// without being the minimum.
pub const MAXIMUM: PartialRules =
    PartialRules::same_for_all(&[MAX]).and(&[(&[MAX, R], MAX), (&[R, MAX], MAX)]);
/// Rules for `min(a, b)`. A partial maximum must be reduced first, for the same reason as with
/// [`MAXIMUM`].
pub const MINIMUM: PartialRules =
    PartialRules::same_for_all(&[MIN]).and(&[(&[MIN, R], MIN), (&[R, MIN], MIN)]);
/// Rules for `a or b`: a maximum without gradients.
pub const DISJUNCTION: PartialRules = PartialRules::same_for_all(&[MAX]).and(&[
    (&[MAX, R], MAX),
    (&[R, MAX], MAX),
    (&[MIN, R], MIN),
    (&[R, MIN], MIN),
]);
/// Rules for `a and b`: a minimum without gradients.
pub const CONJUNCTION: PartialRules = PartialRules::same_for_all(&[MIN]).and(&[
    (&[MIN, R], MIN),
    (&[R, MIN], MIN),
    (&[MAX, R], MAX),
    (&[R, MAX], MAX),
]);
