//! Views: the same elements in the same order, in another shape.
//!
//! The dimensions of input and output are divided into the smallest groups of adjacent dimensions
//! with equally many elements.
//!
//! ```text
//! [2, 3, 4, 1, 8] -> [6, 4, 2, 4]      2 3 | 4 | 1 8         ignoring lengths of 1:
//!                                       6  | 4 | 2 4         flatten, same, split
//! ```
//!
//! | | input | output |
//! |---|---|---|
//! | same | `S(i)` | `S(o)` |
//! | flatten, split | `S(first)` | `S(first)`, if the number of shards divides both lengths |
//! | | `P(op)` | `P(op)` |

use std::iter::repeat_n;
use std::ops::Range;

use burn::tensor::{AsIndex, ReshapeArgs, Shape};
use smallvec::SmallVec;

use super::args::{converted, dim_of, operand_error};
use super::partial_rules::MOVED;
use super::placements::S;
use super::{ShardingRule, Strategy, apply, strategy};
use crate::Result;
use crate::dtensor::local::reshape;
use crate::dtensor::{DTensor, Kind};

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct ViewRule {
    name: &'static str,
    shape: Shape,
}

impl ShardingRule for ViewRule {
    fn name(&self) -> &'static str {
        self.name
    }

    fn outputs(&self, inputs: &[Shape]) -> Result<Vec<Shape>> {
        if inputs[0].num_elements() != self.shape.num_elements() {
            let why = format!("{} has a different number of elements", self.shape);
            return Err(operand_error(self.name, inputs, why));
        }
        Ok(vec![self.shape.clone()])
    }

    fn supports_empty_shards(&self) -> bool {
        true
    }

    fn strategies(&self, inputs: &[Shape], outputs: &[Shape]) -> Vec<Strategy> {
        let from = &inputs[0];
        let to = &outputs[0];
        let row = |(i, o): (usize, usize), full: bool| {
            let row = strategy([S(i)], [S(o)]);
            if full {
                row
            } else {
                row.if_divides(gcd(from[i], to[o]))
            }
        };
        let sharded = groups(from, to).into_iter().filter_map(|(left, right)| {
            let mut left = significant(from, left);
            let mut right = significant(to, right);
            let first = (left.next()?, right.next()?);
            Some(row(first, left.next().is_none() && right.next().is_none()))
        });
        sharded.chain(MOVED.rows(1, 1)).collect()
    }
}

/// Returns the smallest groups of adjacent dimensions of `from` and `to` with equally many
/// elements. A tensor without elements has none.
fn groups(from: &[usize], to: &[usize]) -> Vec<(Range<usize>, Range<usize>)> {
    let mut groups = Vec::new();
    if from.contains(&0) {
        return groups;
    }
    let mut i = 0;
    let mut o = 0;
    while i < from.len() && o < to.len() {
        let start_i = i;
        let start_o = o;
        let mut left = from[i];
        let mut right = to[o];
        (i, o) = (i + 1, o + 1);
        while left != right {
            if left < right {
                left *= from[i];
                i += 1;
            } else {
                right *= to[o];
                o += 1;
            }
        }
        groups.push((start_i..i, start_o..o));
    }
    groups
}

/// Returns the dimensions of a group that are longer than 1, or the first one if none is.
fn significant(shape: &[usize], group: Range<usize>) -> impl Iterator<Item = usize> {
    let all_ones = group.clone().all(|dim| shape[dim] == 1);
    let first = group.start;
    group.filter(move |&dim| {
        if all_ones {
            dim == first
        } else {
            shape[dim] > 1
        }
    })
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[track_caller]
fn view<const D: usize, const O: usize, K: Kind>(
    name: &'static str,
    x: DTensor<D, K>,
    shape: Shape,
) -> DTensor<O, K> {
    if shape.num_dims() != O {
        let why = format!(
            "the result {shape} has {} dimensions, but {O} were requested",
            shape.num_dims()
        );
        operand_error(name, &[x.shape()], why).unwind();
    }
    apply(&ViewRule { name, shape }, x, |x, op| {
        reshape(x, op.output_shape(0).clone())
    })
}

impl<const D: usize, K: Kind> DTensor<D, K> {
    /// Reshapes the tensor, as burn's [`reshape`](burn::tensor::Tensor::reshape). A length of -1 is
    /// inferred from the number of elements; 0 keeps the input's length.
    #[must_use]
    #[track_caller]
    pub fn reshape<const D2: usize, S: ReshapeArgs<D2>>(self, shape: S) -> DTensor<D2, K> {
        let own = self.shape();
        let why = || {
            let len = own.num_elements();
            format!(
                "the requested lengths do not fit its {len} elements. Pass lengths whose product is {len}: at most one \
                 -1, which is inferred, and 0 only for one of the {D} dimensions of the input"
            )
        };
        let shape = converted("reshape", &own, || shape.into_shape::<D>(own.clone()), why);
        view("reshape", self, shape)
    }

    /// Flattens dimensions `start_dim..=end_dim` into one, as burn's
    /// [`flatten`](burn::tensor::Tensor::flatten).
    #[must_use]
    #[track_caller]
    pub fn flatten<const D2: usize>(
        self,
        start_dim: impl AsIndex,
        end_dim: impl AsIndex,
    ) -> DTensor<D2, K> {
        let start = dim_of("flatten", start_dim, D);
        let end = dim_of("flatten", end_dim, D);
        if start > end {
            let why = format!("start dimension {start} is after end dimension {end}");
            operand_error("flatten", &[self.shape()], why).unwind();
        }
        let shape = self.shape().flatten_dims(start, end);
        view("flatten", self, shape)
    }

    /// Removes all dimensions of length 1, as burn's [`squeeze`](burn::tensor::Tensor::squeeze).
    #[must_use]
    #[track_caller]
    pub fn squeeze<const D2: usize>(self) -> DTensor<D2, K> {
        let shape = self.dims().into_iter().filter(|&len| len != 1).collect();
        view("squeeze", self, shape)
    }

    /// Removes dimension `dim`, which has length 1, as burn's
    /// [`squeeze_dim`](burn::tensor::Tensor::squeeze_dim).
    #[must_use]
    #[track_caller]
    pub fn squeeze_dim<const D2: usize>(self, dim: impl AsIndex) -> DTensor<D2, K> {
        self.without("squeeze_dim", &[dim_of("squeeze_dim", dim, D)])
    }

    /// Removes the dimensions `dims`, which have length 1, as burn's
    /// [`squeeze_dims`](burn::tensor::Tensor::squeeze_dims). If `dims` is empty, it removes all
    /// dimensions of length 1.
    #[must_use]
    #[track_caller]
    pub fn squeeze_dims<const D2: usize>(self, dims: &[impl AsIndex]) -> DTensor<D2, K> {
        if dims.is_empty() {
            return self.squeeze();
        }
        let dims: SmallVec<[usize; 4]> = dims
            .iter()
            .map(|&dim| dim_of("squeeze_dims", dim, D))
            .collect();
        self.without("squeeze_dims", &dims)
    }

    #[track_caller]
    fn without<const D2: usize>(self, name: &'static str, dims: &[usize]) -> DTensor<D2, K> {
        let lens = self.dims();
        if let Some(dim) = dims.iter().find(|&&dim| lens[dim] != 1) {
            let why = format!(
                "dimension {dim} has length {}. Remove only dimensions of length 1",
                lens[*dim]
            );
            operand_error(name, &[self.shape()], why).unwind();
        }
        let kept = lens
            .into_iter()
            .enumerate()
            .filter(|(dim, _)| !dims.contains(dim));
        let shape = kept.map(|(_, len)| len).collect();
        view(name, self, shape)
    }

    /// Inserts leading dimensions of length 1 up to `D2` dimensions, as burn's
    /// [`unsqueeze`](burn::tensor::Tensor::unsqueeze).
    #[must_use]
    #[track_caller]
    pub fn unsqueeze<const D2: usize>(self) -> DTensor<D2, K> {
        let shape = repeat_n(1, D2.saturating_sub(D))
            .chain(self.dims())
            .collect();
        view("unsqueeze", self, shape)
    }

    /// Inserts a dimension of length 1 at `dim`, as burn's
    /// [`unsqueeze_dim`](burn::tensor::Tensor::unsqueeze_dim).
    #[must_use]
    #[track_caller]
    pub fn unsqueeze_dim<const D2: usize>(self, dim: impl AsIndex) -> DTensor<D2, K> {
        let mut shape = self.shape();
        shape.insert(dim_of("unsqueeze_dim", dim, D + 1), 1);
        view("unsqueeze_dim", self, shape)
    }

    /// Inserts dimensions of length 1 at the positions `axes` of the result, as burn's
    /// [`unsqueeze_dims`](burn::tensor::Tensor::unsqueeze_dims).
    #[must_use]
    #[track_caller]
    pub fn unsqueeze_dims<const D2: usize>(self, axes: &[impl AsIndex]) -> DTensor<D2, K> {
        let places = places("unsqueeze_dims", axes, D2);
        let mut shape = self.shape();
        for place in places {
            shape.insert(place.min(shape.num_dims()), 1);
        }
        view("unsqueeze_dims", self, shape)
    }
}

/// Returns the positions at which burn inserts dimensions of length 1, in ascending order. Each
/// further negative axis counts from one position before the end, and each of several equal axes
/// moves to the next position.
fn places(name: &'static str, axes: &[impl AsIndex], dims: usize) -> SmallVec<[usize; 4]> {
    let mut end = dims;
    let place = |&axis: &_| {
        let at = dim_of(name, axis, dims);
        if AsIndex::as_index(axis) >= 0 {
            return at;
        }
        end -= 1;
        (at + end + 1).saturating_sub(dims)
    };
    let mut places: SmallVec<[usize; 4]> = axes.iter().map(place).collect();
    places.sort_unstable();
    for at in 1..places.len() {
        places[at] = places[at].max(places[at - 1] + 1);
    }
    places
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtensor::ops::placements::SUM;

    #[test]
    fn groups_are_the_smallest() {
        for (from, to, expected) in [
            (&[6, 4][..], &[24][..], vec![(0..2, 0..1)]),
            (&[24], &[6, 4], vec![(0..1, 0..2)]),
            (
                &[2, 3, 4, 1, 8],
                &[6, 4, 2, 4],
                vec![(0..2, 0..1), (2..3, 1..2), (3..5, 2..4)],
            ),
            (&[4, 6], &[6, 4], vec![(0..2, 0..2)]),
            (&[5, 7], &[5, 7], vec![(0..1, 0..1), (1..2, 1..2)]),
            (&[5, 7], &[1, 5, 1, 7], vec![(0..1, 0..2), (1..2, 2..4)]),
            (&[1, 1], &[1], vec![(0..1, 0..1)]),
            (&[0, 3], &[0], vec![]),
        ] {
            assert_eq!(groups(from, to), expected, "{from:?} -> {to:?}");
        }
    }

    #[test]
    fn only_the_leftmost_member_keeps_a_shard() {
        let rows = |from: &[usize], to: &[usize]| {
            let (from, to) = (Shape::from(from.to_vec()), Shape::from(to.to_vec()));
            let rule = ViewRule {
                name: "reshape",
                shape: to.clone(),
            };
            rule.strategies(&[from], &[to])
                .into_iter()
                .take_while(|row| row.inputs[0] != SUM)
                .collect::<Vec<_>>()
        };
        assert_eq!(
            rows(&[6, 4], &[24]),
            [strategy([S(0)], [S(0)]).if_divides(6)]
        );
        assert_eq!(
            rows(&[24], &[6, 4]),
            [strategy([S(0)], [S(0)]).if_divides(6)]
        );
        assert_eq!(
            rows(&[4, 6], &[6, 4]),
            [strategy([S(0)], [S(0)]).if_divides(2)]
        );
        assert_eq!(
            rows(&[5, 1, 7], &[1, 5, 7]),
            [strategy([S(0)], [S(1)]), strategy([S(2)], [S(2)])]
        );
        assert_eq!(
            rows(&[2, 1, 4], &[8]),
            [strategy([S(0)], [S(0)]).if_divides(2)]
        );
    }

    #[test]
    fn places_are_burns() {
        assert_eq!(
            places("unsqueeze_dims", &[0, -1, -1], 6).to_vec(),
            [0, 4, 5]
        );
        assert_eq!(places("unsqueeze_dims", &[0, 0, 3], 6).to_vec(), [0, 1, 3]);
        assert_eq!(places("unsqueeze_dims", &[-1], 3).to_vec(), [2]);
    }
}
