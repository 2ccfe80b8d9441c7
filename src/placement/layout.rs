//! [`Layout`]: one placement per mesh dimension, with the shard order and uneven shard sizes.

use std::fmt;
use std::sync::Arc;

use smallvec::SmallVec;

use super::{Placement, PlacementError, Placements};

/// Mesh dimensions that shard one tensor dimension, outermost first.
type ShardOrder = SmallVec<[usize; 3]>;

/// Layout of a tensor on a mesh: one placement per mesh dimension, the shard order, and the shard
/// sizes where they are uneven.
///
/// If several mesh dimensions shard one tensor dimension, the first in the shard order splits the
/// full length, the next splits each of the resulting intervals, and so on. By default, the order
/// is that of the mesh dimensions. FSDP over tensor parallelism on a mesh (dp, tp) is `[S(0),
/// S(0)]` with order `[1, 0]`: tensor parallelism is outermost.
///
/// ```text
/// mesh (2, 2), [S(0), S(0)], a dim of 8     order [0, 1]       order [1, 0]
///                              rank (0, 0)  | 0 1 |            | 0 1 |
///                              rank (0, 1)  | 2 3 |            | 4 5 |
///                              rank (1, 0)  | 4 5 |            | 2 3 |
///                              rank (1, 1)  | 6 7 |            | 6 7 |
/// ```
///
/// Each mesh dimension splits into chunks, unless [`with_uneven_sizes`](Self::with_uneven_sizes)
/// sets the size of each rank's shard.
///
/// A layout does not depend on a tensor's shape: one without uneven sizes fits every shape with
/// enough dimensions (see [`check_shape`](Self::check_shape)). Where a method takes a `coordinate`,
/// it is a rank's position in the mesh, one index per mesh dimension.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Layout {
    mesh_shape: SmallVec<[usize; 3]>,
    placements: Placements,
    /// Sharded tensor dimensions, ascending, each with the mesh dimensions that shard it.
    shard_order: SmallVec<[(usize, ShardOrder); 2]>,
    /// Mesh dimensions with uneven shard sizes, ascending, each with one size per rank.
    uneven_mesh_dims: SmallVec<[(usize, Arc<[usize]>); 1]>,
}

impl Layout {
    /// Creates a layout in which mesh dimensions shard in ascending order, into chunks.
    ///
    /// # Errors
    /// [`Count`](PlacementError::Count) unless there is one placement per mesh dimension,
    /// [`EmptyMesh`](PlacementError::EmptyMesh) for a mesh dimension of size 0, and
    /// [`MixedPartial`](PlacementError::MixedPartial) for partials that do not commute.
    pub fn new(mesh_shape: &[usize], placements: &[Placement]) -> Result<Self, PlacementError> {
        if placements.len() != mesh_shape.len() {
            return Err(PlacementError::Count {
                placements: placements.len(),
                mesh_dims: mesh_shape.len(),
                mesh_shape: mesh_shape.to_vec(),
            });
        }
        if let Some(mesh_dim) = mesh_shape.iter().position(|&size| size == 0) {
            return Err(PlacementError::EmptyMesh {
                mesh_dim,
                mesh_shape: mesh_shape.to_vec(),
            });
        }
        let mesh_shape = mesh_shape.into();
        let placements = placements.into();
        let mut layout = Self {
            mesh_shape,
            placements,
            shard_order: SmallVec::new(),
            uneven_mesh_dims: SmallVec::new(),
        };
        if let Some(error) = layout.mixed_partial() {
            return Err(error);
        }
        for mesh_dim in 0..layout.placements.len() {
            if let Placement::Shard(dim) = layout.placements[mesh_dim] {
                layout.shard_order_mut(dim).push(mesh_dim);
            }
        }
        Ok(layout)
    }

    /// Creates a layout with an explicit shard order.
    ///
    /// `shard_order` holds pairs of a tensor dimension and the mesh dimensions that shard it,
    /// outermost first. Tensor dimensions that are not listed keep the default order.
    ///
    /// # Errors
    /// As [`new`](Self::new); [`Order`](PlacementError::Order) if an entry does not list exactly
    /// the mesh dimensions that shard its tensor dimension, and
    /// [`OrderTwice`](PlacementError::OrderTwice) for two entries of one tensor dimension.
    pub fn with_shard_order(
        mesh_shape: &[usize],
        placements: &[Placement],
        shard_order: &[(usize, &[usize])],
    ) -> Result<Self, PlacementError> {
        let mut layout = Self::new(mesh_shape, placements)?;
        for (entry, &(dim, sharding_dims)) in shard_order.iter().enumerate() {
            if shard_order[..entry]
                .iter()
                .any(|&(earlier, _)| earlier == dim)
            {
                return Err(PlacementError::OrderTwice { dim });
            }
            let mut sorted: ShardOrder = sharding_dims.into();
            sorted.sort_unstable();
            if sorted.as_slice() != layout.shard_order(dim) {
                let expected = layout.shard_order(dim).to_vec();
                return Err(PlacementError::Order {
                    dim,
                    given: sharding_dims.to_vec(),
                    expected,
                });
            }
            if !sharding_dims.is_empty() {
                *layout.shard_order_mut(dim) = sharding_dims.into();
            }
        }
        Ok(layout)
    }

    /// Sets the shard sizes of `mesh_dim`, one per rank, in place of chunks.
    ///
    /// The sizes must add up to the length of the tensor dimension. If other mesh dimensions are
    /// outside this one, they must add up to the length of the intervals that those leave, which
    /// then must all have the same length. Mesh dimensions inside this one split its shards into
    /// chunks, unless they have uneven sizes too.
    ///
    /// ```
    /// # use burn_dtensor::placement::{Layout, Placement::Shard};
    /// let layout = Layout::new(&[3], &[Shard(0)])?.with_uneven_sizes(0, [3, 0, 2])?;
    /// assert_eq!(layout.local_slices(&[5], &[2])[0], 3..5);
    /// assert_eq!(layout.to_string(), "[S(0); mesh dim 0 sizes 3 + 0 + 2]");
    /// # Ok::<(), burn_dtensor::placement::PlacementError>(())
    /// ```
    ///
    /// # Errors
    /// [`MeshDimNotSharded`](PlacementError::MeshDimNotSharded) if `mesh_dim` is not sharded, and
    /// [`ShardSizeCount`](PlacementError::ShardSizeCount) unless there is one size per rank.
    ///
    /// # Panics
    /// If the mesh has no dimension `mesh_dim`.
    pub fn with_uneven_sizes(
        mut self,
        mesh_dim: usize,
        lengths: impl Into<Arc<[usize]>>,
    ) -> Result<Self, PlacementError> {
        let lengths = lengths.into();
        let ranks = self.mesh_shape[mesh_dim];
        let placement = self.placements[mesh_dim];
        if placement.shard_dim().is_none() {
            return Err(PlacementError::MeshDimNotSharded {
                mesh_dim,
                placement,
                lengths: lengths.to_vec(),
            });
        }
        if lengths.len() != ranks {
            return Err(PlacementError::ShardSizeCount {
                mesh_dim,
                ranks,
                lengths: lengths.to_vec(),
            });
        }
        self.set_lengths(mesh_dim, Some(lengths));
        Ok(self)
    }

    /// Creates a layout in which all tensor dimensions are sharded in the order `mesh_order` of the
    /// mesh dimensions.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub(crate) fn in_order(
        mesh_shape: &[usize],
        placements: &[Placement],
        mesh_order: &[usize],
    ) -> Result<Self, PlacementError> {
        let mut layout = Self::new(mesh_shape, placements)?;
        for (_, sharding_dims) in &mut layout.shard_order {
            sharding_dims.sort_by_key(|sharding_dim| {
                mesh_order
                    .iter()
                    .position(|mesh_dim| mesh_dim == sharding_dim)
            });
        }
        Ok(layout)
    }

    /// Returns the layout with new placements: `by` maps each mesh dimension and its present
    /// placement to the new one. Shards that stay keep their order, and new ones are inside them.
    /// Uneven sizes stay if their mesh dimension still shards the same interval.
    ///
    /// # Errors
    /// [`MixedPartial`](PlacementError::MixedPartial), as [`new`](Self::new).
    pub(crate) fn replaced(
        &self,
        by: impl Fn(usize, Placement) -> Placement,
    ) -> Result<Self, PlacementError> {
        let placements: Placements = self
            .placements
            .iter()
            .enumerate()
            .map(|(dim, &own)| by(dim, own))
            .collect();
        let mut replaced = Self::new(&self.mesh_shape, &placements)?;
        for (dim, sharding_dims) in &mut replaced.shard_order {
            let known = self.shard_order(*dim);
            sharding_dims.sort_by_key(|sharding_dim| {
                known
                    .iter()
                    .position(|other| other == sharding_dim)
                    .unwrap_or(known.len())
            });
        }
        for (mesh_dim, lengths) in self.uneven_mesh_dims() {
            let outside = |layout: &Self| {
                let dim = layout.placements[mesh_dim].shard_dim()?;
                let outside = layout
                    .shard_order(dim)
                    .iter()
                    .take_while(|&&sharding_dim| sharding_dim != mesh_dim);
                Some((dim, outside.copied().collect::<ShardOrder>()))
            };
            if outside(&replaced) == outside(self) {
                replaced.set_lengths(mesh_dim, Some(lengths.clone()));
            }
        }
        Ok(replaced)
    }

    /// Returns the layout with chunks in place of uneven sizes for all shards of `tensor_dim`.
    pub(crate) fn in_chunks(mut self, tensor_dim: usize) -> Self {
        let sharding_dims: ShardOrder = self.shard_order(tensor_dim).into();
        self.uneven_mesh_dims
            .retain(|(mesh_dim, _)| !sharding_dims.contains(mesh_dim));
        self
    }

    /// Creates a layout with `Replicate` on every mesh dimension.
    ///
    /// # Errors
    /// [`EmptyMesh`](PlacementError::EmptyMesh) for a mesh dimension of size 0.
    pub fn replicate(mesh_shape: &[usize]) -> Result<Self, PlacementError> {
        let placements: Placements = mesh_shape.iter().map(|_| Placement::Replicate).collect();
        Self::new(mesh_shape, &placements)
    }

    /// Returns the placements, one per mesh dimension.
    pub fn placements(&self) -> &[Placement] {
        &self.placements
    }

    /// Returns the sizes of the mesh dimensions.
    pub fn mesh_shape(&self) -> &[usize] {
        &self.mesh_shape
    }

    /// Returns the mesh dimensions that shard `tensor_dim`, outermost first; empty if none does.
    pub fn shard_order(&self, tensor_dim: usize) -> &[usize] {
        let found = self.shard_order.iter().find(|(dim, _)| *dim == tensor_dim);
        found.map_or(&[], |(_, sharding_dims)| sharding_dims)
    }

    /// Returns the sharded tensor dimensions, ascending, each with its mesh dimensions, outermost
    /// first.
    pub fn orders(&self) -> impl Iterator<Item = (usize, &[usize])> {
        self.shard_order
            .iter()
            .map(|(dim, sharding_dims)| (*dim, sharding_dims.as_slice()))
    }

    /// Returns true if the mesh dimensions shard every tensor dimension in ascending order.
    pub fn has_default_order(&self) -> bool {
        self.shard_order
            .iter()
            .all(|(_, sharding_dims)| sharding_dims.is_sorted())
    }

    /// Returns the uneven shard sizes of `mesh_dim`, one per rank; `None` if it splits into chunks
    /// or does not shard.
    pub fn uneven_sizes(&self, mesh_dim: usize) -> Option<&Arc<[usize]>> {
        self.uneven_mesh_dims
            .iter()
            .find(|(uneven, _)| *uneven == mesh_dim)
            .map(|(_, lengths)| lengths)
    }

    /// Returns the mesh dimensions with uneven shard sizes, ascending, each with its sizes.
    pub fn uneven_mesh_dims(&self) -> impl Iterator<Item = (usize, &Arc<[usize]>)> {
        self.uneven_mesh_dims
            .iter()
            .map(|(mesh_dim, lengths)| (*mesh_dim, lengths))
    }

    /// Returns true if every tensor dimension is split into chunks, by the mesh dimensions in
    /// ascending order.
    pub fn has_default_shard_sizes(&self) -> bool {
        self.has_default_order() && !self.is_uneven()
    }

    /// Returns true if any mesh dimension has uneven shard sizes.
    pub fn is_uneven(&self) -> bool {
        !self.uneven_mesh_dims.is_empty()
    }

    /// Returns true if any placement is `Partial`.
    pub fn has_partial(&self) -> bool {
        self.placements
            .iter()
            .any(|placement| placement.partial_op().is_some())
    }

    /// Checks that a tensor of `ndim` dimensions can have this layout.
    ///
    /// # Errors
    /// [`DimOutOfRange`](PlacementError::DimOutOfRange) for a shard of a missing dimension.
    pub fn check(&self, ndim: usize) -> Result<(), PlacementError> {
        for (mesh_dim, placement) in self.placements.iter().enumerate() {
            if let Placement::Shard(dim) = *placement
                && dim >= ndim
            {
                return Err(PlacementError::DimOutOfRange {
                    mesh_dim,
                    dim,
                    ndim,
                });
            }
        }
        Ok(())
    }

    /// Returns the layout with `placement` on `mesh_dim`. A shard becomes the innermost one of its
    /// tensor dimension, with the uneven sizes `lengths` or else chunks. Returns `None` if the
    /// table of transitions has no such step.
    pub(super) fn moved(
        &self,
        mesh_dim: usize,
        placement: Placement,
        lengths: Option<&Arc<[usize]>>,
    ) -> Option<Self> {
        let mut moved = self.clone();
        if let Placement::Shard(dim) = self.placements[mesh_dim] {
            if moved.shard_order_mut(dim).pop() != Some(mesh_dim) {
                return None;
            }
            moved
                .shard_order
                .retain(|(_, sharding_dims)| !sharding_dims.is_empty());
        }
        if let Placement::Shard(dim) = placement {
            moved.shard_order_mut(dim).push(mesh_dim);
        }
        moved.placements[mesh_dim] = placement;
        moved.set_lengths(mesh_dim, lengths.cloned());
        moved.mixed_partial().is_none().then_some(moved)
    }

    /// Returns the layout with `Replicate` on mesh dimensions of size 1, where all placements are
    /// equivalent.
    pub(super) fn without_trivial(&self) -> Self {
        let mut plain = self.clone();
        for (mesh_dim, placement) in plain.placements.iter_mut().enumerate() {
            if self.mesh_shape[mesh_dim] == 1 {
                *placement = Placement::Replicate;
            }
        }
        for (_, sharding_dims) in &mut plain.shard_order {
            sharding_dims.retain(|sharding_dim| self.mesh_shape[*sharding_dim] > 1);
        }
        plain
            .shard_order
            .retain(|(_, sharding_dims)| !sharding_dims.is_empty());
        plain
            .uneven_mesh_dims
            .retain(|(mesh_dim, _)| self.mesh_shape[*mesh_dim] > 1);
        plain
    }

    fn set_lengths(&mut self, mesh_dim: usize, lengths: Option<Arc<[usize]>>) {
        self.uneven_mesh_dims
            .retain(|(uneven, _)| *uneven != mesh_dim);
        if let Some(lengths) = lengths {
            let at = self
                .uneven_mesh_dims
                .partition_point(|(uneven, _)| *uneven < mesh_dim);
            self.uneven_mesh_dims.insert(at, (mesh_dim, lengths));
        }
    }

    fn shard_order_mut(&mut self, dim: usize) -> &mut ShardOrder {
        let at = self.shard_order.partition_point(|(other, _)| *other < dim);
        if self
            .shard_order
            .get(at)
            .is_none_or(|(other, _)| *other != dim)
        {
            self.shard_order.insert(at, (dim, ShardOrder::new()));
        }
        &mut self.shard_order[at].1
    }

    fn mixed_partial(&self) -> Option<PlacementError> {
        let mut partials = self
            .placements
            .iter()
            .enumerate()
            .filter_map(|(dim, p)| Some((dim, p.partial_op()?)));
        let (mesh_dim, op) = partials.next()?;
        let (other_mesh_dim, other) = partials.find(|(_, other)| !op.commutes_with(*other))?;
        Some(PlacementError::MixedPartial {
            mesh_dim,
            op,
            other_mesh_dim,
            other,
        })
    }
}

/// Formats the layout as `[S(0), R]`. A non-default shard order follows, as in `[S(0), S(0); dim 0
/// sharded by mesh dims 1, 0]`, and then uneven shard sizes: `[S(0), R; mesh dim 0 sizes 3 + 0 +
/// 2]`.
impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list = |items: &mut dyn Iterator<Item = String>| items.collect::<Vec<_>>().join(", ");
        write!(
            f,
            "[{}",
            list(&mut self.placements.iter().map(ToString::to_string))
        )?;
        for (dim, sharding_dims) in self
            .orders()
            .filter(|(_, sharding_dims)| !sharding_dims.is_sorted())
        {
            write!(
                f,
                "; dim {dim} sharded by mesh dims {}",
                list(&mut sharding_dims.iter().map(ToString::to_string))
            )?;
        }
        for (mesh_dim, lengths) in self.uneven_mesh_dims() {
            let lengths: Vec<_> = lengths.iter().map(ToString::to_string).collect();
            write!(f, "; mesh dim {mesh_dim} sizes {}", lengths.join(" + "))?;
        }
        write!(f, "]")
    }
}
