//! Einstein summation.
//!
//! | letter | operands | output |
//! |---|---|---|
//! | in the output | with it: `S` of its dimension, broadcast `R`; others: `R` | `S` of its dimension |
//! | summed over | with it: `S` of its dimension; others: `R` | `P(sum)` |
//! | linear | one `P(sum)` or `P(avg)`, the others `R` | the same |
//!
//! A letter that one operand repeats is a diagonal, and stays whole.

mod contract;

use burn::backend::DispatchTensor;
use burn::tensor::{Shape, Tensor, kind};
use burn_einsum::{ELLIPSIS, parse};
use smallvec::SmallVec;
use std::sync::Arc;

use self::contract::Factor;
use super::args::misfit;
use super::placements::{AVG, R, S, SUM};
use super::{Resolved, Rule, Strategy, empty, resolve, strategy};
use crate::Result;
use crate::dtensor::{DTensor, DTensorSpec, Kind};

/// An axis: a letter, or past [`ELLIPSIS`] a dimension of the ellipsis, counted from the right.
type Axis = u8;
type Axes = SmallVec<[Axis; 6]>;

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Einsum {
    equation: String,
}

/// The axes of operands and output.
struct Subscripts {
    inputs: Vec<Axes>,
    output: Axes,
}

impl Einsum {
    fn subscripts(&self, inputs: &[Shape]) -> Result<Subscripts, String> {
        let equation = parse(&self.equation).map_err(|error| error.to_string())?;
        if equation.inputs().len() != inputs.len() {
            return Err(format!("`{}` is of {} operands", self.equation, equation.inputs().len()));
        }
        let mut widest = 0;
        let mut axes = Vec::with_capacity(inputs.len());
        for (labels, shape) in equation.inputs().iter().zip(inputs) {
            let letters = labels.iter().filter(|&&label| label != ELLIPSIS).count();
            // burn's scalars have shape [1].
            let dims = if labels.is_empty() && shape[..] == [1] { 0 } else { shape.num_dims() };
            let dots = dims.checked_sub(letters).filter(|&dots| dots == 0 || labels.contains(&ELLIPSIS));
            let Some(dots) = dots else {
                return Err(format!("an operand of {dims} dimensions has a subscript of {letters} letters"));
            };
            widest = widest.max(dots);
            axes.push(spelled(labels, dots));
        }
        Ok(Subscripts { inputs: axes, output: spelled(equation.output(), widest) })
    }
}

/// `labels` with the ellipsis spelled out as `dots` axes.
fn spelled(labels: &[u8], dots: usize) -> Axes {
    let mut axes = Axes::new();
    for &label in labels {
        if label == ELLIPSIS {
            axes.extend((0..dots).rev().map(|dot| ELLIPSIS + 1 + dot as u8));
        } else {
            axes.push(label);
        }
    }
    axes
}

impl Subscripts {
    /// Length of `axis`, unless operands disagree on it.
    fn len(&self, axis: Axis, shapes: &[Shape]) -> Option<usize> {
        let mut len = 1;
        for (axes, shape) in self.inputs.iter().zip(shapes) {
            let mut own = axes.iter().zip(shape.iter()).filter(|&(&other, _)| other == axis).map(|(_, &own)| own);
            let Some(first) = own.next() else { continue };
            if own.any(|other| other != first) || (len != 1 && first != 1 && first != len) {
                return None;
            }
            len = if first == 1 { len } else { first };
        }
        Some(len)
    }

    /// Every axis once.
    fn all(&self) -> Axes {
        let mut all: Axes = self.inputs.iter().flatten().copied().collect();
        all.sort_unstable();
        all.dedup();
        all
    }
}

impl Rule for Einsum {
    fn name(&self) -> &'static str {
        "einsum"
    }

    fn outputs(&self, inputs: &[Shape]) -> Result<Vec<Shape>> {
        let subscripts = self.subscripts(inputs).map_err(|why| misfit(self.name(), inputs, why))?;
        if subscripts.all().iter().any(|&axis| subscripts.len(axis, inputs).is_none()) {
            let why = format!("dimensions that share a letter of `{}` must have one length, or 1", self.equation);
            return Err(misfit(self.name(), inputs, why));
        }
        let mut output: Vec<_> = subscripts.output.iter().filter_map(|&axis| subscripts.len(axis, inputs)).collect();
        if output.is_empty() {
            output.push(1);
        }
        Ok(vec![Shape::from(output)])
    }

    fn strategies(&self, inputs: &[Shape], _: &[Shape]) -> Vec<Strategy> {
        let Ok(subscripts) = self.subscripts(inputs) else { return Vec::new() };
        let row = |&axis: &Axis| {
            let len = subscripts.len(axis, inputs)?;
            let mut row = Vec::with_capacity(inputs.len());
            for (axes, shape) in subscripts.inputs.iter().zip(inputs) {
                let mut own = (0..axes.len()).filter(|&dim| axes[dim] == axis);
                let cut = own.next().filter(|&dim| shape[dim] == len);
                if own.next().is_some() {
                    return None;
                }
                row.push(cut.map_or(R, S));
            }
            let place = subscripts.output.iter().position(|&other| other == axis);
            Some(strategy(row, [place.map_or(SUM, S)]))
        };
        let mut rows: Vec<_> = subscripts.all().iter().filter_map(row).collect();
        for at in 0..inputs.len() {
            let only = |partial| (0..inputs.len()).map(move |other| if other == at { partial } else { R });
            rows.extend([SUM, AVG].map(|partial| strategy(only(partial), [partial])));
        }
        rows
    }
}

/// An operand of [`DTensor::einsum`], of any rank: `tensor.into()`.
#[derive(Debug)]
pub struct EinsumOperand<K: Kind + kind::Numeric + 'static>(Box<dyn Operand<K>>);

impl<const D: usize, K: Kind + kind::Numeric + 'static> From<DTensor<D, K>> for EinsumOperand<K> {
    fn from(tensor: DTensor<D, K>) -> Self {
        Self(Box::new(tensor))
    }
}

/// A DTensor whose rank is forgotten.
trait Operand<K: Kind + kind::Numeric>: std::fmt::Debug {
    fn spec(&self) -> &Arc<DTensorSpec>;
    /// The local operand.
    fn enter(self: Box<Self>, op: &Resolved, at: usize) -> DispatchTensor;
    /// Zero, in its place in the graph.
    fn nothing(self: Box<Self>, op: &Resolved, at: usize) -> Tensor<1, K>;
}

impl<const D: usize, K: Kind + kind::Numeric + 'static> Operand<K> for DTensor<D, K> {
    fn spec(&self) -> &Arc<DTensorSpec> {
        &self.spec
    }

    fn enter(self: Box<Self>, op: &Resolved, at: usize) -> DispatchTensor {
        DTensor::enter(*self, op, at).into_dispatch()
    }

    fn nothing(self: Box<Self>, op: &Resolved, at: usize) -> Tensor<1, K> {
        empty::nothing(DTensor::enter(*self, op, at))
    }
}

impl<const D: usize, K: Kind + kind::Numeric + 'static> DTensor<D, K> {
    /// Einstein summation, as burn's [`einsum`](burn::tensor::Tensor::einsum): explicit
    /// (`"ij,jk->ik"`) and implicit (`"ij,jk"`) outputs, any number of operands, diagonals,
    /// ellipses and broadcasting.
    ///
    /// # Collective
    /// If the rule has to redistribute: every rank of the mesh, in forward and in backward.
    ///
    /// # Panics
    /// Unwinds with a typed [`Error`](crate::Error) for an invalid equation or operands that do
    /// not fit it; if there are none; if the output does not have `D` dimensions.
    #[must_use]
    pub fn einsum(equation: &str, operands: impl IntoIterator<Item = EinsumOperand<K>>) -> Self {
        let rule = Einsum { equation: equation.into() };
        let operands: Vec<_> = operands.into_iter().map(|operand| operand.0).collect();
        if operands.is_empty() {
            misfit(rule.name(), &[], "there is no operand; give at least one").unwind()
        }
        let specs: SmallVec<[_; 3]> = operands.iter().map(|operand| operand.spec()).collect();
        let op = resolve(&rule, &specs).unwrap_or_else(|error| error.unwind());
        drop(specs);
        let shape = op.output_shape(0);
        if shape.num_dims() != D {
            let shapes: Vec<Shape> = (0..operands.len()).map(|at| op.input(at).shape().clone()).collect();
            let why = format!("the output of `{equation}` has {} dimensions, {D} are asked for", shape.num_dims());
            misfit(rule.name(), &shapes, why).unwind()
        }
        let has_empty = (0..operands.len()).any(|at| op.input(at).local_shape().num_elements() == 0);
        let operands = operands.into_iter().enumerate();
        if has_empty {
            let sum = operands.map(|(at, operand)| operand.nothing(&op, at)).reduce(|a, b| a + b).expect("an operand");
            return op.leave(0, empty::spread(sum, shape.clone()));
        }
        let shapes: Vec<Shape> = (0..operands.len()).map(|at| op.input(at).shape().clone()).collect();
        let subscripts = rule.subscripts(&shapes).expect("the rule has read them");
        let mut factors = operands.map(|(at, operand)| {
            let axes = &subscripts.inputs[at];
            let repeats = |dim| shapes[at][dim] == 1 && subscripts.len(axes[dim], &shapes) != Some(1);
            Factor::new(operand.enter(&op, at), axes, repeats)
        });
        let first = factors.next().expect("there is an operand");
        let product = factors.enumerate().fold(first, |product, (at, factor)| {
            let to_come = &subscripts.inputs[at + 2..];
            product.contract(factor, |axis| {
                subscripts.output.contains(&axis) || to_come.iter().any(|axes| axes.contains(&axis))
            })
        });
        op.leave(0, Tensor::from_dispatch(product.finish(&subscripts.output)))
    }
}
