//! [`Layout`]: one placement per mesh dimension, the order of the cuts, and their lengths where ragged.

use std::fmt;
use std::sync::Arc;

use smallvec::SmallVec;

use super::{Placement, PlacementError, Placements};

/// Mesh dimensions that cut one tensor dimension, outermost cut first.
type ShardOrder = SmallVec<[usize; 3]>;

/// How a tensor lies on a mesh: a placement per mesh dimension, the order of the cuts, and the lengths
/// of those that are ragged.
///
/// Where several mesh dimensions shard one tensor dimension, the first in order cuts the whole,
/// the next cuts the piece, and so on. The default order is that of the mesh dimensions. FSDP
/// over tensor parallelism on a mesh (dp, tp) is `[S(0), S(0)]` with order `[1, 0]`: tensor
/// parallelism cuts first.
///
/// ```text
/// mesh (2, 2), [S(0), S(0)], a dim of 8     order [0, 1]       order [1, 0]
///                              rank (0, 0)  | 0 1 |            | 0 1 |
///                              rank (0, 1)  | 2 3 |            | 4 5 |
///                              rank (1, 0)  | 4 5 |            | 2 3 |
///                              rank (1, 1)  | 6 7 |            | 6 7 |
/// ```
///
/// A cut is into chunks of what the cuts before it left, unless [`with_uneven_sizes`](Self::with_uneven_sizes)
/// says what each rank holds.
///
/// A layout knows nothing of a tensor's shape; one without lengths fits every shape with enough
/// dimensions (see [`check_shape`](Self::check_shape)). Where a method takes a `coordinate`, it is a rank's position in
/// the mesh, one index per mesh dimension.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Layout {
    mesh_shape: SmallVec<[usize; 3]>,
    placements: Placements,
    /// Sharded tensor dimensions, ascending, each with its cuts.
    shard_order: SmallVec<[(usize, ShardOrder); 2]>,
    /// Mesh dimensions whose cut is ragged, ascending, each with the length that every rank holds.
    uneven_mesh_dims: SmallVec<[(usize, Arc<[usize]>); 1]>,
}

impl Layout {
    /// The layout with cuts in the order of the mesh dimensions.
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
            return Err(PlacementError::EmptyMesh { mesh_dim, mesh_shape: mesh_shape.to_vec() });
        }
        let (mesh_shape, placements) = (mesh_shape.into(), placements.into());
        let mut layout =
            Self { mesh_shape, placements, shard_order: SmallVec::new(), uneven_mesh_dims: SmallVec::new() };
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

    /// The layout with an explicit order of cuts.
    ///
    /// `shard_order` holds pairs of a tensor dimension and the mesh dimensions that shard it, outermost
    /// cut first. Tensor dimensions left out keep the default order.
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
            if shard_order[..entry].iter().any(|&(earlier, _)| earlier == dim) {
                return Err(PlacementError::OrderTwice { dim });
            }
            let mut sorted: ShardOrder = sharding_dims.into();
            sorted.sort_unstable();
            if sorted.as_slice() != layout.shard_order(dim) {
                let expected = layout.shard_order(dim).to_vec();
                return Err(PlacementError::Order { dim, given: sharding_dims.to_vec(), expected });
            }
            if !sharding_dims.is_empty() {
                *layout.shard_order_mut(dim) = sharding_dims.into();
            }
        }
        Ok(layout)
    }

    /// The same layout where `mesh_dim` cuts into these lengths, one per rank, and no longer into
    /// chunks.
    ///
    /// They add up to the length of the tensor dimension or, where other cuts come before this one,
    /// to that of the pieces that these leave, which are then all of one length. Cuts after this one
    /// are chunks of its parts, unless they have lengths of their own.
    ///
    /// ```
    /// # use burn_dtensor::placement::{Layout, Placement::Shard};
    /// let layout = Layout::new(&[3], &[Shard(0)])?.with_uneven_sizes(0, [3, 0, 2])?;
    /// assert_eq!(layout.local_slices(&[5], &[2])[0], 3..5);
    /// assert_eq!(layout.to_string(), "[S(0); mesh dim 0 cuts 3 + 0 + 2]");
    /// # Ok::<(), burn_dtensor::placement::PlacementError>(())
    /// ```
    ///
    /// # Errors
    /// [`MeshDimNotSharded`](PlacementError::MeshDimNotSharded) if `mesh_dim` has no shard, and
    /// [`ShardSizeCount`](PlacementError::ShardSizeCount) unless there is one length per rank.
    ///
    /// # Panics
    /// If the mesh has no dimension `mesh_dim`.
    pub fn with_uneven_sizes(
        mut self,
        mesh_dim: usize,
        lengths: impl Into<Arc<[usize]>>,
    ) -> Result<Self, PlacementError> {
        let (lengths, ranks) = (lengths.into(), self.mesh_shape[mesh_dim]);
        let placement = self.placements[mesh_dim];
        if placement.shard_dim().is_none() {
            return Err(PlacementError::MeshDimNotSharded { mesh_dim, placement, lengths: lengths.to_vec() });
        }
        if lengths.len() != ranks {
            return Err(PlacementError::ShardSizeCount { mesh_dim, ranks, lengths: lengths.to_vec() });
        }
        self.set_lengths(mesh_dim, Some(lengths));
        Ok(self)
    }

    /// The layout whose cuts are made in the order `mesh_order` of the mesh dimensions, on every tensor
    /// dimension.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub(crate) fn in_order(
        mesh_shape: &[usize],
        placements: &[Placement],
        mesh_order: &[usize],
    ) -> Result<Self, PlacementError> {
        let mut layout = Self::new(mesh_shape, placements)?;
        let place = |sharding_dim: &usize| mesh_order.iter().position(|mesh_dim| mesh_dim == sharding_dim);
        for (_, sharding_dims) in &mut layout.shard_order {
            sharding_dims.sort_by_key(place);
        }
        Ok(layout)
    }

    /// The layout with the placements that `by` makes of each mesh dimension and its own. Cuts that
    /// stay keep their order; new ones come after them. Lengths stay where what they cut does.
    ///
    /// # Errors
    /// [`MixedPartial`](PlacementError::MixedPartial), as [`new`](Self::new).
    pub(crate) fn replaced(&self, by: impl Fn(usize, Placement) -> Placement) -> Result<Self, PlacementError> {
        let placements: Placements = self.placements.iter().enumerate().map(|(dim, &own)| by(dim, own)).collect();
        let mut replaced = Self::new(&self.mesh_shape, &placements)?;
        for (dim, sharding_dims) in &mut replaced.shard_order {
            let known = self.shard_order(*dim);
            sharding_dims.sort_by_key(|sharding_dim| {
                known.iter().position(|other| other == sharding_dim).unwrap_or(known.len())
            });
        }
        for (mesh_dim, lengths) in self.uneven_mesh_dims() {
            let outside = |layout: &Self| {
                let dim = layout.placements[mesh_dim].shard_dim()?;
                let outside = layout.shard_order(dim).iter().take_while(|&&sharding_dim| sharding_dim != mesh_dim);
                Some((dim, outside.copied().collect::<ShardOrder>()))
            };
            if outside(&replaced) == outside(self) {
                replaced.set_lengths(mesh_dim, Some(lengths.clone()));
            }
        }
        Ok(replaced)
    }

    /// The same layout where every cut of `tensor_dim` is into chunks.
    pub(crate) fn in_chunks(mut self, tensor_dim: usize) -> Self {
        let sharding_dims: ShardOrder = self.shard_order(tensor_dim).into();
        self.uneven_mesh_dims.retain(|(mesh_dim, _)| !sharding_dims.contains(mesh_dim));
        self
    }

    /// All `Replicate`.
    ///
    /// # Errors
    /// [`EmptyMesh`](PlacementError::EmptyMesh) for a mesh dimension of size 0.
    pub fn replicate(mesh_shape: &[usize]) -> Result<Self, PlacementError> {
        let placements: Placements = mesh_shape.iter().map(|_| Placement::Replicate).collect();
        Self::new(mesh_shape, &placements)
    }

    /// One placement per mesh dimension.
    pub fn placements(&self) -> &[Placement] {
        &self.placements
    }

    /// The sizes of the mesh dimensions.
    pub fn mesh_shape(&self) -> &[usize] {
        &self.mesh_shape
    }

    /// The mesh dimensions that shard `tensor_dim`, outermost cut first; empty if none does.
    pub fn shard_order(&self, tensor_dim: usize) -> &[usize] {
        let found = self.shard_order.iter().find(|(dim, _)| *dim == tensor_dim);
        found.map_or(&[], |(_, sharding_dims)| sharding_dims)
    }

    /// The sharded tensor dimensions, ascending, each with its mesh dimensions, outermost first.
    pub fn orders(&self) -> impl Iterator<Item = (usize, &[usize])> {
        self.shard_order.iter().map(|(dim, sharding_dims)| (*dim, sharding_dims.as_slice()))
    }

    /// Whether every tensor dimension is cut in the order of the mesh dimensions.
    pub fn has_default_order(&self) -> bool {
        self.shard_order.iter().all(|(_, sharding_dims)| sharding_dims.is_sorted())
    }

    /// The lengths that `mesh_dim` cuts into, one per rank; `None` of one that cuts into chunks or
    /// nothing.
    pub fn uneven_sizes(&self, mesh_dim: usize) -> Option<&Arc<[usize]>> {
        self.uneven_mesh_dims.iter().find(|(uneven, _)| *uneven == mesh_dim).map(|(_, lengths)| lengths)
    }

    /// The mesh dimensions whose cuts are ragged, ascending, each with its lengths.
    pub fn uneven_mesh_dims(&self) -> impl Iterator<Item = (usize, &Arc<[usize]>)> {
        self.uneven_mesh_dims.iter().map(|(mesh_dim, lengths)| (*mesh_dim, lengths))
    }

    /// Whether every tensor dimension is cut into chunks, in the order of the mesh dimensions.
    pub fn has_default_shard_sizes(&self) -> bool {
        self.has_default_order() && !self.is_uneven()
    }

    /// Whether any cut is ragged.
    pub fn is_uneven(&self) -> bool {
        !self.uneven_mesh_dims.is_empty()
    }

    /// Whether any placement is `Partial`.
    pub fn has_partial(&self) -> bool {
        self.placements.iter().any(|placement| placement.partial_op().is_some())
    }

    /// Checks that a tensor of `ndim` dimensions can lie this way.
    ///
    /// # Errors
    /// [`DimOutOfRange`](PlacementError::DimOutOfRange) for a shard of a missing dimension.
    pub fn check(&self, ndim: usize) -> Result<(), PlacementError> {
        for (mesh_dim, placement) in self.placements.iter().enumerate() {
            if let Placement::Shard(dim) = *placement
                && dim >= ndim
            {
                return Err(PlacementError::DimOutOfRange { mesh_dim, dim, ndim });
            }
        }
        Ok(())
    }

    /// The layout with `placement` on `mesh_dim`: as the innermost cut, into `uneven_sizes` or else
    /// chunks, if it is a shard. `None` where the table of transitions has no such step from here.
    pub(super) fn moved(&self, mesh_dim: usize, placement: Placement, lengths: Option<&Arc<[usize]>>) -> Option<Self> {
        let mut moved = self.clone();
        if let Placement::Shard(dim) = self.placements[mesh_dim] {
            if moved.shard_order_mut(dim).pop() != Some(mesh_dim) {
                return None;
            }
            moved.shard_order.retain(|(_, sharding_dims)| !sharding_dims.is_empty());
        }
        if let Placement::Shard(dim) = placement {
            moved.shard_order_mut(dim).push(mesh_dim);
        }
        moved.placements[mesh_dim] = placement;
        moved.set_lengths(mesh_dim, lengths.cloned());
        moved.mixed_partial().is_none().then_some(moved)
    }

    /// The same layout with `Replicate` on mesh dimensions of size 1, where all placements of one
    /// value look alike.
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
        plain.shard_order.retain(|(_, sharding_dims)| !sharding_dims.is_empty());
        plain.uneven_mesh_dims.retain(|(mesh_dim, _)| self.mesh_shape[*mesh_dim] > 1);
        plain
    }

    fn set_lengths(&mut self, mesh_dim: usize, lengths: Option<Arc<[usize]>>) {
        self.uneven_mesh_dims.retain(|(uneven, _)| *uneven != mesh_dim);
        if let Some(lengths) = lengths {
            let at = self.uneven_mesh_dims.partition_point(|(uneven, _)| *uneven < mesh_dim);
            self.uneven_mesh_dims.insert(at, (mesh_dim, lengths));
        }
    }

    fn shard_order_mut(&mut self, dim: usize) -> &mut ShardOrder {
        let at = self.shard_order.partition_point(|(other, _)| *other < dim);
        if self.shard_order.get(at).is_none_or(|(other, _)| *other != dim) {
            self.shard_order.insert(at, (dim, ShardOrder::new()));
        }
        &mut self.shard_order[at].1
    }

    fn mixed_partial(&self) -> Option<PlacementError> {
        let mut partials = self.placements.iter().enumerate().filter_map(|(dim, p)| Some((dim, p.partial_op()?)));
        let (mesh_dim, op) = partials.next()?;
        let (other_mesh_dim, other) = partials.find(|(_, other)| !op.commutes_with(*other))?;
        Some(PlacementError::MixedPartial { mesh_dim, op, other_mesh_dim, other })
    }
}

/// `[S(0), R]`; a non-default order follows: `[S(0), S(0); dim 0 cut by mesh dims 1, 0]`; then the
/// lengths of ragged cuts: `[S(0), R; mesh dim 0 cuts 3 + 0 + 2]`.
impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list = |items: &mut dyn Iterator<Item = String>| items.collect::<Vec<_>>().join(", ");
        write!(f, "[{}", list(&mut self.placements.iter().map(ToString::to_string)))?;
        for (dim, sharding_dims) in self.orders().filter(|(_, sharding_dims)| !sharding_dims.is_sorted()) {
            write!(f, "; dim {dim} cut by mesh dims {}", list(&mut sharding_dims.iter().map(ToString::to_string)))?;
        }
        for (mesh_dim, lengths) in self.uneven_mesh_dims() {
            let lengths: Vec<_> = lengths.iter().map(ToString::to_string).collect();
            write!(f, "; mesh dim {mesh_dim} cuts {}", lengths.join(" + "))?;
        }
        write!(f, "]")
    }
}
