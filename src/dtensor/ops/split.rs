//! Splits of a tensor along a dimension. It is redistributed once for all results.

use burn::tensor::AsIndex;
use smallvec::{SmallVec, smallvec};

use super::args::{dim_of, operand_error};
use super::partial_rules::MOVED;
use super::{EinsumRule, ShardingRule, apply};
use crate::dtensor::{DTensor, Kind};

const SPLIT: EinsumRule = chunks("split");
const CHUNK: EinsumRule = chunks("chunk");
const ITER_DIM: EinsumRule = chunks("iter_dim");
const SPLIT_WITH_SIZES: EinsumRule = chunks("split_with_sizes");

const fn chunks(name: &'static str) -> EinsumRule {
    EinsumRule::new(name, ".._.. -> ..D..*").with_partial_rules(MOVED)
}

type Sizes = SmallVec<[usize; 8]>;

impl<const D: usize, K: Kind> DTensor<D, K> {
    /// Splits the tensor along `dim` into tensors of length `split_size`, as burn's
    /// [`split`](burn::tensor::Tensor::split). The last one contains the rest.
    #[must_use]
    #[track_caller]
    pub fn split(self, split_size: usize, dim: impl AsIndex) -> Vec<Self> {
        self.chunks(&SPLIT, split_size, dim_of("split", dim, D))
    }

    /// Splits the tensor along `dim` into at most `chunks` tensors of equal length, as burn's
    /// [`chunk`](burn::tensor::Tensor::chunk). The last one may be shorter.
    #[must_use]
    #[track_caller]
    pub fn chunk(self, chunks: usize, dim: impl AsIndex) -> Vec<Self> {
        let dim = dim_of("chunk", dim, D);
        let size = if chunks == 0 {
            0
        } else {
            self.dims()[dim].div_ceil(chunks).max(1)
        };
        self.chunks(&CHUNK, size, dim)
    }

    /// Returns the slices of length 1 along `dim`, as burn's
    /// [`iter_dim`](burn::tensor::Tensor::iter_dim).
    #[must_use]
    #[track_caller]
    pub fn iter_dim(self, dim: impl AsIndex) -> std::vec::IntoIter<Self> {
        self.chunks(&ITER_DIM, 1, dim_of("iter_dim", dim, D))
            .into_iter()
    }

    /// Splits the tensor along `dim` into tensors of these lengths, as burn's
    /// [`split_with_sizes`](burn::tensor::Tensor::split_with_sizes). Lengths of 0 are skipped.
    #[must_use]
    #[allow(clippy::needless_pass_by_value)] // burn's signature
    #[track_caller]
    pub fn split_with_sizes(self, split_sizes: Vec<usize>, dim: impl AsIndex) -> Vec<Self> {
        let sizes = split_sizes
            .iter()
            .copied()
            .filter(|&size| size > 0)
            .collect();
        self.split_into(&SPLIT_WITH_SIZES, dim_of("split_with_sizes", dim, D), sizes)
    }

    #[track_caller]
    fn chunks(self, rule: &'static EinsumRule, size: usize, dim: usize) -> Vec<Self> {
        let len = self.dims()[dim];
        if size == 0 {
            operand_error(
                rule.name(),
                &[self.shape()],
                "cannot split into lengths of 0. Use at least 1",
            )
            .unwind();
        }
        let mut sizes: Sizes = smallvec![size; len / size];
        sizes.extend((!len.is_multiple_of(size)).then_some(len % size));
        self.split_into(rule, dim, sizes)
    }

    #[track_caller]
    fn split_into(self, rule: &'static EinsumRule, dim: usize, sizes: Sizes) -> Vec<Self> {
        let len = self.dims()[dim];
        let sum = sizes.iter().sum::<usize>();
        if len != sum {
            let why = format!(
                "the sizes {sizes:?} add up to {sum}, but dimension {dim} has length {len}"
            );
            operand_error(rule.name(), &[self.shape()], why).unwind()
        }
        let rule = rule.at([dim]).lens(sizes.iter().copied());
        apply(&rule, self, |x, _| {
            let mut start = 0;
            let mut parts = Vec::with_capacity(sizes.len());
            for size in sizes {
                parts.push(x.clone().slice_dim(dim, start..start + size));
                start += size;
            }
            parts
        })
    }
}
