//! [`FlatLayout`]: where the parts of several tensors lie in one flat buffer.

use burn::tensor::Shape;

use super::copies::{CopyPlan, StridedCopy};
use crate::placement::ShardSizes;

/// A tensor cut along one dimension over the ranks of a group.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct ShardedTensorSpec {
    /// Of the whole.
    pub shape: Shape,
    /// The cut dimension.
    pub dim: usize,
    /// How its length falls on the ranks.
    pub sizes: ShardSizes,
}

impl ShardedTensorSpec {
    /// How often a part is interrupted in the whole: the elements before the cut dimension.
    fn outer(&self) -> usize {
        self.shape[..self.dim].iter().product()
    }

    /// Elements of the whole in one index of the cut dimension.
    fn inner(&self) -> usize {
        self.shape[self.dim + 1..].iter().product()
    }

    /// The shape of `rank`'s part.
    pub fn part(&self, ranks: usize, rank: usize) -> Shape {
        let mut shape = self.shape.clone();
        shape[self.dim] = self.sizes.range(ranks, rank).len();
        shape
    }
}

/// Flat buffers for the parts of several tensors, of which every rank holds a row of the same length.
///
/// A row has room for the largest part of each tensor, so that collectives which know only rows of one length
/// carry ragged and uneven cuts too. Each part starts at a multiple of `align` elements.
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
    /// Where each tensor's part starts in a row.
    offsets: Vec<usize>,
    /// Elements of a row.
    row: usize,
}

#[cfg_attr(
    not(all(feature = "testing", feature = "cube")),
    allow(dead_code, reason = "threads on the CPU copy parts to wholes at once, with no flat buffer between")
)]
impl FlatLayout {
    /// Of `tensors` over `ranks` ranks.
    pub fn new(ranks: usize, tensors: Vec<ShardedTensorSpec>, align: usize) -> Self {
        let mut row = 0;
        let offset = |tensor: &ShardedTensorSpec| {
            let offset = row;
            let largest = (0..ranks).map(|rank| tensor.part(ranks, rank).num_elements()).max().unwrap_or(0);
            row += largest.next_multiple_of(align);
            offset
        };
        let offsets = tensors.iter().map(offset).collect();
        Self { ranks, tensors, offsets, row }
    }

    /// Elements of a row.
    pub fn row(&self) -> usize {
        self.row
    }

    /// Elements of all rows that belong to no part.
    #[cfg(test)]
    pub fn padding(&self) -> usize {
        self.ranks * self.row - self.tensors.iter().map(|tensor| tensor.shape.num_elements()).sum::<usize>()
    }

    /// All-gather's copy-in: the parts of `rank` into its row.
    pub fn pack_parts(&self, rank: usize) -> CopyPlan {
        let segments = self.parts(rank, |index, len| StridedCopy::run(index, 0, 0, self.offsets[index], len));
        let sources = self.tensors.iter().map(|tensor| tensor.part(self.ranks, rank)).collect();
        CopyPlan::new(sources, vec![Shape::new([self.row])], segments)
    }

    /// Reduce-scatter's copy-out: the row of `rank` into its parts.
    pub fn unpack_parts(&self, rank: usize) -> CopyPlan {
        let segments = self.parts(rank, |index, len| StridedCopy::run(0, index, self.offsets[index], 0, len));
        let targets = self.tensors.iter().map(|tensor| tensor.part(self.ranks, rank)).collect();
        CopyPlan::new(vec![Shape::new([self.row])], targets, segments)
    }

    /// Where each of `rank`'s parts begins in its row, and its shape.
    #[cfg(feature = "cube")]
    pub fn parts_in_row(&self, rank: usize) -> Vec<(usize, Shape)> {
        let shapes = self.tensors.iter().map(|tensor| tensor.part(self.ranks, rank));
        self.offsets.iter().copied().zip(shapes).collect()
    }

    fn parts(&self, rank: usize, segment: impl Fn(usize, usize) -> StridedCopy) -> Vec<StridedCopy> {
        let lens = self.tensors.iter().map(|tensor| tensor.part(self.ranks, rank).num_elements());
        lens.enumerate().map(|(index, len)| segment(index, len)).collect()
    }

    /// Reduce-scatter's copy-in: the wholes into the rows of all ranks, one after another.
    pub fn pack_full(&self) -> CopyPlan {
        let segments = self.blocks(|index, rank, block| {
            let to = rank * self.row + self.offsets[index];
            let StridedBlock { at, rows, run, stride } = block;
            StridedCopy { source: index, target: 0, from: at, to, rows, run, from_stride: stride, to_stride: run }
        });
        let sources = self.tensors.iter().map(|tensor| tensor.shape.clone()).collect();
        CopyPlan::new(sources, vec![Shape::new([self.ranks * self.row])], segments)
    }

    /// All-gather's copy-out: the rows of all ranks, one after another in one buffer, into the wholes.
    pub fn unpack_full(&self) -> CopyPlan {
        let sources = vec![Shape::new([self.ranks * self.row])];
        self.copy_full(sources, |index, rank| (0, rank * self.row + self.offsets[index]))
    }

    /// All-gather's copy-out where each rank's row is a buffer of its own.
    pub fn unpack_rows(&self) -> CopyPlan {
        let sources = vec![Shape::new([self.row]); self.ranks];
        self.copy_full(sources, |index, rank| (rank, self.offsets[index]))
    }

    /// A whole all-gather, where every rank's parts can be read in place: those of rank 0, then of rank 1, ..
    pub fn join_parts(&self) -> CopyPlan {
        let parts = |rank| self.tensors.iter().map(move |tensor| tensor.part(self.ranks, rank));
        let sources = (0..self.ranks).flat_map(parts).collect();
        self.copy_full(sources, |index, rank| (rank * self.tensors.len() + index, 0))
    }

    /// The parts of all tensors into wholes; `from` gives the source and the first element of a rank's part.
    fn copy_full(&self, sources: Vec<Shape>, from: impl Fn(usize, usize) -> (usize, usize)) -> CopyPlan {
        let segments = self.blocks(|index, rank, block| {
            let (source, from) = from(index, rank);
            let StridedBlock { at, rows, run, stride } = block;
            StridedCopy { source, target: index, from, to: at, rows, run, from_stride: run, to_stride: stride }
        });
        CopyPlan::new(sources, self.tensors.iter().map(|tensor| tensor.shape.clone()).collect(), segments)
    }

    /// What `segment` makes of every tensor's block of every rank.
    fn blocks(&self, segment: impl Fn(usize, usize, StridedBlock) -> StridedCopy) -> Vec<StridedCopy> {
        let blocks = |(index, tensor): (usize, &ShardedTensorSpec)| {
            let (outer, inner) = (tensor.outer(), tensor.inner());
            let stride = tensor.shape[tensor.dim] * inner;
            let block = |rank| {
                let range = tensor.sizes.range(self.ranks, rank);
                let block = StridedBlock { at: range.start * inner, rows: outer, run: range.len() * inner, stride };
                segment(index, rank, block)
            };
            (0..self.ranks).map(block).collect::<Vec<_>>()
        };
        self.tensors.iter().enumerate().flat_map(blocks).collect()
    }
}

/// A rank's part inside the whole: `rows` runs, each `stride` elements after the one before.
struct StridedBlock {
    at: usize,
    rows: usize,
    run: usize,
    stride: usize,
}
