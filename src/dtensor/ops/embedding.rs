//! Embedding. If the vocabulary is sharded, it is a masked [lookup](super::lookup).

use burn::tensor::{Int, module};

use super::partial_rules::MOVED_BY;
use super::{EinsumRule, Operand, apply, lookup};
use crate::dtensor::DTensor;
use crate::dtensor::local::reshape;

const EMBEDDING: EinsumRule =
    EinsumRule::new("embedding", "ve, bs -> bse").with_partial_rules(MOVED_BY);

/// Returns the rows of `weights` `[vocabulary, features]` at `indices` `[batch, seq]`, as burn's
/// [`embedding`](module::embedding): `[batch, seq, features]`.
///
/// Weights sharded over the vocabulary are not moved: each rank looks up the rows it holds, and the
/// result is a partial sum. Its product with an infinity may be [NaN](super#infinities-and-ties).
///
/// # Collective
/// If the rule has to redistribute: every rank of the mesh, in forward and in backward.
#[must_use]
#[track_caller]
pub fn embedding(weights: DTensor<2>, indices: impl Into<Operand<2, Int>>) -> DTensor<3> {
    apply(
        &EMBEDDING,
        (weights, indices.into()),
        |(weights, indices), op| match lookup::part(op, 0, 0) {
            Some(range) => {
                let [batch, seq] = indices.dims();
                lookup::look_up(
                    weights,
                    0,
                    indices,
                    &range,
                    op,
                    |mask| reshape(mask, [batch, seq, 1].into()),
                    module::embedding,
                )
            }
            None => module::embedding(weights, indices),
        },
    )
}
