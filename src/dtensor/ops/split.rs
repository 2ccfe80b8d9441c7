//! Splits: one tensor into pieces along a dimension, moved once for all of them.
//!
//! | | input | every output |
//! |---|---|---|
//! | another dimension | `S(d)` | `S(d)` |
//! | | `P(op)` | `P(op)` |

use burn::tensor::{AsIndex, Shape};
use smallvec::{SmallVec, smallvec};

use super::args::{dim_of, misfit};
use super::empty::{blank, is_empty};
use super::placements::S;
use super::rows::PARTIALS;
use super::{Rule, Strategy, resolve, strategy};
use crate::Result;
use crate::dtensor::{DTensor, Kind};

type Sizes = SmallVec<[usize; 8]>;

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Split {
    name: &'static str,
    dim: usize,
    sizes: Sizes,
}

impl Rule for Split {
    fn name(&self) -> &'static str {
        self.name
    }

    fn outputs(&self, inputs: &[Shape]) -> Result<Vec<Shape>> {
        let (len, sum) = (inputs[0][self.dim], self.sizes.iter().sum::<usize>());
        if len != sum {
            let why = format!("the sizes {:?} add up to {sum}, dimension {} has {len}", self.sizes, self.dim);
            return Err(misfit(self.name, inputs, why));
        }
        let piece = |&size: &usize| {
            let mut shape = inputs[0].clone();
            shape[self.dim] = size;
            shape
        };
        Ok(self.sizes.iter().map(piece).collect())
    }

    fn strategies(&self, inputs: &[Shape], outputs: &[Shape]) -> Vec<Strategy> {
        let others = (0..inputs[0].num_dims()).filter(|&dim| dim != self.dim).map(S);
        let row = |placement| strategy([placement], outputs.iter().map(|_| placement));
        others.chain(PARTIALS.iter().copied()).map(row).collect()
    }
}

impl<const D: usize, K: Kind> DTensor<D, K> {
    /// Pieces of `split_size` along `dim`, the last with what is left, as burn's
    /// [`split`](burn::tensor::Tensor::split).
    #[must_use]
    pub fn split(self, split_size: usize, dim: impl AsIndex) -> Vec<Self> {
        self.pieces("split", split_size, dim_of("split", dim, D))
    }

    /// At most `chunks` equal pieces along `dim`, the last perhaps shorter, as burn's
    /// [`chunk`](burn::tensor::Tensor::chunk).
    #[must_use]
    pub fn chunk(self, chunks: usize, dim: impl AsIndex) -> Vec<Self> {
        let dim = dim_of("chunk", dim, D);
        let size = if chunks == 0 { 0 } else { self.dims()[dim].div_ceil(chunks).max(1) };
        self.pieces("chunk", size, dim)
    }

    /// The slices of length 1 along `dim`, as burn's [`iter_dim`](burn::tensor::Tensor::iter_dim).
    #[must_use]
    pub fn iter_dim(self, dim: impl AsIndex) -> std::vec::IntoIter<Self> {
        self.pieces("iter_dim", 1, dim_of("iter_dim", dim, D)).into_iter()
    }

    /// Pieces of these sizes along `dim`, without those of size 0, as burn's
    /// [`split_with_sizes`](burn::tensor::Tensor::split_with_sizes).
    #[must_use]
    #[allow(clippy::needless_pass_by_value)] // burn's signature
    pub fn split_with_sizes(self, split_sizes: Vec<usize>, dim: impl AsIndex) -> Vec<Self> {
        let sizes = split_sizes.iter().copied().filter(|&size| size > 0).collect();
        self.split_into("split_with_sizes", dim_of("split_with_sizes", dim, D), sizes)
    }

    fn pieces(self, name: &'static str, size: usize, dim: usize) -> Vec<Self> {
        let len = self.dims()[dim];
        if size == 0 {
            misfit(name, &[self.shape()], "there are no pieces of length 0; ask for at least 1").unwind();
        }
        let mut sizes: Sizes = smallvec![size; len / size];
        sizes.extend((!len.is_multiple_of(size)).then_some(len % size));
        self.split_into(name, dim, sizes)
    }

    fn split_into(self, name: &'static str, dim: usize, sizes: Sizes) -> Vec<Self> {
        let rule = Split { name, dim, sizes };
        let op = resolve(&rule, &[&self.spec]).unwrap_or_else(|error| error.unwind());
        let x = self.enter(&op, 0);
        let mut start = 0;
        let piece = |(at, &size): (usize, &usize)| {
            let range = start..start + size;
            start += size;
            let x = x.clone();
            let local = if is_empty(&op, at) { blank([x], op.output_shape(at)) } else { x.slice_dim(dim, range) };
            op.leave(at, local)
        };
        rule.sizes.iter().enumerate().map(piece).collect()
    }
}
