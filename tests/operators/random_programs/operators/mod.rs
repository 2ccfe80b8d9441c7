//! The operators that programs are made of, a file a family.
//!
//! An entry draws operands and arguments that the operator takes; whether its results are certain
//! for them is found out by trying (see [`draft`](super::draft)). The expression is compiled for
//! burn's tensors and for DTensors, as the prover's are.

mod activation;
mod arithmetic;
mod compare;
mod layers;
mod linalg;
mod lookup;
mod loss;
mod order;
mod products;
mod reduce;
mod shape;
mod signal;
mod slice;
mod unary;

use std::ops::Range;

use super::draft::Draft;
use super::program::{Id, Step};

/// An operator, and how an application of it is drawn.
pub struct Operator {
    /// As the prover's cases call it.
    pub name: &'static str,
    /// `None` if the draft so far has nothing that it could take.
    pub draw: fn(&mut Draft) -> Option<Step>,
}

/// Every operator.
pub fn all() -> Vec<Operator> {
    [
        activation::operators(),
        arithmetic::operators(),
        compare::operators(),
        layers::operators(),
        linalg::operators(),
        loss::operators(),
        lookup::operators(),
        order::operators(),
        products::operators(),
        reduce::operators(),
        shape::operators(),
        signal::operators(),
        slice::operators(),
        unary::operators(),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// An [`Operator`]: its name, perhaps numbers of dimensions of which one is drawn as `D`, and the
/// block that draws.
macro_rules! operator {
    ($name:expr, D in [$($rank:literal)+], |$d:ident| $block:block) => {
        $crate::random_programs::operators::Operator {
            name: $name,
            draw: |$d: &mut $crate::random_programs::draft::Draft| match $d.one_of(&[$($rank),+]) {
                $($rank => {
                    const D: usize = $rank;
                    $block
                })+
                _ => unreachable!("one of them is drawn"),
            },
        }
    };
    ($name:expr, |$d:ident| $block:block) => {
        $crate::random_programs::operators::Operator {
            name: $name,
            draw: |$d: &mut $crate::random_programs::draft::Draft| $block,
        }
    };
}

/// A [`Step`] of values and arguments in variables: the expression sees the values as tensors.
macro_rules! step {
    (($($x:ident : $kind:ident<$rank:tt>),+) [$($arg:ident),*] => $expr:expr) => {{
        let described = vec![$((stringify!($arg), format!("{:?}", $arg))),*];
        let arguments = ($($arg,)*);
        let again = Clone::clone(&arguments);
        Some($crate::random_programs::program::Step {
            operator: "",
            entry: None,
            operands: vec![$($x),+],
            results: Vec::new(),
            text: stringify!($expr),
            names: vec![$(stringify!($x)),+],
            arguments: described,
            plain: std::sync::Arc::new(move |operands| {
                #[allow(unused_imports)]
                use $crate::random_programs::operators::plain::*;
                let mut operands = operands.into_iter();
                let ($($arg,)*) = Clone::clone(&arguments);
                $(let $x = operands.next().expect("as many as are drawn").take::<Tensor<$rank, $kind>>();)+
                $crate::random_programs::value::Outputs::values($expr)
            }),
            sharded: std::sync::Arc::new(move |operands| {
                #[allow(unused_imports)]
                use $crate::random_programs::operators::sharded::*;
                let mut operands = operands.into_iter();
                let ($($arg,)*) = Clone::clone(&again);
                $(let $x = operands.next().expect("as many as are drawn").take::<Tensor<$rank, $kind>>();)+
                $crate::random_programs::value::Outputs::values($expr)
            }),
        })
    }};
}

use {operator, step};

/// What the expressions see where they are about burn's tensors.
mod plain {
    pub use burn::tensor::{Bool, Float, Int, Tensor, activation, grid, loss, module};
    pub use burn::{linalg, signal};

    pub use super::layers::plain::*;
    pub use super::linalg::plain::*;
    pub use super::loss::plain::*;
    pub use super::signal::plain::*;
}

/// What the expressions see where they are about DTensors.
mod sharded {
    pub use burn::tensor::{Bool, Float, Int};
    pub use burn_dtensor::dtensor::DTensor as Tensor;
    pub use burn_dtensor::dtensor::ops::{activation, grid, linalg, loss, module, signal};

    pub use super::layers::sharded::*;
    pub use super::linalg::sharded::*;
    pub use super::loss::sharded::*;
    pub use super::signal::sharded::*;
}

/// A step that brings the floats `x`, of `rank` dimensions, into `range`, smoothly.
pub fn squeeze(_: &mut Draft, x: Id, rank: usize, range: Range<f64>) -> Option<Step> {
    fn of<const D: usize>(x: Id, low: f64, width: f64) -> Option<Step> {
        step!((x: Float<D>) [low, width] => activation::sigmoid(x).mul_scalar(width).add_scalar(low))
    }
    // Well inside, whatever rounds.
    let (low, width) = (
        range.start + 0.01 * (range.end - range.start),
        0.98 * (range.end - range.start),
    );
    let mut step = by_rank!(rank, of::<D>(x, low, width))?;
    step.operator = "sigmoid";
    Some(step)
}
