//! Gather and scatter, with one index per element. Along a sharded dimension, gather is a masked
//! [lookup](super::lookup), and scatter [updates](super::update) the rows that each rank holds.

use burn::tensor::{AsIndex, IndexingUpdateOp, Int, Tensor};

use super::args::dim_of;
use super::partial_rules::MOVED_BY;
use super::update::Update;
use super::{EinsumRule, apply, lookup};
use crate::dtensor::{DTensor, Kind};

const GATHER: EinsumRule =
    EinsumRule::new("gather", "..v.., ..i.. -> ..i..").with_partial_rules(MOVED_BY);
/// Rule for booleans, which cannot be summed.
const GATHER_BOOL: EinsumRule =
    EinsumRule::new("gather", "..V.., ..i.. -> ..i..").with_partial_rules(MOVED_BY);
const SCATTER: EinsumRule = EinsumRule::new("scatter", "..v.., ..I.., ..I.. -> ..v..");

impl<const D: usize, K: Kind> DTensor<D, K> {
    /// Returns the elements at `indices` along `dim`, as burn's
    /// [`gather`](burn::tensor::Tensor::gather).
    ///
    /// A tensor sharded along `dim` is not moved: the result is a partial sum.
    #[must_use]
    #[track_caller]
    pub fn gather(self, dim: impl AsIndex, indices: DTensor<D, Int>) -> Self {
        let dim = dim_of("gather", dim, D);
        let dtype = self.dtype();
        let rule = if dtype.is_bool() {
            &GATHER_BOOL
        } else {
            &GATHER
        };
        apply(
            &rule.at([dim]),
            (self, indices),
            |(x, indices), op| match lookup::part(op, 0, dim) {
                Some(range) => lookup::look_up(
                    x,
                    dim,
                    indices,
                    &range,
                    op,
                    |mask| mask,
                    |x, indices| x.gather(dim, indices),
                ),
                None => lookup::of_type(x.gather(dim, indices), dtype),
            },
        )
    }

    /// Updates the elements at `indices` along `dim` with `values`, as burn's
    /// [`scatter`](burn::tensor::Tensor::scatter): assigns them, or combines them as `update`
    /// specifies.
    #[must_use]
    #[track_caller]
    pub fn scatter(
        self,
        dim: impl AsIndex,
        indices: DTensor<D, Int>,
        values: Self,
        update: IndexingUpdateOp,
    ) -> Self {
        let dim = dim_of("scatter", dim, D);
        let rule = Update {
            axes: SCATTER.at([dim]),
            update,
            dims: [dim, dim],
        };
        apply(
            &rule,
            (self, indices, values),
            |(x, indices, values), op| {
                let local = |x: Tensor<D, K>, indices| x.scatter(dim, indices, values, update);
                match lookup::part(op, 0, dim) {
                    Some(range) => lookup::update(x, dim, indices, &range, op, local),
                    None => local(x, indices),
                }
            },
        )
    }
}
