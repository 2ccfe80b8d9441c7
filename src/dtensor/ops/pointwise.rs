//! Pointwise operators: element by element, with broadcasting of dimensions of length 1.
//!
//! | inputs | output |
//! |---|---|
//! | every one as long as the output along `d`: `S(d)`; broadcast: `R` | `S(d)` |
//! | those of the operator's [`Table`] | its last column |

use std::hash::{Hash, Hasher};
use std::iter::repeat_n;

use burn::tensor::{Shape, Tensor};

use super::args::misfit;
use super::placements::{AVG, MAX, MIN, R, S, SUM};
use super::{Rule, Strategy, binary, strategy, unary};
use crate::Result;
use crate::dtensor::{DTensor, Kind};
use crate::placement::Placement;

/// A row of a [`Table`]: how inputs are placed, and the output.
pub type Row = (&'static [Placement], Placement);

/// Rows in which an operator goes through a pending reduction.
#[derive(Debug, Clone, Copy)]
pub struct Table {
    always: &'static [Row],
    of_floats: &'static [Row],
}

impl Table {
    /// These rows.
    pub const fn new(rows: &'static [Row]) -> Self {
        Self { always: rows, of_floats: &[] }
    }

    /// And these for floats alone: where integers would wrap around, which keeps no order (of bytes
    /// `-max(0, 5)` is 251, and `min(-0, -5)` 0), or be rounded.
    #[must_use]
    pub const fn of_floats(self, rows: &'static [Row]) -> Self {
        Self { of_floats: rows, ..self }
    }

    /// The rows, for an operator of `outputs` outputs that are placed alike.
    pub(super) fn rows(self, outputs: usize) -> impl Iterator<Item = Strategy> {
        let row = move |(inputs, output): &Row| strategy(inputs.iter().copied(), repeat_n(*output, outputs));
        self.always.iter().map(row).chain(self.of_floats.iter().map(move |of_floats| row(of_floats).if_floats()))
    }
}

/// The same rows, by address.
impl PartialEq for Table {
    fn eq(&self, other: &Self) -> bool {
        std::ptr::eq(self.always, other.always) && std::ptr::eq(self.of_floats, other.of_floats)
    }
}

impl Eq for Table {}

impl Hash for Table {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (self.always.as_ptr().addr(), self.of_floats.as_ptr().addr()).hash(state);
    }
}

/// Nothing goes through: pending reductions are reduced first.
pub const NOTHING: Table = Table::new(&[]);
/// `f(a + b) = f(a) + f(b)`.
///
/// Of numbers. Terms are added up later than on one device: where a term is zero (other ranks' rows of
/// a table are) and the factor infinite, or both terms overflow, one gives NaN and the other an infinity.
pub const LINEAR: Table = Table::new(&[(&[SUM], SUM), (&[AVG], AVG)]);
/// `f(max(a, b)) = max(f(a), f(b))`.
///
/// `f` and its derivative must be numbers of everything that ranks may hold, and what an extremum
/// leaves out may be as far from it as it likes (a rank without elements holds an infinity): no
/// number in one term is none in the result, and a gradient of zero times an infinite derivative
/// is none either. Hence the two halves below. Of NaN `f` must be NaN: so is an extremum of which one
/// term is. And where several terms become one number they share the gradient of the greatest: `f` must
/// be flat there, as `relu` is; else, of terms so close that `f` rounds them to one, neighbours do.
pub const INCREASING: Table = Table::new(&[(&[MAX], MAX), (&[MIN], MIN)]);
/// Increasing, and defined from some number on, as `log`.
pub const INCREASING_FROM: Table = Table::new(&[(&[MIN], MIN)]);
/// Increasing, and finite up to some number, as `exp`.
pub const INCREASING_TO: Table = Table::new(&[(&[MAX], MAX)]);
/// `f(max(a, b)) = min(f(a), f(b))`.
pub const DECREASING: Table = Table::new(&[(&[MAX], MIN), (&[MIN], MAX)]);
/// `x -> -x`.
pub const NEGATION: Table = LINEAR.of_floats(&[(&[MAX], MIN), (&[MIN], MAX)]);
/// `x -> x + c`.
///
/// No extremum goes through: a sum is rounded, and terms that it rounds to one number would share
/// the gradient of the greatest.
pub const SHIFT: Table = Table::new(&[(&[AVG], AVG)]);
/// `a + b` and `a - b`; of extrema as [`SHIFT`].
pub const ADDITION: Table = Table::new(&[(&[SUM, SUM], SUM), (&[AVG, AVG], AVG), (&[AVG, R], AVG), (&[R, AVG], AVG)]);
/// `a * b`.
pub const BILINEAR: Table = Table::new(&[(&[SUM, R], SUM), (&[R, SUM], SUM), (&[AVG, R], AVG), (&[R, AVG], AVG)]);
/// `x / c`. A quotient of integers is rounded.
pub const QUOTIENT: Table = Table::new(&[]).of_floats(&[(&[SUM], SUM), (&[AVG], AVG)]);
/// `a / b`. A quotient of integers is rounded.
pub const LINEAR_IN_FIRST: Table = Table::new(&[]).of_floats(&[(&[SUM, R], SUM), (&[AVG, R], AVG)]);
/// `max(a, b)`.
pub const MAXIMUM: Table =
    Table::new(&[(&[MAX, MAX], MAX), (&[MAX, R], MAX), (&[R, MAX], MAX), (&[MIN, R], MIN), (&[R, MIN], MIN)]);
/// `min(a, b)`.
pub const MINIMUM: Table =
    Table::new(&[(&[MIN, MIN], MIN), (&[MIN, R], MIN), (&[R, MIN], MIN), (&[MAX, R], MAX), (&[R, MAX], MAX)]);

/// The rule of a pointwise operator.
#[derive(Debug, Clone, Copy)]
pub struct Pointwise {
    name: &'static str,
    table: Table,
}

impl Pointwise {
    /// The operator `name`, whose way through pending reductions is `table`.
    pub const fn new(name: &'static str, table: Table) -> Self {
        Self { name, table }
    }
}

/// The same table of the same operator, by address.
impl PartialEq for Pointwise {
    fn eq(&self, other: &Self) -> bool {
        std::ptr::eq(self.name, other.name) && self.table == other.table
    }
}

impl Eq for Pointwise {}

impl Hash for Pointwise {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (self.name.as_ptr().addr(), self.table).hash(state);
    }
}

impl Rule for Pointwise {
    fn name(&self) -> &'static str {
        self.name
    }

    fn outputs(&self, inputs: &[Shape]) -> Result<Vec<Shape>> {
        Ok(vec![broadcast(self.name, inputs)?])
    }

    fn takes_empty_parts(&self) -> bool {
        true
    }

    fn strategies(&self, inputs: &[Shape], outputs: &[Shape]) -> Vec<Strategy> {
        let mut rows = sharded(inputs, &outputs[0]);
        rows.extend(self.table.rows(1));
        rows
    }
}

/// One row for each dimension of the output: the inputs that are as long are cut like it.
pub(super) fn sharded(inputs: &[Shape], output: &Shape) -> Vec<Strategy> {
    let row = |dim| {
        let cut = |input: &Shape| if input[dim] == output[dim] { S(dim) } else { R };
        strategy(inputs.iter().map(cut), [S(dim)])
    };
    (0..output.num_dims()).map(row).collect()
}

/// The shape that the inputs' shapes broadcast to.
pub(super) fn broadcast(operator: &'static str, inputs: &[Shape]) -> Result<Shape> {
    let mut output = inputs[0].clone();
    for input in &inputs[1..] {
        for dim in 0..output.num_dims() {
            let (len, other) = (output[dim], input[dim]);
            if len != other && len != 1 && other != 1 {
                let why = format!("dimension {dim} has lengths {len} and {other}: make them equal, or one of them 1");
                return Err(misfit(operator, inputs, why));
            }
            output[dim] = if len == 1 { other } else { len };
        }
    }
    Ok(output)
}

/// A pointwise operator on one tensor. Collective and failing as [all operators](super#collective).
pub fn map<const D: usize, K: Kind, L: Kind>(
    rule: Pointwise,
    x: DTensor<D, K>,
    local: impl FnOnce(Tensor<D, K>) -> Tensor<D, L>,
) -> DTensor<D, L> {
    unary(&rule, x, |x, _| local(x))
}

/// A pointwise operator on two tensors, whose dimensions of length 1 broadcast. Collective and
/// failing as [all operators](super#collective).
pub fn zip<const D: usize, K: Kind, J: Kind, L: Kind>(
    rule: Pointwise,
    a: DTensor<D, K>,
    b: DTensor<D, J>,
    local: impl FnOnce(Tensor<D, K>, Tensor<D, J>) -> Tensor<D, L>,
) -> DTensor<D, L> {
    binary(&rule, a, b, |a, b, _| local(a, b))
}

/// Methods of one tensor that do on every rank's part what burn's methods of these names do.
macro_rules! mapped {
    ($Output:ty; $($name:ident: $table:expr),* $(,)?) => {$(
        #[doc = concat!("Elementwise, as burn's [`", stringify!($name), "`](burn::tensor::Tensor::", stringify!($name), ").")]
        #[must_use]
        pub fn $name(self) -> $Output {
            map(const { Pointwise::new(stringify!($name), $table) }, self, |x| x.$name())
        }
    )*};
}

/// [`mapped`], of two tensors.
macro_rules! zipped {
    ($Output:ty; $($name:ident: $table:expr),* $(,)?) => {$(
        #[doc = concat!("Elementwise with broadcasting, as burn's [`", stringify!($name), "`](burn::tensor::Tensor::", stringify!($name), ").")]
        #[must_use]
        pub fn $name(self, other: Self) -> $Output {
            zip(const { Pointwise::new(stringify!($name), $table) }, self, other, |a, b| a.$name(b))
        }
    )*};
}

pub(super) use {mapped, zipped};
