//! Pointwise operators: element by element, with broadcasting of dimensions of length 1.
//!
//! | inputs | output |
//! |---|---|
//! | every one as long as the output along `d`: `S(d)`; broadcast: `R` | `S(d)` |
//! | those of the operator's [`Table`] | its last column |

use std::hash::{Hash, Hasher};

use burn::tensor::{Shape, Tensor};

use super::args::misfit;
use super::placements::{AVG, MAX, MIN, R, S, SUM};
use super::{Rule, Strategy, binary, strategy, unary};
use crate::Result;
use crate::dtensor::{DTensor, Kind};
use crate::placement::Placement;

/// Rows in which an operator goes through a pending reduction: inputs, output.
pub type Table = &'static [(&'static [Placement], Placement)];

/// Nothing goes through: pending reductions are reduced first.
pub const NOTHING: Table = &[];
/// `f(a + b) = f(a) + f(b)`.
pub const LINEAR: Table = &[(&[SUM], SUM), (&[AVG], AVG)];
/// `f(max(a, b)) = max(f(a), f(b))`.
///
/// `f` and its derivative must be numbers of everything that ranks may hold, and what an extremum
/// leaves out may be as far from it as it likes (a rank without elements holds an infinity): no
/// number in one term is none in the result, and a gradient of zero times an infinite derivative
/// is none either. Hence the two halves below.
pub const INCREASING: Table = &[(&[MAX], MAX), (&[MIN], MIN)];
/// Increasing, and defined from some number on, as `log`.
pub const INCREASING_FROM: Table = &[(&[MIN], MIN)];
/// Increasing, and finite up to some number, as `exp`.
pub const INCREASING_TO: Table = &[(&[MAX], MAX)];
/// `f(max(a, b)) = min(f(a), f(b))`.
pub const DECREASING: Table = &[(&[MAX], MIN), (&[MIN], MAX)];
/// `x -> -x`.
pub const NEGATION: Table = &[(&[SUM], SUM), (&[AVG], AVG), (&[MAX], MIN), (&[MIN], MAX)];
/// `x -> x + c`.
pub const SHIFT: Table = &[(&[AVG], AVG), (&[MAX], MAX), (&[MIN], MIN)];
/// `x -> c - x`.
pub const MIRROR: Table = &[(&[AVG], AVG), (&[MAX], MIN), (&[MIN], MAX)];
/// `a + b`.
pub const ADDITION: Table = &[
    (&[SUM, SUM], SUM),
    (&[AVG, AVG], AVG),
    (&[AVG, R], AVG),
    (&[R, AVG], AVG),
    (&[MAX, R], MAX),
    (&[R, MAX], MAX),
    (&[MIN, R], MIN),
    (&[R, MIN], MIN),
];
/// `a - b`.
pub const SUBTRACTION: Table = &[
    (&[SUM, SUM], SUM),
    (&[AVG, AVG], AVG),
    (&[AVG, R], AVG),
    (&[R, AVG], AVG),
    (&[MAX, R], MAX),
    (&[R, MAX], MIN),
    (&[MIN, R], MIN),
    (&[R, MIN], MAX),
];
/// `a * b`.
pub const BILINEAR: Table = &[(&[SUM, R], SUM), (&[R, SUM], SUM), (&[AVG, R], AVG), (&[R, AVG], AVG)];
/// `a / b`.
pub const LINEAR_IN_FIRST: Table = &[(&[SUM, R], SUM), (&[AVG, R], AVG)];
/// `max(a, b)`.
pub const MAXIMUM: Table =
    &[(&[MAX, MAX], MAX), (&[MAX, R], MAX), (&[R, MAX], MAX), (&[MIN, R], MIN), (&[R, MIN], MIN)];
/// `min(a, b)`.
pub const MINIMUM: Table =
    &[(&[MIN, MIN], MIN), (&[MIN, R], MIN), (&[R, MIN], MIN), (&[MAX, R], MAX), (&[R, MAX], MAX)];

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
        std::ptr::eq(self.name, other.name) && std::ptr::eq(self.table, other.table)
    }
}

impl Eq for Pointwise {}

impl Hash for Pointwise {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (self.name.as_ptr().addr(), self.table.as_ptr().addr()).hash(state);
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
        rows.extend(self.table.iter().map(|(inputs, output)| strategy(inputs.iter().copied(), [*output])));
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
