//! [`StridedLayout`]: PyTorch's strided shards, and their conversion to an order of cuts.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::ops::Range;
use std::str::FromStr;

use smallvec::{SmallVec, smallvec};

use super::{Layout, Placement, PlacementError, Placements, ShardSizes};

/// A placement as PyTorch writes it, where a shard may be strided: `SS(dim, split_factor)`.
///
/// A strided shard cuts the dimension into `split_factor` pieces and each piece into one chunk
/// per rank; rank `r` holds the `r`-th chunk of every piece, joined. `SS(d,1)` is `S(d)`, and equal
/// to it.
#[derive(Debug, Clone, Copy)]
pub enum StridedPlacement {
    /// Any placement without a stride.
    Plain(Placement),
    /// A strided shard.
    Strided {
        /// The tensor dimension.
        dim: usize,
        /// The number of pieces.
        split_factor: usize,
    },
}

/// A layout as PyTorch writes it: placements applied from left to right, some of them strided.
///
/// PyTorch writes an order of cuts other than left to right with strided shards: on a mesh
/// (dp, tp) where tensor parallelism cuts first, `[SS(0,2), S(0)]`. Two things set these apart
/// from a [`Layout`], and both are why this crate computes with orders and keeps strided shards
/// to this one type, for reading what PyTorch wrote:
///
/// 1. A strided shard whose pieces no other mesh dimension cuts (`[R, SS(0,2)]`) is no
///    interval, and no order expresses it: [`decode`](Self::decode) is an error, and
///    [`DTensor::from_strided`](crate::dtensor::DTensor::from_strided) brings such a tensor to a layout.
/// 2. Where a cut is uneven, joining pieces moves the later cuts. The order (outermost cut
///    first) and the strided shards then disagree about a few elements, and the strided shard may
///    hold two intervals: 13 elements as `[SS(0,4), SS(0,2), S(0)]` on a mesh (2, 2, 2) give
///    rank (1, 0, 1) the elements 7 and 10. PyTorch cannot gather such a tensor.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct StridedLayout {
    mesh_shape: SmallVec<[usize; 3]>,
    placements: SmallVec<[StridedPlacement; 3]>,
}

/// Ascending intervals of one tensor dimension, no two adjacent.
type Intervals = SmallVec<[Range<usize>; 2]>;

impl StridedLayout {
    /// The layout of these placements.
    ///
    /// # Errors
    /// As [`Layout::new`]; [`SplitFactor`](PlacementError::SplitFactor) for a split factor of 0.
    pub fn new(mesh_shape: &[usize], placements: &[StridedPlacement]) -> Result<Self, PlacementError> {
        let plain: Placements = placements.iter().map(|placement| placement.without_stride()).collect();
        Layout::new(mesh_shape, &plain)?;
        for (mesh_dim, placement) in placements.iter().enumerate() {
            if let StridedPlacement::Strided { dim, split_factor: 0 } = *placement {
                return Err(PlacementError::SplitFactor { mesh_dim, dim });
            }
        }
        Ok(Self { mesh_shape: mesh_shape.into(), placements: placements.into() })
    }

    /// One placement per mesh dimension.
    pub fn placements(&self) -> &[StridedPlacement] {
        &self.placements
    }

    /// The sizes of the mesh dimensions.
    pub(super) fn mesh_shape(&self) -> &[usize] {
        &self.mesh_shape
    }

    /// The intervals of each tensor dimension that the rank at `coordinate` holds, ascending.
    /// The shard is their product, in order.
    ///
    /// # Panics
    /// If a shard's dimension is missing in `global`, or `coordinate` is outside the mesh.
    pub fn local_runs(&self, global: &[usize], coordinate: &[usize]) -> Vec<SmallVec<[Range<usize>; 2]>> {
        let mut runs: Vec<Intervals> = global.iter().map(|&len| merged(std::iter::once(0..len))).collect();
        for (mesh_dim, placement) in self.placements.iter().enumerate() {
            let Some((dim, split_factor)) = placement.shard() else { continue };
            let len = runs[dim].iter().map(ExactSizeIterator::len).sum();
            let parts = dealt(len, split_factor, self.mesh_shape[mesh_dim], coordinate[mesh_dim]);
            runs[dim] = merged(parts.flat_map(|part| select(&runs[dim], part)).collect::<Intervals>());
        }
        runs
    }

    /// Returns the order of cuts that these placements stand for. A strided shard over a mesh dimension of size 1 holds
    /// every element, and is a plain shard.
    ///
    /// # Errors
    /// [`Strided`](PlacementError::Strided) for a split factor that no order gives.
    pub fn decode(&self) -> Result<Layout, PlacementError> {
        let plain = self.without_strides();
        let mut orders: SmallVec<[(usize, SmallVec<[usize; 3]>); 2]> = SmallVec::new();
        // From the right: a shard's split factor is the product of the cuts to its right that
        // come before it, so its place among them is already determined.
        for (mesh_dim, placement) in self.placements.iter().enumerate().rev() {
            let Some((dim, split_factor)) = placement.shard() else { continue };
            let at = orders.iter().position(|(other, _)| *other == dim).unwrap_or_else(|| {
                orders.push((dim, smallvec![]));
                orders.len() - 1
            });
            let sharding_dims = &mut orders[at].1;
            let factors: Vec<usize> = (0..=sharding_dims.len())
                .map(|before| {
                    sharding_dims[..before].iter().map(|&sharding_dim| self.mesh_shape[sharding_dim]).product()
                })
                .collect();
            match factors.iter().position(|factor| *factor == split_factor) {
                Some(place) => sharding_dims.insert(place, mesh_dim),
                // A single rank holds every piece, however many there are.
                None if self.mesh_shape[mesh_dim] == 1 => sharding_dims.insert(0, mesh_dim),
                None => return Err(PlacementError::Strided { mesh_dim, dim, split_factor, allowed: factors }),
            }
        }
        let orders: Vec<(usize, &[usize])> =
            orders.iter().map(|(dim, sharding_dims)| (*dim, sharding_dims.as_slice())).collect();
        Layout::with_shard_order(&self.mesh_shape, &plain, &orders)
    }

    /// Every strided shard as a plain one.
    pub(super) fn without_strides(&self) -> Placements {
        self.placements.iter().map(|placement| placement.without_stride()).collect()
    }

    /// The placements that stand for `layout`.
    pub(super) fn encode(layout: &Layout) -> SmallVec<[StridedPlacement; 3]> {
        let strided = layout.placements().iter().enumerate().map(|(mesh_dim, &placement)| {
            let Placement::Shard(dim) = placement else { return StridedPlacement::Plain(placement) };
            let before = layout.shard_order(dim).iter().take_while(|&&sharding_dim| sharding_dim != mesh_dim);
            match before
                .filter(|&&sharding_dim| sharding_dim > mesh_dim)
                .map(|&sharding_dim| layout.mesh_shape()[sharding_dim])
                .product()
            {
                1 => StridedPlacement::Plain(placement),
                split_factor => StridedPlacement::Strided { dim, split_factor },
            }
        });
        strided.collect()
    }
}

impl StridedPlacement {
    /// The sharded tensor dimension and the split factor (1 for a plain shard).
    pub(super) fn shard(self) -> Option<(usize, usize)> {
        match self {
            Self::Plain(placement) => Some((placement.shard_dim()?, 1)),
            Self::Strided { dim, split_factor } => Some((dim, split_factor)),
        }
    }

    /// The split factor, and the placement but for it: what it means, however it is spelled.
    fn meaning(self) -> (Placement, usize) {
        (self.without_stride(), self.shard().map_or(1, |(_, split_factor)| split_factor))
    }

    fn without_stride(self) -> Placement {
        match self {
            Self::Plain(placement) => placement,
            Self::Strided { dim, .. } => Placement::Shard(dim),
        }
    }
}

impl PartialEq for StridedPlacement {
    fn eq(&self, other: &Self) -> bool {
        self.meaning() == other.meaning()
    }
}

impl Eq for StridedPlacement {}

impl Hash for StridedPlacement {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.meaning().hash(state);
    }
}

/// The intervals of a length that rank `rank` of `ranks` holds of a strided shard.
pub(super) fn dealt(len: usize, split_factor: usize, ranks: usize, rank: usize) -> impl Iterator<Item = Range<usize>> {
    (0..split_factor).map(move |block| {
        let block = ShardSizes::Chunked(len).range(split_factor, block);
        let part = ShardSizes::Chunked(block.len()).range(ranks, rank);
        block.start + part.start..block.start + part.end
    })
}

/// The elements at positions `range` of `runs`.
fn select(runs: &[Range<usize>], range: Range<usize>) -> Intervals {
    let mut passed = 0;
    let mut selected = Intervals::new();
    for run in runs {
        let from = range.start.max(passed);
        let to = range.end.min(passed + run.len());
        if from < to {
            selected.push(run.start + from - passed..run.start + to - passed);
        }
        passed += run.len();
    }
    selected
}

/// Drops empty intervals and joins adjacent ones.
fn merged(runs: impl IntoIterator<Item = Range<usize>>) -> Intervals {
    let mut merged = Intervals::new();
    for run in runs.into_iter().filter(|run| !run.is_empty()) {
        match merged.last_mut() {
            Some(last) if last.end == run.start => last.end = run.end,
            _ => merged.push(run),
        }
    }
    merged
}

impl From<Placement> for StridedPlacement {
    fn from(placement: Placement) -> Self {
        Self::Plain(placement)
    }
}

impl fmt::Display for StridedPlacement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Plain(placement) => placement.fmt(f),
            Self::Strided { dim, split_factor } => write!(f, "SS({dim},{split_factor})"),
        }
    }
}

impl FromStr for StridedPlacement {
    type Err = PlacementError;

    fn from_str(text: &str) -> Result<Self, PlacementError> {
        let Some(strided) = text.strip_prefix("SS(") else {
            return text.parse().map(Self::Plain);
        };
        let read = strided.strip_suffix(')').and_then(|inner| inner.split_once(','));
        let read = read.and_then(|(dim, split_factor)| {
            Some(Self::Strided { dim: dim.parse().ok()?, split_factor: split_factor.parse().ok()? })
        });
        read.ok_or_else(|| PlacementError::Unreadable { text: text.into() })
    }
}

impl Layout {
    /// The layout that PyTorch writes with strided shards.
    ///
    /// The layout's shards equal the strided ones wherever the cuts divide evenly; for what
    /// happens elsewhere see [`StridedLayout`].
    ///
    /// # Errors
    /// As [`new`](Self::new); [`Strided`](PlacementError::Strided) for a split factor that no
    /// order of cuts expresses, [`SplitFactor`](PlacementError::SplitFactor) for 0.
    pub fn from_strided(mesh_shape: &[usize], placements: &[StridedPlacement]) -> Result<Self, PlacementError> {
        StridedLayout::new(mesh_shape, placements)?.decode()
    }

    /// The placements that PyTorch writes for this layout: a shard whose tensor dimension is
    /// already cut by mesh dimensions to its right becomes a strided shard. PyTorch cuts into chunks
    /// alone, so the lengths of a ragged shard are left out.
    pub fn to_strided(&self) -> SmallVec<[StridedPlacement; 3]> {
        StridedLayout::encode(self)
    }
}
