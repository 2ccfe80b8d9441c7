//! Operators, a layer, a backend and a transport that burn-dtensor does not have, written with its
//! public items alone.

pub mod naive;
#[cfg(unix)]
pub mod socket;

use burn::module::{Module, Param};
use burn::tensor::{Tensor, activation};
use burn_dtensor::dtensor::DTensor;
use burn_dtensor::dtensor::ops::partial_rules::NO_PARTIAL;
use burn_dtensor::dtensor::ops::{EinsumRule, TableRule, apply, module, strategy};
use burn_dtensor::nn::apply_style;
use burn_dtensor::parallel::{LayerParam, Style};
use burn_dtensor::placement::PartialOp;
use burn_dtensor::placement::Placement::{Partial, Replicate, Shard};

/// `x * sigmoid(1.702 x)`, on whatever a trait says is a tensor here.
pub trait QuickGelu {
    fn quick_gelu(self) -> Self;
}

impl<const D: usize> QuickGelu for Tensor<D> {
    fn quick_gelu(self) -> Self {
        self.clone() * activation::sigmoid(self * 1.702)
    }
}

impl<const D: usize> QuickGelu for DTensor<D> {
    fn quick_gelu(self) -> Self {
        apply(
            &EinsumRule::pointwise("quick_gelu", NO_PARTIAL),
            self,
            |x, _| x.quick_gelu(),
        )
    }
}

/// The sums of each row of a matrix, and of its squares: `[rows, columns] -> [rows, 1], [rows, 1]`.
pub trait Moments: Sized {
    fn moments(self) -> (Self, Self);
}

impl Moments for Tensor<2> {
    fn moments(self) -> (Self, Self) {
        (self.clone().sum_dim(1), self.square().sum_dim(1))
    }
}

impl Moments for DTensor<2> {
    fn moments(self) -> (Self, Self) {
        const MOMENTS: EinsumRule = EinsumRule::new("moments", "rc -> r1, r1");
        apply(&MOMENTS, self, |x, _| x.moments())
    }
}

/// Pairs of rows of a matrix, each summed: `[rows, columns] -> [rows / 2, columns]`.
pub trait PairSums: Sized {
    fn pair_sums(self) -> Self;
}

impl PairSums for Tensor<2> {
    fn pair_sums(self) -> Self {
        let [rows, columns] = self.dims();
        self.reshape([rows / 2, 2, columns])
            .sum_dim(1)
            .reshape([rows / 2, columns])
    }
}

impl PairSums for DTensor<2> {
    fn pair_sums(self) -> Self {
        /// A rule by its rows: where ranks hold whole pairs, columns are independent, and a sum of
        /// terms is one.
        const PAIR_SUMS: TableRule = TableRule::new(
            "pair_sums",
            |inputs| Ok(vec![[inputs[0][0] / 2, inputs[0][1]].into()]),
            |inputs, _| {
                let mut rows = vec![
                    strategy([Shard(1)], [Shard(1)]),
                    strategy([Partial(PartialOp::Sum)], [Partial(PartialOp::Sum)]),
                ];
                // Of four rows two ranks hold whole pairs; more ranks, or other numbers of rows, do
                // not.
                if inputs[0][0] == 4 {
                    rows.push(strategy([Shard(0)], [Shard(0)]).if_divides(2));
                }
                rows
            },
        );
        apply(&PAIR_SUMS, self, |x, _| x.pair_sums())
    }
}

/// `x @ weightᵀ`, of a weight `[d_out, d_in]`, as PyTorch stores it.
#[derive(Module, Debug)]
pub struct Projection {
    pub weight: Param<Tensor<2>>,
}

/// Splits the output features of a [`Projection`], which is no layer that `Style::colwise` knows.
pub const COLWISE: Style =
    Style::custom("colwise", |param| features(param, 0)).with_input(Replicate);

/// Splits the input features.
pub const ROWWISE: Style =
    Style::custom("rowwise", |param| features(param, 1)).with_output(Replicate);

fn features(param: LayerParam<'_>, dim: usize) -> Option<burn_dtensor::placement::Placement> {
    ((param.layer, param.name, param.shape.len()) == ("Projection", "weight", 2))
        .then_some(Shard(dim))
}

impl Projection {
    /// Of `[batch, d_in]`.
    pub fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        x.matmul(self.weight.val().transpose())
    }

    /// [`forward`](Self::forward), brought where the weight's style says.
    pub fn forward_dtensor(&self, x: DTensor<2>) -> DTensor<2> {
        apply_style(&self.weight, x, |x, weight| {
            module::linear(x, weight.transpose(), None)
        })
    }
}
