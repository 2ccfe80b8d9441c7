//! The linear transformation `x @ weight + bias`.
//!
//! | | `x` `[.., d_in]` | `weight` `[d_in, d_out]` | `bias` `[d_out]` | output |
//! |---|---|---|---|---|
//! | columns | `R` | `S(1)` | `S(0)` | `S(last)` |
//! | contraction | `S(last)` | `S(0)` | `P(sum)` | `P(sum)` |
//! | leading | `S(d)` | `R` | `R` | `S(d)` |
//! | linear | `P(sum)`, `P(avg)` | `R` | `P(sum)`; `R`, `P(avg)` | that of `x` |
//! | linear | `R` | `P(sum)`, `P(avg)` | `P(sum)`; `R`, `P(avg)` | that of `weight` |
//!
//! Where the product is a sum over ranks, a bias that all of them hold becomes a term of it: the
//! first rank's. That costs nothing, in forward or in backward, and the sum need not be made to
//! add a bias.

use burn::tensor::Shape;

use super::args::misfit;
use super::placements::{AVG, R, S, SUM};
use super::{RedistributePolicy, Resolved, Rule, Strategy, binary, product, resolve, strategy, ternary};
use crate::Result;
use crate::dtensor::{DTensor, DTensorError};
use crate::placement::Placement;

/// How a product goes through the pending reductions of either factor, with a bias that joins it
/// as a term: `x`, `weight`, `bias`, output.
pub(super) const BILINEAR: [[Placement; 4]; 6] = [
    [SUM, R, SUM, SUM],
    [AVG, R, R, AVG],
    [AVG, R, AVG, AVG],
    [R, SUM, SUM, SUM],
    [R, AVG, R, AVG],
    [R, AVG, AVG, AVG],
];

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Linear {
    /// Where `x` is brought to, whatever is cheapest.
    input: Option<Placement>,
}

impl Rule for Linear {
    fn name(&self) -> &'static str {
        "linear"
    }

    fn outputs(&self, inputs: &[Shape]) -> Result<Vec<Shape>> {
        let (x, weight) = (&inputs[0], &inputs[1]);
        let last = x.num_dims() - 1;
        let why = if x[last] != weight[0] {
            "the last dimension of the input must be as long as the first of the weight `[d_in, d_out]`"
        } else if inputs.get(2).is_some_and(|bias| bias[0] != weight[1]) {
            "the bias must be as long as the second dimension of the weight `[d_in, d_out]`"
        } else if self.input.and_then(|placement| placement.shard_dim()).is_some_and(|dim| dim > last) {
            "the style wants the input sharded along a dimension it does not have"
        } else {
            let mut output = x.clone();
            output[last] = weight[1];
            return Ok(vec![output]);
        };
        Err(misfit(self.name(), inputs, why))
    }

    fn strategies(&self, inputs: &[Shape], _: &[Shape]) -> Vec<Strategy> {
        let last = inputs[0].num_dims() - 1;
        let mut table = vec![[R, S(1), S(0), S(last)], [S(last), S(0), SUM, SUM]];
        table.extend((0..last).map(|dim| [S(dim), R, R, S(dim)]));
        table.extend(BILINEAR);
        // Without a bias two of the rows are the same, which is no harm.
        table.iter().map(|row| strategy(row[..inputs.len()].iter().copied(), [row[3]])).collect()
    }

    fn pinned(&self, input: usize) -> Option<Placement> {
        self.input.filter(|_| input == 0)
    }
}

/// `x @ weight + bias`, as burn's [`linear`](burn::tensor::module::linear): of an input
/// `[.., d_in]`, a weight `[d_in, d_out]` and a bias `[d_out]`.
///
/// # Collective
/// If the rule has to redistribute: every rank of the mesh, in forward and in backward.
///
/// # Panics
/// Unwinds with a typed [`Error`](crate::Error) if the shapes do not fit.
#[must_use]
pub fn linear<const D: usize>(x: DTensor<D>, weight: DTensor<2>, bias: Option<DTensor<1>>) -> DTensor<D> {
    linear_with_input(x, weight, bias, None)
}

/// [`linear`], with `x` brought to the placement `input` on every mesh dimension even where
/// another row of the table is cheaper: what a tensor-parallel style asks for. To `R` instead of a
/// shard that would leave a rank without elements.
///
/// Clones of `x` share what it is brought to: three projections of one sequence-sharded
/// activation, gathered to `R`, cost one all-gather, and one reduce-scatter in backward.
///
/// # Collective
/// As [`linear`].
///
/// # Panics
/// As [`linear`].
#[must_use]
pub fn linear_with_input<const D: usize>(
    x: DTensor<D>,
    weight: DTensor<2>,
    bias: Option<DTensor<1>>,
    input: Option<Placement>,
) -> DTensor<D> {
    let rule = Linear { input: input.map(|placement| x.spec.with_elements(placement)) };
    let Some(bias) = bias else {
        return binary(&rule, x, weight, |x, weight, _| product::linear(x, weight, None));
    };
    let product = resolve(&rule, &[&x.spec, &weight.spec]).unwrap_or_else(|error| error.unwind());
    let bias = as_term(rule.name(), bias, &product).unwrap_or_else(|error| error.unwind());
    ternary(&rule, x, weight, bias, |x, weight, bias, _| product::linear(x, weight, Some(bias)))
}

/// `bias`, the third input of `operator`, as a term of the sums that `product` leaves.
///
/// # Collective
/// If the bias is itself a pending reduction of another kind: every rank of the mesh.
///
/// # Errors
/// [`DTensorError::ImplicitRedistribution`] of such a bias under [`RedistributePolicy::Deny`].
pub(super) fn as_term(operator: &'static str, bias: DTensor<1>, product: &Resolved) -> Result<DTensor<1>> {
    let product = product.output(0).placements();
    if !product.contains(&SUM) {
        return Ok(bias);
    }
    // Only what is whole or cut becomes a term.
    let reduced = bias.layout().replaced(|_, own| if own.partial_op().is_some() && own != SUM { R } else { own })?;
    if *bias.layout() != reduced && RedistributePolicy::current() == RedistributePolicy::Deny {
        return Err(DTensorError::implicit(operator, 2, bias.layout(), &reduced).into());
    }
    let terms = reduced.replaced(|dim, own| if product[dim] == SUM { SUM } else { own })?;
    bias.redistribute_to(&reduced)?.redistribute_to(&terms)
}
