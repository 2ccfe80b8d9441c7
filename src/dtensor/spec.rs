//! [`DTensorSpec`]: what a local tensor is a part of.

use std::cell::RefCell;
use std::hash::{BuildHasher, Hash, Hasher};
use std::ops::Range;
use std::sync::Arc;

use burn::tensor::{DType, Shape};
use hashbrown::{DefaultHashBuilder, HashTable};
use smallvec::SmallVec;

use super::DTensorError;
use crate::Result;
use crate::comm::{Call, TensorMeta};
use crate::mesh::DeviceMesh;
use crate::placement::{Layout, Placement, ShardSizes};

/// A placement for each mesh dimension; `None` for one that is as it may be.
pub(crate) type RequiredPlacements = SmallVec<[Option<Placement>; 3]>;

/// Mesh, layout, global shape and element type of a [`DTensor`](super::DTensor).
///
/// Equal on every rank of the mesh; [`local_shape`](Self::local_shape) and
/// [`coordinate`](Self::coordinate) are the caller's own.
#[derive(Debug, Clone)]
pub struct DTensorSpec {
    mesh: DeviceMesh,
    layout: Layout,
    shape: Shape,
    dtype: DType,
    /// Of a partial tensor: global shapes of the tensors that its terms were computed from, if known.
    /// Ranks compare them when it is reduced; no part of what is equal.
    terms: Option<Arc<str>>,
}

impl PartialEq for DTensorSpec {
    fn eq(&self, other: &Self) -> bool {
        let Self { mesh, layout, shape, dtype, terms: _ } = self;
        (mesh, layout, shape, dtype) == (&other.mesh, &other.layout, &other.shape, &other.dtype)
    }
}

impl Eq for DTensorSpec {}

impl Hash for DTensorSpec {
    fn hash<H: Hasher>(&self, state: &mut H) {
        let Self { mesh, layout, shape, dtype, terms: _ } = self;
        (mesh, layout, shape, dtype).hash(state);
    }
}

impl DTensorSpec {
    /// Describes a tensor of global `shape` laid out over `mesh`.
    ///
    /// # Errors
    /// [`MeshError::NotAMember`](crate::mesh::MeshError::NotAMember),
    /// [`DTensorError::LayoutMesh`], or what [`Layout::check_shape`] finds.
    pub fn new(mesh: &DeviceMesh, layout: Layout, shape: Shape, dtype: DType) -> Result<Self> {
        mesh.member("hold a part of a DTensor")?;
        check_layout(mesh, &layout, &shape)?;
        Ok(Self::decided(mesh, layout, shape, dtype))
    }

    /// A spec that an operator's rule has decided on: its layout fits mesh and shape.
    pub(super) fn decided(mesh: &DeviceMesh, layout: Layout, shape: Shape, dtype: DType) -> Self {
        Self { mesh: mesh.clone(), layout, shape, dtype, terms: None }
    }

    /// The same spec, saying what its terms, if it is partial, were computed from.
    pub(super) fn with_terms(mut self, terms: Option<Arc<str>>) -> Self {
        self.terms = terms.filter(|_| self.layout.has_partial());
        self
    }

    /// `call`, of this tensor or a part of it, sent in this element type.
    pub(super) fn call_as(&self, call: Call, dtype: DType) -> Call {
        let full = TensorMeta { shape: self.shape.clone(), dtype };
        Call { global_tensor: Some(full), operand_shapes: self.terms.clone(), ..call }
    }

    /// The one shared copy of this spec that the calling thread has: equal specs of equal terms are the
    /// same pointer, which is what the cache of decisions compares.
    ///
    /// Not of tensors that outlive their launch: a thread that does too would keep every world that it
    /// ever saw a tensor of.
    pub(crate) fn shared(self) -> Arc<Self> {
        if self.mesh.world().is_finished() {
            return Arc::new(self);
        }
        SPECS.with_borrow_mut(|(hasher, specs)| {
            let hash = hasher.hash_one(&self);
            let same = |known: &Arc<Self>| **known == self && known.terms == self.terms;
            if let Some(known) = specs.find(hash, same) {
                return known.clone();
            }
            if specs.len() >= CAPACITY {
                specs.clear();
            }
            let shared = Arc::new(self);
            specs.insert_unique(hash, shared.clone(), |known| hasher.hash_one(&**known));
            shared
        })
    }

    /// The mesh.
    pub fn mesh(&self) -> &DeviceMesh {
        &self.mesh
    }

    /// Placements, and the order and lengths of cuts.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// One placement per mesh dimension.
    pub fn placements(&self) -> &[Placement] {
        self.layout.placements()
    }

    /// What the terms of a partial tensor were computed from, if that is known.
    pub(super) fn terms(&self) -> Option<&Arc<str>> {
        self.terms.as_ref()
    }

    /// Global shape.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The calling rank's position in the mesh.
    pub fn coordinate(&self) -> &[usize] {
        self.mesh.coordinate().expect("a spec is made on ranks of its mesh only")
    }

    /// Shape of the calling rank's part.
    pub fn local_shape(&self) -> Shape {
        self.local_shape_at(self.coordinate())
    }

    /// Shape of the part at a mesh coordinate.
    pub fn local_shape_at(&self, coordinate: &[usize]) -> Shape {
        Shape::from(self.layout.local_shape(&self.shape, coordinate).to_vec())
    }

    /// Where the calling rank's part lies along `dim`.
    pub fn local_range(&self, dim: usize) -> Range<usize> {
        self.layout.local_slices(&self.shape, self.coordinate()).swap_remove(dim)
    }

    /// The same tensor laid out differently.
    ///
    /// # Errors
    /// [`DTensorError::LayoutMesh`], or what [`Layout::check_shape`] finds.
    pub fn with_layout(&self, layout: Layout) -> Result<Self> {
        check_layout(&self.mesh, &layout, &self.shape)?;
        let terms = self.terms.clone();
        Ok(Self::decided(&self.mesh, layout, self.shape.clone(), self.dtype).with_terms(terms))
    }

    /// What is `wanted` of each mesh dimension, with Replicate for shards of a dimension that, cut so beside what
    /// stays, would leave a rank without elements of a tensor that has some.
    pub(crate) fn with_elements(&self, mut wanted: RequiredPlacements) -> RequiredPlacements {
        let fits = |layout: &Layout| layout.check(self.shape.num_dims()).is_ok();
        if let Ok(sizes) = self.layout.replaced(|mesh_dim, own| wanted[mesh_dim].unwrap_or(own))
            && fits(&sizes)
            && self.shape.num_elements() > 0
        {
            let shortest = sizes.min_local_shape(&self.shape);
            let leaves_a_rank_empty =
                |placement: &&mut Placement| placement.shard_dim().is_some_and(|dim| shortest[dim] == 0);
            wanted
                .iter_mut()
                .flatten()
                .filter(leaves_a_rank_empty)
                .for_each(|placement| *placement = Placement::Replicate);
        }
        wanted
    }

    /// Checks that `other` lives on the same mesh, and is the same rank's.
    ///
    /// # Errors
    /// [`DTensorError::RankMismatch`] or [`DTensorError::MeshMismatch`].
    pub fn check_same_mesh(&self, other: &Self) -> Result<(), DTensorError> {
        if self.mesh.congruent(&other.mesh) {
            return Ok(());
        }
        let (left, right) = (self.mesh.world(), other.mesh.world());
        if left.identity() != right.identity() {
            return Err(DTensorError::RankMismatch { left: left.to_string(), right: right.to_string() });
        }
        Err(DTensorError::MeshMismatch { left: self.mesh.to_string(), right: other.mesh.to_string() })
    }

    /// How `mesh_dims` cut their piece of the dimension that they shard, one inside the other.
    pub(super) fn shard_sizes(&self, mesh_dims: &[usize]) -> ShardSizes {
        self.layout.shard_sizes_over(&self.shape, self.coordinate(), mesh_dims)
    }

    /// The same tensor in another element type.
    pub(crate) fn with_dtype(&self, dtype: DType) -> Self {
        Self { dtype, ..self.clone() }
    }

    /// The same, shared; the spec itself, if it is of that element type.
    pub(crate) fn in_dtype(self: &Arc<Self>, dtype: DType) -> Arc<Self> {
        if self.dtype == dtype { self.clone() } else { self.with_dtype(dtype).shared() }
    }
}

/// Specs shared per thread, and decisions kept; past that many sharing starts anew. Far more than a model
/// has, and with shapes that change from step to step a few MB.
pub(super) const CAPACITY: usize = 1 << 12;

thread_local! {
    static SPECS: RefCell<(DefaultHashBuilder, HashTable<Arc<DTensorSpec>>)> = RefCell::default();
}

/// `index (name)` of a mesh dimension, for messages.
pub(super) fn mesh_dim_name(mesh: &DeviceMesh, index: usize) -> String {
    match mesh.names().get(index) {
        Some(name) => format!("{index} ({name})"),
        None => index.to_string(),
    }
}

pub(super) fn check_layout(mesh: &DeviceMesh, layout: &Layout, shape: &Shape) -> Result<()> {
    if layout.mesh_shape() != mesh.shape() {
        let (layout, mesh) = (layout.mesh_shape().to_vec(), mesh.to_string());
        return Err(DTensorError::LayoutMesh { layout, mesh }.into());
    }
    Ok(layout.check_shape(shape)?)
}

#[cfg(test)]
mod tests {
    use burn::tensor::DType;

    use super::*;
    use crate::comm::{Launch, launch};
    use crate::placement::Placement::{Replicate, Shard};

    /// What is wanted of `[2, 3]` ranks, of a tensor laid out so, and what is left of it.
    #[test]
    fn a_shard_is_dropped_for_the_dimension_alone_that_would_leave_a_rank_empty() {
        let (r, s) = (Some(Replicate), |dim| Some(Shard(dim)));
        let run = launch(Launch::threads(6), |world| -> Result<()> {
            let mesh = DeviceMesh::new(world, [2, 3], ["dp", "tp"])?;
            for (shape, own, wanted, left) in [
                // Both fit, one of them does, none does.
                ([4, 3], [Replicate; 2], [s(0), s(1)], [s(0), s(1)]),
                ([4, 2], [Replicate; 2], [s(0), s(1)], [s(0), r]),
                ([1, 3], [Replicate; 2], [s(0), s(1)], [r, s(1)]),
                ([1, 2], [Replicate; 2], [s(0), s(1)], [r, r]),
                // Four rows over two ranks and three, but not over six: of chunks of chunks one would have none.
                ([4, 9], [Replicate; 2], [s(0), s(0)], [r, r]),
                // A dimension that stays cut counts, and stays.
                ([4, 9], [Shard(0), Replicate], [None, s(0)], [None, r]),
                ([4, 9], [Shard(0), Replicate], [None, s(1)], [None, s(1)]),
                ([4, 9], [Shard(0), Replicate], [r, s(0)], [r, r]),
                ([6, 9], [Shard(0), Replicate], [None, s(0)], [None, s(0)]),
                // What stays cut and leaves a rank empty is no affair of another dimension.
                ([1, 9], [Shard(0), Replicate], [None, s(1)], [None, s(1)]),
                // There is nothing that any rank could have.
                ([0, 9], [Replicate; 2], [s(0), s(1)], [s(0), s(1)]),
            ] {
                let layout = Layout::new(mesh.shape(), &own)?;
                let spec = DTensorSpec::new(&mesh, layout, Shape::from(shape), DType::F32)?;
                let found = spec.with_elements(wanted.into_iter().collect());
                assert_eq!(found[..], left, "{wanted:?} of {shape:?} as {own:?}");
            }
            Ok(())
        });
        run.unwrap_or_else(|error| panic!("{error}"));
    }
}
