//! [`StridedLayout`]: PyTorch's strided shards, and their conversion to and from shard orders.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::ops::Range;
use std::str::FromStr;

use smallvec::{SmallVec, smallvec};

use super::{Layout, Placement, PlacementError, Placements, ShardSizes};

/// A placement in PyTorch's notation, in which a shard may be strided: `SS(dim, split_factor)`.
///
/// A strided shard splits the dimension into `split_factor` blocks, and each block into one chunk
/// per rank. Rank `r` holds the concatenation of the `r`-th chunks of all blocks. `SS(d,1)` is
/// `S(d)`, and compares equal to it.
#[derive(Debug, Clone, Copy)]
pub enum StridedPlacement {
    /// A placement without a stride.
    Plain(Placement),
    /// A strided shard.
    Strided {
        /// The tensor dimension.
        dim: usize,
        /// Number of blocks.
        split_factor: usize,
    },
}

/// A layout in PyTorch's notation: placements applied from left to right, some of them strided.
///
/// PyTorch expresses a shard order other than left to right with strided shards. On a mesh (dp, tp)
/// on which tensor parallelism is outermost, it writes `[SS(0,2), S(0)]`. This crate computes with
/// shard orders instead, and uses strided shards only in this type, to read what PyTorch wrote.
/// There are two reasons:
///
/// 1. If no other mesh dimension splits the blocks of a strided shard (`[R, SS(0,2)]`), the shard
///    is not an interval and no shard order expresses it. [`decode`](Self::decode) then returns an
///    error, and [`DTensor::from_strided`](crate::dtensor::DTensor::from_strided) converts such a
///    tensor to another layout.
/// 2. If sizes are uneven, concatenating blocks shifts the shards of later mesh dimensions. A shard
///    order and the corresponding strided shards then disagree about a few elements, and a strided
///    shard may hold two intervals. For example, 13 elements as `[SS(0,4), SS(0,2), S(0)]` on a
///    mesh (2, 2, 2) give rank (1, 0, 1) the elements 7 and 10. PyTorch cannot gather such a
///    tensor.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct StridedLayout {
    mesh_shape: SmallVec<[usize; 3]>,
    placements: SmallVec<[StridedPlacement; 3]>,
}

/// Ascending intervals of one tensor dimension, of which no two are adjacent.
type Intervals = SmallVec<[Range<usize>; 2]>;

impl StridedLayout {
    /// Creates a layout with these placements.
    ///
    /// # Errors
    /// As [`Layout::new`]; [`SplitFactor`](PlacementError::SplitFactor) for a split factor of 0.
    pub fn new(
        mesh_shape: &[usize],
        placements: &[StridedPlacement],
    ) -> Result<Self, PlacementError> {
        let plain: Placements = placements
            .iter()
            .map(|placement| placement.without_stride())
            .collect();
        Layout::new(mesh_shape, &plain)?;
        for (mesh_dim, placement) in placements.iter().enumerate() {
            if let StridedPlacement::Strided {
                dim,
                split_factor: 0,
            } = *placement
            {
                return Err(PlacementError::SplitFactor { mesh_dim, dim });
            }
        }
        Ok(Self {
            mesh_shape: mesh_shape.into(),
            placements: placements.into(),
        })
    }

    /// Returns the placements, one per mesh dimension.
    pub fn placements(&self) -> &[StridedPlacement] {
        &self.placements
    }

    /// Returns the sizes of the mesh dimensions.
    pub(super) fn mesh_shape(&self) -> &[usize] {
        &self.mesh_shape
    }

    /// Returns the intervals of each tensor dimension that the rank at `coordinate` holds,
    /// ascending. The shard is the product of these intervals, in order.
    ///
    /// # Panics
    /// If `global` does not have a dimension that is sharded, or if `coordinate` is outside the
    /// mesh.
    pub fn local_runs(
        &self,
        global: &[usize],
        coordinate: &[usize],
    ) -> Vec<SmallVec<[Range<usize>; 2]>> {
        let mut runs: Vec<Intervals> = global
            .iter()
            .map(|&len| merged(std::iter::once(0..len)))
            .collect();
        for (mesh_dim, placement) in self.placements.iter().enumerate() {
            let Some((dim, split_factor)) = placement.shard() else {
                continue;
            };
            let len = runs[dim].iter().map(ExactSizeIterator::len).sum();
            let parts = dealt(
                len,
                split_factor,
                self.mesh_shape[mesh_dim],
                coordinate[mesh_dim],
            );
            runs[dim] = merged(
                parts
                    .flat_map(|part| select(&runs[dim], part))
                    .collect::<Intervals>(),
            );
        }
        runs
    }

    /// Returns the layout with the shard order that these placements express. A strided shard over
    /// a mesh dimension of size 1 holds every element and becomes a plain shard.
    ///
    /// # Errors
    /// [`Strided`](PlacementError::Strided) for a split factor that does not correspond to any
    /// shard order.
    pub fn decode(&self) -> Result<Layout, PlacementError> {
        let plain = self.without_strides();
        let mut orders: SmallVec<[(usize, SmallVec<[usize; 3]>); 2]> = SmallVec::new();
        // The loop goes from right to left. The split factor of a shard is the product of the sizes
        // of the mesh dimensions to its right that are outside it, so it determines the shard's
        // position among them.
        for (mesh_dim, placement) in self.placements.iter().enumerate().rev() {
            let Some((dim, split_factor)) = placement.shard() else {
                continue;
            };
            let at = orders
                .iter()
                .position(|(other, _)| *other == dim)
                .unwrap_or_else(|| {
                    orders.push((dim, smallvec![]));
                    orders.len() - 1
                });
            let sharding_dims = &mut orders[at].1;
            let factors: Vec<usize> = (0..=sharding_dims.len())
                .map(|before| {
                    sharding_dims[..before]
                        .iter()
                        .map(|&sharding_dim| self.mesh_shape[sharding_dim])
                        .product()
                })
                .collect();
            match factors.iter().position(|factor| *factor == split_factor) {
                Some(place) => sharding_dims.insert(place, mesh_dim),
                // A single rank holds all blocks, whatever their number.
                None if self.mesh_shape[mesh_dim] == 1 => sharding_dims.insert(0, mesh_dim),
                None => {
                    return Err(PlacementError::Strided {
                        mesh_dim,
                        dim,
                        split_factor,
                        allowed: factors,
                    });
                }
            }
        }
        let orders: Vec<(usize, &[usize])> = orders
            .iter()
            .map(|(dim, sharding_dims)| (*dim, sharding_dims.as_slice()))
            .collect();
        Layout::with_shard_order(&self.mesh_shape, &plain, &orders)
    }

    /// Returns the placements with a plain shard in place of every strided one.
    pub(super) fn without_strides(&self) -> Placements {
        self.placements
            .iter()
            .map(|placement| placement.without_stride())
            .collect()
    }

    /// Returns the placements that express `layout`.
    pub(super) fn encode(layout: &Layout) -> SmallVec<[StridedPlacement; 3]> {
        let strided = layout
            .placements()
            .iter()
            .enumerate()
            .map(|(mesh_dim, &placement)| {
                let Placement::Shard(dim) = placement else {
                    return StridedPlacement::Plain(placement);
                };
                let before = layout
                    .shard_order(dim)
                    .iter()
                    .take_while(|&&sharding_dim| sharding_dim != mesh_dim);
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
    /// Returns the sharded tensor dimension and the split factor (1 for a plain shard).
    pub(super) fn shard(self) -> Option<(usize, usize)> {
        match self {
            Self::Plain(placement) => Some((placement.shard_dim()?, 1)),
            Self::Strided { dim, split_factor } => Some((dim, split_factor)),
        }
    }

    /// Returns the placement without its stride, and the split factor. Two placements are equal if
    /// and only if these are.
    fn meaning(self) -> (Placement, usize) {
        (
            self.without_stride(),
            self.shard().map_or(1, |(_, split_factor)| split_factor),
        )
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

/// Returns the intervals of a length that rank `rank` of `ranks` holds under a strided shard.
pub(super) fn dealt(
    len: usize,
    split_factor: usize,
    ranks: usize,
    rank: usize,
) -> impl Iterator<Item = Range<usize>> {
    // Later blocks are empty.
    (0..split_factor.min(len)).map(move |block| {
        let block = ShardSizes::Chunked(len).range(split_factor, block);
        let part = ShardSizes::Chunked(block.len()).range(ranks, rank);
        block.start + part.start..block.start + part.end
    })
}

/// Returns the elements at positions `range` of the concatenation of `runs`.
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
        let read = strided
            .strip_suffix(')')
            .and_then(|inner| inner.split_once(','));
        let read = read.and_then(|(dim, split_factor)| {
            Some(Self::Strided {
                dim: dim.parse().ok()?,
                split_factor: split_factor.parse().ok()?,
            })
        });
        read.ok_or_else(|| PlacementError::Unreadable { text: text.into() })
    }
}

impl Layout {
    /// Creates the layout that PyTorch expresses with these strided shards.
    ///
    /// The shards of the layout equal the strided shards if all sizes are even; for uneven sizes
    /// see [`StridedLayout`].
    ///
    /// # Errors
    /// As [`new`](Self::new); [`Strided`](PlacementError::Strided) for a split factor that does not
    /// correspond to any shard order, and [`SplitFactor`](PlacementError::SplitFactor) for 0.
    pub fn from_strided(
        mesh_shape: &[usize],
        placements: &[StridedPlacement],
    ) -> Result<Self, PlacementError> {
        StridedLayout::new(mesh_shape, placements)?.decode()
    }

    /// Returns the placements that PyTorch uses for this layout. A shard becomes strided if mesh
    /// dimensions to its right are outside it. PyTorch supports only chunks, so uneven shard sizes
    /// are omitted.
    pub fn to_strided(&self) -> SmallVec<[StridedPlacement; 3]> {
        StridedLayout::encode(self)
    }
}
