//! Gather and scatter of slices by tuples of indices. The last dimension of the indices contains
//! tuples of `k` indices into the first `k` dimensions of the tensor.
//!
//! ```text
//! x [a, b, c], indices [i, 2]  ->  found [i, c]     found[n, :] = x[indices[n, 0], indices[n, 1], :]
//! ```
//!
//! | axis | `x` | indices | found |
//! |---|---|---|---|
//! | `a`, `b` | `S(0)`, `S(1)` | `R` | `P(sum)` |
//! | `c` | `S(2)` | `R` | `S(1)` |
//! | `i` | `R` | `S(0)` | `S(0)` |
//!
//! | axis | `x` | indices | values | updated |
//! |---|---|---|---|---|
//! | `a`, `b` | `S(0)`, `S(1)` | `R` | `R` | as `x` |
//! | `c` | `S(2)` | `R` | `S(1)` | `S(2)` |
//! | `i`, for additions | `P(sum)` | `S(0)` | `S(0)` | `P(sum)` |
//!
//! If `a` or `b` is sharded, gather is a masked [lookup](super::lookup), and scatter updates the
//! rows that each rank holds.

use std::ops::Range;

use burn::tensor::{Bool, IndexingUpdateOp, Int, Shape, Tensor};
use smallvec::SmallVec;

use super::args::operand_error;
use super::partial_rules::MOVED_BY;
use super::placements::{R, S, SUM};
use super::update::through;
use super::{Operator, ShardingRule, Strategy, apply, lookup, strategy};
use crate::Result;
use crate::dtensor::local::reshape;
use crate::dtensor::{DTensor, Kind};

/// Shapes of a tensor and of tuples of indices into it.
struct Tuples<'a> {
    x: &'a [usize],
    indices: &'a [usize],
    /// Number of dimensions that a tuple indexes.
    indexed: usize,
}

impl<'a> Tuples<'a> {
    fn new(operator: &'static str, inputs: &'a [Shape]) -> Result<Self> {
        let x = &inputs[0][..];
        let indices = &inputs[1][..];
        let (&indexed, indices) = indices.split_last().expect("a tensor has a dimension");
        if indexed == 0 || indexed > x.len() {
            let why = format!(
                "the last dimension has tuples of {indexed} indices. Use tuples of 1 to {}",
                x.len()
            );
            return Err(operand_error(operator, inputs, why));
        }
        Ok(Self {
            x,
            indices,
            indexed,
        })
    }

    /// Returns the shape of all slices that the tuples select.
    fn slices(&self) -> Shape {
        [self.indices, &self.x[self.indexed..]].concat().into()
    }

    /// Returns the dimensions of the tensor that are not indexed, each with its dimension in the
    /// slices.
    fn others(&self) -> impl Iterator<Item = (usize, usize)> {
        (self.indexed..self.x.len()).map(|dim| (dim, self.indices.len() + dim - self.indexed))
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct GatherNd;

impl ShardingRule for GatherNd {
    fn name(&self) -> &'static str {
        "gather_nd"
    }

    fn outputs(&self, inputs: &[Shape]) -> Result<Vec<Shape>> {
        Ok(vec![Tuples::new(self.name(), inputs)?.slices()])
    }

    fn strategies(&self, inputs: &[Shape], _: &[Shape]) -> Vec<Strategy> {
        let Ok(tuples) = Tuples::new(self.name(), inputs) else {
            return Vec::new();
        };
        let indexed = (0..tuples.indexed).map(|dim| strategy([S(dim), R], [SUM]));
        let others = tuples
            .others()
            .map(|(dim, slice)| strategy([S(dim), R], [S(slice)]));
        let places = (0..tuples.indices.len()).map(|dim| strategy([R, S(dim)], [S(dim)]));
        indexed
            .chain(others)
            .chain(places)
            .chain(MOVED_BY.rows(2, 1))
            .collect()
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct ScatterNd {
    update: IndexingUpdateOp,
}

impl ShardingRule for ScatterNd {
    fn name(&self) -> &'static str {
        "scatter_nd"
    }

    fn outputs(&self, inputs: &[Shape]) -> Result<Vec<Shape>> {
        let slices = Tuples::new(self.name(), inputs)?.slices();
        if inputs[2] != slices {
            return Err(operand_error(
                self.name(),
                inputs,
                format!(
                    "the values must have the shape of the slices that the indices select, {slices}"
                ),
            ));
        }
        Ok(vec![inputs[0].clone()])
    }

    fn strategies(&self, inputs: &[Shape], _: &[Shape]) -> Vec<Strategy> {
        let Ok(tuples) = Tuples::new(self.name(), inputs) else {
            return Vec::new();
        };
        let indexed = (0..tuples.indexed).map(|dim| strategy([S(dim), R, R], [S(dim)]));
        let others = tuples
            .others()
            .map(|(dim, slice)| strategy([S(dim), R, S(slice)], [S(dim)]));
        let adds = self.update == IndexingUpdateOp::Add;
        let places = (0..tuples.indices.len())
            .filter(|_| adds)
            .map(|dim| strategy([SUM, S(dim), S(dim)], [SUM]));
        indexed
            .chain(others)
            .chain(places)
            .chain(through(self.update).rows(3, 1))
            .collect()
    }
}

/// Returns the indexed dimensions that are sharded, each with this rank's interval.
fn sharded_ranges(op: &Operator, indexed: usize) -> SmallVec<[(usize, Range<usize>); 2]> {
    (0..indexed)
        .filter_map(|dim| Some((dim, lookup::part(op, 0, dim)?)))
        .collect()
}

/// Converts `indices` to indices into this rank's shard along `sharding_dims`. Indices of other
/// ranks' rows are replaced by `other` of the rank's interval, and the returned mask, `[.., 1]`,
/// marks tuples with such an index.
fn localize<const M: usize>(
    indices: Tensor<M, Int>,
    sharding_dims: &[(usize, Range<usize>)],
    op: &Operator,
    other: impl Fn(&Range<usize>) -> usize,
) -> (Tensor<M, Int>, Option<Tensor<M, Bool>>) {
    let shape = op.input_spec(0).shape();
    let indexed = indices.dims()[M - 1];
    let longest = shape[..indexed].iter().copied().max().unwrap_or(0);
    let mut columns = lookup::holding(indices, longest).split(1, M - 1);
    let mut elsewhere: Option<Tensor<M, Bool>> = None;
    for (dim, range) in sharding_dims {
        let (column, away) =
            lookup::localize(columns[*dim].clone(), range, shape[*dim], other(range));
        columns[*dim] = column;
        elsewhere = Some(match elsewhere {
            Some(elsewhere) => elsewhere.bool_or(away),
            None => away,
        });
    }
    (Tensor::cat(columns, M - 1), elsewhere)
}

/// Checks that `x` is not Bool: burn's backends have no such operators for booleans.
#[track_caller]
fn check_numbers<const D: usize, K: Kind>(operator: &'static str, x: &DTensor<D, K>) {
    if x.dtype().is_bool() {
        operand_error(
            operator,
            &[x.shape()],
            "it is for numbers only. Convert booleans with `int`",
        )
        .unwind();
    }
}

impl<const D: usize, K: Kind> DTensor<D, K> {
    /// Returns the slices at tuples of `indices`, as burn's [`gather_nd`](Tensor::gather_nd). For a
    /// tensor `[a, b, c]` and indices `[.., 2]`, the result is `[.., c]`.
    ///
    /// A tensor sharded along an indexed dimension is not moved: the result is a partial sum.
    #[must_use]
    #[track_caller]
    pub fn gather_nd<const M: usize, const DV: usize>(
        self,
        indices: DTensor<M, Int>,
    ) -> DTensor<DV, K> {
        let indexed = indices.dims()[M - 1];
        if DV + indexed + 1 != M + D {
            let why = format!(
                "with tuples of {indexed} indices, the result has {} dimensions, but {DV} were requested",
                M + D - 1 - indexed.min(D)
            );
            operand_error("gather_nd", &[self.shape(), indices.shape()], why).unwind();
        }
        check_numbers("gather_nd", &self);
        apply(&GatherNd, (self, indices), |(x, indices), op| {
            let (indices, elsewhere) = match &sharded_ranges(op, indexed)[..] {
                [] => (indices, None),
                sharding_dims => localize(indices, sharding_dims, op, |_| 0),
            };
            match elsewhere {
                Some(elsewhere) => {
                    let shape = op.output_shape(0).clone();
                    let mut places = vec![1; DV];
                    places[..M - 1].copy_from_slice(&shape[..M - 1]);
                    let elsewhere = reshape::<M, DV, _>(elsewhere, places.into()).expand(shape);
                    x.gather_nd(indices).mask_fill(elsewhere, 0)
                }
                None => x.gather_nd(indices),
            }
        })
    }

    /// Updates the slices at tuples of `indices` with `values`, as burn's
    /// [`scatter_nd`](Tensor::scatter_nd): assigns them, or combines them as `update` specifies.
    /// For a tensor `[a, b, c]` and indices `[.., 2]`, the values are `[.., c]`.
    #[must_use]
    #[track_caller]
    pub fn scatter_nd<const M: usize, const DV: usize>(
        self,
        indices: DTensor<M, Int>,
        values: DTensor<DV, K>,
        update: IndexingUpdateOp,
    ) -> Self {
        let indexed = indices.dims()[M - 1];
        if indexed > 0 && indices.shape().num_elements() == 0 {
            return self;
        }
        check_numbers("scatter_nd", &self);
        apply(
            &ScatterNd { update },
            (self, indices, values),
            |(mut x, indices, values), op| {
                let sharding_dims = sharded_ranges(op, indexed);
                if sharding_dims.is_empty() {
                    return x.scatter_nd(indices, values, update);
                }
                let (indices, _) = localize(indices, &sharding_dims, op, Range::len);
                for (dim, _) in &sharding_dims {
                    x = lookup::with_extra_row(x, *dim);
                }
                x = x.scatter_nd(indices, values, update);
                for (dim, range) in sharding_dims {
                    x = x.slice_dim(dim, 0..range.len());
                }
                x
            },
        )
    }
}
