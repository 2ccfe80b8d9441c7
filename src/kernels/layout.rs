//! [`FlatLayout`]: offsets of the shards of several tensors in one flat buffer.

use burn::tensor::Shape;

use super::copies::{CopyPlan, StridedCopy};
use crate::placement::ShardSizes;

/// A tensor that is sharded along one dimension over the ranks of a group.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct ShardedTensorSpec {
    /// Shape of the full tensor.
    pub shape: Shape,
    /// The sharded dimension.
    pub dim: usize,
    /// Shard size of each rank along `dim`.
    pub sizes: ShardSizes,
}

impl ShardedTensorSpec {
    /// Returns the number of runs that a shard has in the full tensor: the elements before the
    /// sharded dimension.
    fn outer(&self) -> usize {
        self.shape[..self.dim].iter().product()
    }

    /// Returns the number of elements of the full tensor at one index of the sharded dimension.
    fn inner(&self) -> usize {
        self.shape[self.dim + 1..].iter().product()
    }

    /// Returns the shape of `rank`'s shard.
    pub fn part(&self, ranks: usize, rank: usize) -> Shape {
        let mut shape = self.shape.clone();
        shape[self.dim] = self.sizes.range(ranks, rank).len();
        shape
    }
}

/// Flat buffers for the shards of several tensors. Every rank holds one row, and all rows have the
/// same length.
///
/// A row has capacity for the largest shard of each tensor, so that collectives which require rows
/// of equal length work with uneven shard sizes too. Each shard starts at a multiple of `align`
/// elements.
///
/// ```text
/// two tensors over two ranks: 0 1 2 | 3 4 and a b | c, align 4
///
/// row of rank 0    0 1 2 . | a b . .
/// row of rank 1    3 4 . . | c . . .
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct FlatLayout {
    ranks: usize,
    tensors: Vec<ShardedTensorSpec>,
    /// Offset of each tensor's shard in a row.
    offsets: Vec<usize>,
    /// Elements of a row.
    row: usize,
}

#[cfg_attr(
    not(all(feature = "testing", feature = "cube")),
    allow(
        dead_code,
        reason = "threads on the CPU copy shards to full tensors directly, without a flat buffer"
    )
)]
impl FlatLayout {
    /// Creates the layout of `tensors` over `ranks` ranks.
    pub fn new(ranks: usize, tensors: Vec<ShardedTensorSpec>, align: usize) -> Self {
        let mut row = 0;
        let offset = |tensor: &ShardedTensorSpec| {
            let offset = row;
            let largest = (0..ranks)
                .map(|rank| tensor.part(ranks, rank).num_elements())
                .max()
                .unwrap_or(0);
            row += largest.next_multiple_of(align);
            offset
        };
        let offsets = tensors.iter().map(offset).collect();
        Self {
            ranks,
            tensors,
            offsets,
            row,
        }
    }

    /// Returns the number of elements of a row.
    pub fn row(&self) -> usize {
        self.row
    }

    /// Returns the number of elements of all rows that belong to no shard.
    #[cfg(test)]
    pub fn padding(&self) -> usize {
        self.ranks * self.row
            - self
                .tensors
                .iter()
                .map(|tensor| tensor.shape.num_elements())
                .sum::<usize>()
    }

    /// Returns the copy-in of an all-gather: from the shards of `rank` to its row.
    pub fn pack_parts(&self, rank: usize) -> CopyPlan {
        let segments = self.parts(rank, |index, len| {
            StridedCopy::run(index, 0, 0, self.offsets[index], len)
        });
        let sources = self
            .tensors
            .iter()
            .map(|tensor| tensor.part(self.ranks, rank))
            .collect();
        CopyPlan::new(sources, vec![Shape::new([self.row])], segments)
    }

    /// Returns the copy-out of a reduce-scatter: from the row of `rank` to its shards. Only tests
    /// and the benchmark use it so far: it is for backends whose reduce-scatter writes to a buffer
    /// of the backend's, as NCCL's may.
    pub fn unpack_parts(&self, rank: usize) -> CopyPlan {
        let segments = self.parts(rank, |index, len| {
            StridedCopy::run(0, index, self.offsets[index], 0, len)
        });
        let targets = self
            .tensors
            .iter()
            .map(|tensor| tensor.part(self.ranks, rank))
            .collect();
        CopyPlan::new(vec![Shape::new([self.row])], targets, segments)
    }

    /// Returns the offset of each of `rank`'s shards in its row, and its shape.
    #[cfg(feature = "cube")]
    pub fn parts_in_row(&self, rank: usize) -> Vec<(usize, Shape)> {
        let shapes = self
            .tensors
            .iter()
            .map(|tensor| tensor.part(self.ranks, rank));
        self.offsets.iter().copied().zip(shapes).collect()
    }

    fn parts(
        &self,
        rank: usize,
        segment: impl Fn(usize, usize) -> StridedCopy,
    ) -> Vec<StridedCopy> {
        let lens = self
            .tensors
            .iter()
            .map(|tensor| tensor.part(self.ranks, rank).num_elements());
        lens.enumerate()
            .map(|(index, len)| segment(index, len))
            .collect()
    }

    /// Returns the copy-in of a reduce-scatter: from the full tensors to the rows of all ranks, one
    /// after another.
    pub fn pack_full(&self) -> CopyPlan {
        let segments = self.blocks(|index, rank, block| {
            let to = rank * self.row + self.offsets[index];
            let StridedBlock {
                at,
                rows,
                run,
                stride,
            } = block;
            StridedCopy {
                source: index,
                target: 0,
                from: at,
                to,
                rows,
                run,
                from_stride: stride,
                to_stride: run,
            }
        });
        let sources = self
            .tensors
            .iter()
            .map(|tensor| tensor.shape.clone())
            .collect();
        CopyPlan::new(sources, vec![Shape::new([self.ranks * self.row])], segments)
    }

    /// Returns the copy-out of an all-gather: from the rows of all ranks, one after another in one
    /// buffer, to the full tensors. Only tests and the benchmark use it so far: it is for backends
    /// whose all-gather writes to one buffer, as NCCL's does.
    pub fn unpack_full(&self) -> CopyPlan {
        let sources = vec![Shape::new([self.ranks * self.row])];
        self.copy_full(sources, |index, rank| {
            (0, rank * self.row + self.offsets[index])
        })
    }

    /// Returns the copy-out of an all-gather in which each rank's row is a separate buffer.
    pub fn unpack_rows(&self) -> CopyPlan {
        let sources = vec![Shape::new([self.row]); self.ranks];
        self.copy_full(sources, |index, rank| (rank, self.offsets[index]))
    }

    /// Returns a complete all-gather, for ranks whose shards can be read in place. Its sources are
    /// the shards of rank 0, then those of rank 1, and so on.
    pub fn join_parts(&self) -> CopyPlan {
        let sources = (0..self.ranks)
            .flat_map(|rank| {
                self.tensors
                    .iter()
                    .map(move |tensor| tensor.part(self.ranks, rank))
            })
            .collect();
        self.copy_full(sources, |index, rank| {
            (rank * self.tensors.len() + index, 0)
        })
    }

    /// Copies the shards of all tensors to full tensors. `from` returns the source and the first
    /// element of a rank's shard.
    fn copy_full(
        &self,
        sources: Vec<Shape>,
        from: impl Fn(usize, usize) -> (usize, usize),
    ) -> CopyPlan {
        let segments = self.blocks(|index, rank, block| {
            let (source, from) = from(index, rank);
            let StridedBlock {
                at,
                rows,
                run,
                stride,
            } = block;
            StridedCopy {
                source,
                target: index,
                from,
                to: at,
                rows,
                run,
                from_stride: run,
                to_stride: stride,
            }
        });
        CopyPlan::new(
            sources,
            self.tensors
                .iter()
                .map(|tensor| tensor.shape.clone())
                .collect(),
            segments,
        )
    }

    /// Calls `segment` for the block of every rank in every tensor.
    fn blocks(
        &self,
        segment: impl Fn(usize, usize, StridedBlock) -> StridedCopy,
    ) -> Vec<StridedCopy> {
        let blocks = |(index, tensor): (usize, &ShardedTensorSpec)| {
            let outer = tensor.outer();
            let inner = tensor.inner();
            let stride = tensor.shape[tensor.dim] * inner;
            let block = |rank| {
                let range = tensor.sizes.range(self.ranks, rank);
                let block = StridedBlock {
                    at: range.start * inner,
                    rows: outer,
                    run: range.len() * inner,
                    stride,
                };
                segment(index, rank, block)
            };
            (0..self.ranks).map(block).collect::<Vec<_>>()
        };
        self.tensors.iter().enumerate().flat_map(blocks).collect()
    }
}

/// A rank's shard inside the full tensor: `rows` runs at distances of `stride` elements.
struct StridedBlock {
    at: usize,
    rows: usize,
    run: usize,
    stride: usize,
}
