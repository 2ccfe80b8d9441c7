//! [`Layout`]: one placement per mesh dimension, and the order of the cuts.

use std::fmt;
use std::ops::Range;

use smallvec::{SmallVec, smallvec};

use super::{Placement, PlacementError, Placements, chunk};

/// Mesh dimensions that cut one tensor dimension, outermost cut first.
type Cuts = SmallVec<[usize; 3]>;

/// How a tensor lies on a mesh: a placement per mesh dimension, and the order of the cuts.
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
/// A layout knows nothing of a tensor's shape; one fits every shape with enough dimensions
/// (see [`check`](Self::check)). Where a method takes a `coordinate`, it is a rank's position in
/// the mesh, one index per mesh dimension.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Layout {
    mesh_shape: SmallVec<[usize; 3]>,
    placements: Placements,
    /// Sharded tensor dimensions, ascending, each with its cuts.
    order: SmallVec<[(usize, Cuts); 2]>,
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
        let mut layout = Self { mesh_shape: mesh_shape.into(), placements: placements.into(), order: SmallVec::new() };
        if let Some(error) = layout.mixed_partial() {
            return Err(error);
        }
        for (mesh_dim, placement) in placements.iter().enumerate() {
            if let Placement::Shard(dim) = *placement {
                layout.cuts_mut(dim).push(mesh_dim);
            }
        }
        Ok(layout)
    }

    /// The layout with an explicit order of cuts.
    ///
    /// `order` holds pairs of a tensor dimension and the mesh dimensions that shard it, outermost
    /// cut first. Tensor dimensions left out keep the default order.
    ///
    /// # Errors
    /// As [`new`](Self::new); [`Order`](PlacementError::Order) if an entry does not list exactly
    /// the mesh dimensions that shard its tensor dimension, and
    /// [`OrderTwice`](PlacementError::OrderTwice) for two entries of one tensor dimension.
    pub fn with_order(
        mesh_shape: &[usize],
        placements: &[Placement],
        order: &[(usize, &[usize])],
    ) -> Result<Self, PlacementError> {
        let mut layout = Self::new(mesh_shape, placements)?;
        for (entry, &(dim, cuts)) in order.iter().enumerate() {
            if order[..entry].iter().any(|&(earlier, _)| earlier == dim) {
                return Err(PlacementError::OrderTwice { dim });
            }
            let mut sorted: Cuts = cuts.into();
            sorted.sort_unstable();
            if sorted.as_slice() != layout.order(dim) {
                let expected = layout.order(dim).to_vec();
                return Err(PlacementError::Order { dim, given: cuts.to_vec(), expected });
            }
            if !cuts.is_empty() {
                *layout.cuts_mut(dim) = cuts.into();
            }
        }
        Ok(layout)
    }

    /// The layout whose cuts are made in the order `turn` of the mesh dimensions, on every tensor
    /// dimension.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub(crate) fn in_turn(
        mesh_shape: &[usize],
        placements: &[Placement],
        turn: &[usize],
    ) -> Result<Self, PlacementError> {
        let mut layout = Self::new(mesh_shape, placements)?;
        let place = |cut: &usize| turn.iter().position(|mesh_dim| mesh_dim == cut);
        for (_, cuts) in &mut layout.order {
            cuts.sort_by_key(place);
        }
        Ok(layout)
    }

    /// The layout with the placements that `by` makes of each mesh dimension and its own. Cuts that
    /// stay keep their order; new ones come after them.
    ///
    /// # Errors
    /// [`MixedPartial`](PlacementError::MixedPartial), as [`new`](Self::new).
    pub(crate) fn replaced(&self, by: impl Fn(usize, Placement) -> Placement) -> Result<Self, PlacementError> {
        let placements: Placements = self.placements.iter().enumerate().map(|(dim, &own)| by(dim, own)).collect();
        let mut replaced = Self::new(&self.mesh_shape, &placements)?;
        for (dim, cuts) in &mut replaced.order {
            let known = self.order(*dim);
            cuts.sort_by_key(|cut| known.iter().position(|other| other == cut).unwrap_or(known.len()));
        }
        Ok(replaced)
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
    pub fn order(&self, tensor_dim: usize) -> &[usize] {
        let found = self.order.iter().find(|(dim, _)| *dim == tensor_dim);
        found.map_or(&[], |(_, cuts)| cuts)
    }

    /// The sharded tensor dimensions, ascending, each with its mesh dimensions, outermost first.
    pub fn orders(&self) -> impl Iterator<Item = (usize, &[usize])> {
        self.order.iter().map(|(dim, cuts)| (*dim, cuts.as_slice()))
    }

    /// Whether every tensor dimension is cut in the order of the mesh dimensions.
    pub fn has_default_order(&self) -> bool {
        self.order.iter().all(|(_, cuts)| cuts.is_sorted())
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

    /// The shape of the shard at `coordinate`.
    ///
    /// # Panics
    /// As [`local_slices`](Self::local_slices).
    pub fn local_shape(&self, global: &[usize], coordinate: &[usize]) -> Vec<usize> {
        self.local_slices(global, coordinate).iter().map(ExactSizeIterator::len).collect()
    }

    /// The interval of each tensor dimension that the rank at `coordinate` holds.
    ///
    /// An empty shard is an empty interval at the end of the piece it was cut from.
    ///
    /// # Panics
    /// If a shard's dimension is missing in `global`, or `coordinate` is outside the mesh.
    pub fn local_slices(&self, global: &[usize], coordinate: &[usize]) -> Vec<Range<usize>> {
        let mut slices: Vec<_> = global.iter().map(|&len| 0..len).collect();
        for (dim, cuts) in self.orders() {
            let slice = slices.get_mut(dim).unwrap_or_else(|| self.misfit(dim, global));
            *slice = self.nested(slice.len(), cuts, coordinate);
        }
        slices
    }

    /// Of each tensor dimension the length of the shortest part that any rank has: 0 where one has
    /// nothing of it. Under nested cuts that need not be the last rank:
    ///
    /// ```text
    /// mesh (2, 3), [S(0), S(0)], a dim of 7:   | 0 1 | 2 3 | | 4 | 5 | 6 |
    /// ```
    ///
    /// # Panics
    /// If a shard's dimension is missing in `global`.
    pub fn shortest(&self, global: &[usize]) -> Vec<usize> {
        let mut shortest = global.to_vec();
        for (dim, cuts) in self.orders() {
            let len = *global.get(dim).unwrap_or_else(|| self.misfit(dim, global));
            // Pieces of one cut have three lengths at most: which leaves the shortest part is only
            // known after the last cut.
            let mut pieces: SmallVec<[usize; 4]> = smallvec![len];
            for &cut in cuts {
                let ranks = self.mesh_shape[cut];
                let parts = |&len: &usize| {
                    let full = len.div_ceil(ranks).max(1);
                    [0, (len / full).min(ranks - 1), ranks - 1].map(|rank| chunk(len, ranks, rank).len())
                };
                pieces = pieces.iter().flat_map(parts).collect();
                pieces.sort_unstable();
                pieces.dedup();
            }
            shortest[dim] = pieces[0];
        }
        shortest
    }

    /// Where the shard at `coordinate` begins in each tensor dimension, as PyTorch reports it: for
    /// an interval that is empty, the length of the dimension.
    ///
    /// # Panics
    /// As [`local_slices`](Self::local_slices).
    pub fn global_offset(&self, global: &[usize], coordinate: &[usize]) -> Vec<usize> {
        let slices = self.local_slices(global, coordinate).into_iter();
        slices.zip(global).map(|(slice, &len)| if slice.is_empty() { len } else { slice.start }).collect()
    }

    /// The length of the piece that mesh dimension `mesh_dim` cuts, for the rank at `coordinate`:
    /// the interval left by the cuts before it. The same for all ranks that differ only along
    /// `mesh_dim`.
    ///
    /// # Panics
    /// If `mesh_dim` shards nothing, and as [`local_slices`](Self::local_slices).
    pub fn parent_len(&self, global: &[usize], coordinate: &[usize], mesh_dim: usize) -> usize {
        let Placement::Shard(dim) = self.placements[mesh_dim] else {
            panic!("mesh dim {mesh_dim} of {self} cuts nothing");
        };
        let outer = self.order(dim).iter().take_while(|&&cut| cut != mesh_dim);
        let len = *global.get(dim).unwrap_or_else(|| self.misfit(dim, global));
        self.nested(len, outer, coordinate).len()
    }

    /// The interval left of `0..len` by `cuts`, outermost first.
    fn nested<'a>(&self, len: usize, cuts: impl IntoIterator<Item = &'a usize>, coordinate: &[usize]) -> Range<usize> {
        cuts.into_iter().fold(0..len, |piece, &mesh_dim| {
            let part = chunk(piece.len(), self.mesh_shape[mesh_dim], coordinate[mesh_dim]);
            piece.start + part.start..piece.start + part.end
        })
    }

    fn misfit(&self, dim: usize, global: &[usize]) -> ! {
        panic!("{self} shards dim {dim}, which a tensor of shape {global:?} lacks")
    }

    /// The layout with `placement` on `mesh_dim`: as the innermost cut, if it is a shard.
    /// `None` where the table of transitions has no such step from here.
    pub(super) fn moved(&self, mesh_dim: usize, placement: Placement) -> Option<Self> {
        let mut moved = self.clone();
        if let Placement::Shard(dim) = self.placements[mesh_dim] {
            if moved.cuts_mut(dim).pop() != Some(mesh_dim) {
                return None;
            }
            moved.order.retain(|(_, cuts)| !cuts.is_empty());
        }
        if let Placement::Shard(dim) = placement {
            moved.cuts_mut(dim).push(mesh_dim);
        }
        moved.placements[mesh_dim] = placement;
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
        for (_, cuts) in &mut plain.order {
            cuts.retain(|cut| self.mesh_shape[*cut] > 1);
        }
        plain.order.retain(|(_, cuts)| !cuts.is_empty());
        plain
    }

    fn cuts_mut(&mut self, dim: usize) -> &mut Cuts {
        let at = self.order.partition_point(|(other, _)| *other < dim);
        if self.order.get(at).is_none_or(|(other, _)| *other != dim) {
            self.order.insert(at, (dim, Cuts::new()));
        }
        &mut self.order[at].1
    }

    fn mixed_partial(&self) -> Option<PlacementError> {
        let mut partials = self.placements.iter().enumerate().filter_map(|(dim, p)| Some((dim, p.partial_op()?)));
        let (mesh_dim, op) = partials.next()?;
        let (other_mesh_dim, other) = partials.find(|(_, other)| !op.commutes_with(*other))?;
        Some(PlacementError::MixedPartial { mesh_dim, op, other_mesh_dim, other })
    }
}

/// `[S(0), R]`; a non-default order follows: `[S(0), S(0); dim 0 cut by mesh dims 1, 0]`.
impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list = |items: &mut dyn Iterator<Item = String>| items.collect::<Vec<_>>().join(", ");
        write!(f, "[{}", list(&mut self.placements.iter().map(ToString::to_string)))?;
        for (dim, cuts) in self.orders().filter(|(_, cuts)| !cuts.is_sorted()) {
            write!(f, "; dim {dim} cut by mesh dims {}", list(&mut cuts.iter().map(ToString::to_string)))?;
        }
        write!(f, "]")
    }
}
