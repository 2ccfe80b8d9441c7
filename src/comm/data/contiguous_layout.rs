//! [`ContiguousLayout`]: byte offsets of the ranks' shards in a full tensor.

use burn::tensor::{DType, Shape};

use crate::comm::backend::TensorSignature;

/// Layout of a tensor in which the shard of each rank is contiguous. This is the case if the tensor is sharded
/// along its first dimension, or if all dimensions before the sharded one have size 1.
///
/// ```text
/// | shard of rank 0 | shard of rank 1 | shard of rank 2 |
/// 0 = edges[0]      edges[1]          edges[2]          edges[3]
/// ```
#[derive(Debug, Clone, PartialEq)]
pub(in crate::comm) struct ContiguousLayout {
    pub shape: Shape,
    pub dtype: DType,
    /// Byte offset of each rank's shard, and the end of the last shard.
    pub edges: Vec<usize>,
}

impl ContiguousLayout {
    /// Returns the layout of a tensor whose shards have these `lengths` along `dim`, by rank. Returns `None` if
    /// the shards are not contiguous.
    pub fn new(shape: Shape, dtype: DType, dim: usize, lengths: impl IntoIterator<Item = usize>) -> Option<Self> {
        let (before, rest) = shape.split_at(dim);
        let (_, inner) = rest.split_first()?;
        if before.iter().product::<usize>() != 1 {
            return None;
        }
        let (mut end, row) = (0, inner.iter().product::<usize>() * dtype.size());
        let ends = lengths.into_iter().map(|len| {
            end += len * row;
            end
        });
        let edges = std::iter::once(0).chain(ends).collect();
        Some(Self { shape, dtype, edges })
    }

    /// Returns the layout of a one-dimensional tensor of `len` elements whose shards have these `lengths`, by
    /// rank.
    pub fn of_row(len: usize, dtype: DType, lengths: impl IntoIterator<Item = usize>) -> Self {
        Self::new(Shape::from([len]), dtype, 0, lengths).expect("shards of a one-dimensional tensor are contiguous")
    }

    /// Returns the layouts of full tensors that are sharded over `ranks` ranks as the signatures state. Returns
    /// `None` if the shards of a tensor are not contiguous, or if a signature has no sharding or shard sizes for
    /// another number of ranks.
    pub fn of_full(signatures: &[TensorSignature], ranks: usize) -> Option<Vec<Self>> {
        let layout = |signature: &TensorSignature| {
            let sizes = signature
                .sharding
                .as_ref()
                .filter(|sizes| sizes.lengths.as_ref().is_none_or(|all| all.len() == ranks))?;
            let of = sizes.of(*signature.shape.get(sizes.dim)?);
            let lengths = (0..ranks).map(|member| of.range(ranks, member).len());
            Self::new(signature.shape.clone(), signature.dtype, sizes.dim, lengths)
        };
        signatures.iter().map(layout).collect()
    }

    /// Returns the number of bytes of the shard of `member`.
    pub fn bytes(&self, member: usize) -> usize {
        self.edges[member + 1] - self.edges[member]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::backend::ShardSignature;
    use crate::placement::ShardSizes;

    fn edges_of<const D: usize>(shape: [usize; D], dim: usize, sizes: &ShardSizes) -> Option<Vec<usize>> {
        let sharding = Some(ShardSignature::new(dim, sizes));
        let signature = TensorSignature { shape: Shape::from(shape), dtype: DType::F32, sharding, to: None };
        Some(ContiguousLayout::of_full(&[signature], 3)?.remove(0).edges)
    }

    #[test]
    fn contiguous_shards_have_an_offset() {
        assert_eq!(edges_of([7, 2], 0, &ShardSizes::Chunked(7)), Some(vec![0, 24, 48, 56]));
        assert_eq!(edges_of([1, 1, 5], 2, &ShardSizes::Uneven([3, 0, 2].into())), Some(vec![0, 12, 12, 20]));
        assert_eq!(edges_of([2, 6], 1, &ShardSizes::Chunked(6)), None, "each shard consists of two separate ranges");
        assert_eq!(edges_of([5], 0, &ShardSizes::Uneven([3, 2].into())), None, "shard sizes for two ranks only");
    }
}
