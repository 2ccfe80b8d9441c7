//! Einstein summation.
//!
//! The [rule](super::EinsumRule) of an einsum is its equation, linear in every operand.
//!
//! A letter that one operand repeats is a diagonal, and is not sharded.

mod contract;

use burn::backend::DispatchTensor;
use burn::tensor::{Shape, Tensor, kind};
use burn_einsum::{ELLIPSIS, parse};
use smallvec::SmallVec;

use self::contract::ContractionOperand;
use super::args::operand_error;
use super::placements::SUM;
use super::subscripts::{Axis, DOTS, Dim, SubscriptDims, Subscripts};
use super::{Arg, Operator, ShardingRule, Strategy, empty};
use crate::Result;
use crate::dtensor::{DTensor, Kind};
use crate::error::OrUnwind;

type Axes = SmallVec<[Axis; 6]>;

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Einsum {
    equation: String,
}

impl Einsum {
    fn subscripts(&self, inputs: &[Shape]) -> Result<Subscripts, String> {
        let equation = parse(&self.equation).map_err(|error| error.to_string())?;
        if equation.inputs().len() != inputs.len() {
            return Err(format!(
                "`{}` takes {} operands",
                self.equation,
                equation.inputs().len()
            ));
        }
        let mut widest = 0;
        let mut dims = SmallVec::new();
        for (labels, shape) in equation.inputs().iter().zip(inputs) {
            let letters = labels.iter().filter(|&&label| label != ELLIPSIS).count();
            // burn's scalars have shape [1].
            let rank = if labels.is_empty() && shape[..] == [1] {
                0
            } else {
                shape.num_dims()
            };
            let dots = rank
                .checked_sub(letters)
                .filter(|&dots| dots == 0 || labels.contains(&ELLIPSIS));
            let Some(dots) = dots else {
                return Err(format!(
                    "an operand of {rank} dimensions has a subscript of {letters} letters"
                ));
            };
            widest = widest.max(dots);
            dims.push(spelled(labels, dots));
        }
        let output = spelled(equation.output(), widest);
        Ok(Subscripts {
            inputs: dims,
            outputs: SmallVec::from_elem(output, 1),
            added: SmallVec::new(),
        })
    }
}

/// Returns the dimensions of `labels`, in which the ellipsis stands for `dots` axes.
fn spelled(labels: &[u8], dots: usize) -> SubscriptDims {
    let mut dims = SubscriptDims::new();
    // Unlike in a rule, capital letters can be sharded. Labels number the capital letters first,
    // then the small ones.
    let axis = |name, index| Dim::Axis {
        axis: Axis { name, index },
        repeats: true,
    };
    for &label in labels {
        if label == ELLIPSIS {
            dims.extend((0..dots).rev().map(|dot| axis(DOTS, dot)));
        } else {
            dims.push(axis((b'a' + label % 26) as char, usize::from(label < 26)));
        }
    }
    dims
}

fn axes(dims: &SubscriptDims) -> Axes {
    dims.iter().filter_map(|dim| dim.axis()).collect()
}

impl ShardingRule for Einsum {
    fn name(&self) -> &'static str {
        "einsum"
    }

    fn outputs(&self, inputs: &[Shape]) -> Result<Vec<Shape>> {
        let shape = self
            .subscripts(inputs)
            .and_then(|subscripts| subscripts.shapes(inputs, &[]))
            .map_err(|why| {
                operand_error(
                    self.name(),
                    inputs,
                    format!("in `{}`, {why}", self.equation),
                )
            })?;
        // burn's scalars have shape [1].
        Ok(if shape[0].num_dims() == 0 {
            vec![Shape::new([1])]
        } else {
            shape
        })
    }

    fn strategies(&self, inputs: &[Shape], _: &[Shape]) -> Vec<Strategy> {
        let Ok(subscripts) = self.subscripts(inputs) else {
            return Vec::new();
        };
        let all: Vec<usize> = (0..inputs.len()).collect();
        subscripts
            .rows(inputs, SUM)
            .chain(subscripts.linear(&all))
            .collect()
    }
}

/// An operand of [`DTensor::einsum`], with any number of dimensions. Made with `tensor.into()`.
#[derive(Debug)]
pub struct EinsumOperand<K: Kind + kind::Numeric + 'static>(Box<dyn ErasedOperand<K>>);

impl<const D: usize, K: Kind + kind::Numeric + 'static> From<DTensor<D, K>> for EinsumOperand<K> {
    fn from(tensor: DTensor<D, K>) -> Self {
        Self(Box::new(tensor))
    }
}

/// A DTensor with its number of dimensions erased.
trait ErasedOperand<K: Kind + kind::Numeric>: std::fmt::Debug {
    fn arg(&self) -> Arg<'_>;
    /// Returns the local operand.
    fn local(self: Box<Self>, op: &Operator, at: usize) -> DispatchTensor;
    /// Returns zero, connected to the operand's graph.
    fn nothing(self: Box<Self>, op: &Operator, at: usize) -> Tensor<1, K>;
}

impl<const D: usize, K: Kind + kind::Numeric + 'static> ErasedOperand<K> for DTensor<D, K> {
    fn arg(&self) -> Arg<'_> {
        self.into()
    }

    fn local(self: Box<Self>, op: &Operator, at: usize) -> DispatchTensor {
        op.input(at, *self).into_dispatch()
    }

    fn nothing(self: Box<Self>, op: &Operator, at: usize) -> Tensor<1, K> {
        empty::nothing(op.input(at, *self))
    }
}

impl<const D: usize, K: Kind + kind::Numeric + 'static> DTensor<D, K> {
    /// Computes an Einstein summation, as burn's [`einsum`](burn::tensor::Tensor::einsum): explicit
    /// (`"ij,jk->ik"`) and implicit (`"ij,jk"`) outputs, any number of operands, diagonals,
    /// ellipses and broadcasting.
    ///
    /// # Collective
    /// If the rule has to redistribute: every rank of the mesh, in forward and in backward.
    ///
    /// # Panics
    /// Unwinds with a typed [`Error`](crate::Error) for an invalid equation, for operands that do
    /// not fit it, if there are no operands, and if the output does not have `D` dimensions.
    #[must_use]
    #[track_caller]
    pub fn einsum(equation: &str, operands: impl IntoIterator<Item = EinsumOperand<K>>) -> Self {
        let rule = Einsum {
            equation: equation.into(),
        };
        let operands: Vec<_> = operands.into_iter().map(|operand| operand.0).collect();
        if operands.is_empty() {
            operand_error(rule.name(), &[], "there is no operand. Pass at least one").unwind()
        }
        let op = {
            let args: SmallVec<[_; 3]> = operands.iter().map(|operand| operand.arg()).collect();
            Operator::resolve(&rule, &args).or_unwind()
        };
        let shape = op.output_shape(0);
        let shapes: Vec<Shape> = (0..operands.len())
            .map(|at| op.input_spec(at).shape().clone())
            .collect();
        if shape.num_dims() != D {
            let why = format!(
                "the output of `{equation}` has {} dimensions, but {D} were requested",
                shape.num_dims()
            );
            operand_error(rule.name(), &shapes, why).unwind()
        }
        let has_empty =
            (0..operands.len()).any(|at| op.input_spec(at).local_shape().num_elements() == 0);
        let operands = operands.into_iter().enumerate();
        if has_empty {
            let sum = operands
                .map(|(at, operand)| operand.nothing(&op, at))
                .reduce(|a, b| a + b)
                .expect("an operand");
            return op.output(0, empty::spread(sum, shape.clone()));
        }
        let subscripts = rule
            .subscripts(&shapes)
            .expect("the rule has parsed the equation for these shapes");
        let inputs: Vec<Axes> = subscripts.inputs.iter().map(axes).collect();
        let output = axes(&subscripts.outputs[0]);
        let mut factors = operands.map(|(at, operand)| {
            ContractionOperand::new(operand.local(&op, at), &inputs[at], |dim| {
                shapes[at][dim] == 1 && subscripts.len(inputs[at][dim], &shapes) != Ok(Some(1))
            })
        });
        let first = factors.next().expect("there is an operand");
        let product = factors.enumerate().fold(first, |product, (at, factor)| {
            let to_come = &inputs[at + 2..];
            product.contract(factor, |axis| {
                output.contains(&axis) || to_come.iter().any(|axes| axes.contains(&axis))
            })
        });
        op.output(0, Tensor::from_dispatch(product.finish(&output)))
    }
}
