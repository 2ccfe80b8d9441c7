//! Embedding.
//!
//! | | weights `[vocabulary, features]` | indices `[batch, seq]` | output `[batch, seq, features]` |
//! |---|---|---|---|
//! | features | `S(1)` | `R` | `S(2)` |
//! | vocabulary, masked [lookup](super::lookup) | `S(0)` | `R` | `P(sum)` |
//! | batch, sequence | `R` | `S(d)` | `S(d)` |
//! | | `P(op)` | `R` | `P(op)` |

use burn::tensor::{Int, Shape, module};

use super::placements::{R, S, SUM};
use super::rows::PARTIALS;
use super::{Rule, Strategy, binary, lookup, strategy};
use crate::Result;
use crate::dtensor::DTensor;
use crate::dtensor::local::reshape;

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Embedding;

impl Rule for Embedding {
    fn name(&self) -> &'static str {
        "embedding"
    }

    fn outputs(&self, inputs: &[Shape]) -> Result<Vec<Shape>> {
        let [weights, indices] = inputs else { unreachable!("weights and indices") };
        Ok(vec![[indices[0], indices[1], weights[1]].into()])
    }

    fn strategies(&self, _: &[Shape], _: &[Shape]) -> Vec<Strategy> {
        let mut rows = vec![
            strategy([S(1), R], [S(2)]),
            strategy([S(0), R], [SUM]),
            strategy([R, S(0)], [S(0)]),
            strategy([R, S(1)], [S(1)]),
        ];
        rows.extend(PARTIALS.iter().map(|&partial| strategy([partial, R], [partial])));
        rows
    }
}

/// The rows of `weights` `[vocabulary, features]` at `indices` `[batch, seq]`, as burn's
/// [`embedding`](module::embedding): `[batch, seq, features]`.
///
/// Weights sharded over the vocabulary are not moved: each rank looks up the rows it holds, and the
/// result is a pending sum.
///
/// # Collective
/// If the rule has to redistribute: every rank of the mesh, in forward and in backward.
#[must_use]
pub fn embedding(weights: DTensor<2>, indices: DTensor<2, Int>) -> DTensor<3> {
    binary(&Embedding, weights, indices, |weights, indices, op| match lookup::part(op, 0, 0) {
        Some(range) => {
            let [batch, seq] = indices.dims();
            let along = |mask| reshape(mask, [batch, seq, 1].into());
            lookup::look_up(weights, 0, indices, &range, op, along, module::embedding)
        }
        None => module::embedding(weights, indices),
    })
}
