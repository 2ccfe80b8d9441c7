//! [`DTensorSpec`]: description of the global tensor to which a local tensor belongs.

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

/// Required placement of each mesh dimension; `None` where any placement is accepted.
pub(crate) type RequiredPlacements = SmallVec<[Option<Placement>; 3]>;

/// Mesh, layout, global shape and element type of a [`DTensor`](super::DTensor).
///
/// The spec is equal on all ranks of the mesh. Only [`local_shape`](Self::local_shape),
/// [`local_range`](Self::local_range) and [`coordinate`](Self::coordinate) depend on the calling
/// rank.
#[derive(Debug, Clone)]
pub struct DTensorSpec {
    mesh: DeviceMesh,
    layout: Layout,
    shape: Shape,
    dtype: DType,
    /// For a partial tensor: global shapes of the operands from which its partial values were
    /// computed, if known. Ranks compare them when the tensor is reduced. Equality of specs ignores
    /// this field.
    terms: Option<Arc<str>>,
}

impl PartialEq for DTensorSpec {
    fn eq(&self, other: &Self) -> bool {
        let Self {
            mesh,
            layout,
            shape,
            dtype,
            terms: _,
        } = self;
        (mesh, layout, shape, dtype) == (&other.mesh, &other.layout, &other.shape, &other.dtype)
    }
}

impl Eq for DTensorSpec {}

impl Hash for DTensorSpec {
    #[inline]
    fn hash<H: Hasher>(&self, state: &mut H) {
        let Self {
            mesh,
            layout,
            shape,
            dtype,
            terms: _,
        } = self;
        (mesh, layout, shape, dtype).hash(state);
    }
}

/// Local: specs are computed and never sent.
impl DTensorSpec {
    /// Creates the spec of a tensor of global `shape`, laid out over `mesh`.
    ///
    /// # Errors
    /// [`MeshError::NotAMember`](crate::mesh::MeshError::NotAMember), [`DTensorError::LayoutMesh`],
    /// and the errors of [`Layout::check_shape`].
    pub fn new(mesh: &DeviceMesh, layout: Layout, shape: Shape, dtype: DType) -> Result<Self> {
        mesh.member("create a DTensor on it")?;
        check_layout(mesh, &layout, &shape)?;
        Ok(Self::decided(mesh, layout, shape, dtype))
    }

    /// Creates a spec from the decision of an operator's sharding rule, without checks: the layout
    /// is known to fit mesh and shape.
    pub(super) fn decided(mesh: &DeviceMesh, layout: Layout, shape: Shape, dtype: DType) -> Self {
        Self {
            mesh: mesh.clone(),
            layout,
            shape,
            dtype,
            terms: None,
        }
    }

    /// Sets the operand shapes from which the partial values of the tensor were computed. Ignored
    /// if the layout is not partial.
    pub(super) fn with_terms(mut self, terms: Option<Arc<str>>) -> Self {
        self.terms = terms.filter(|_| self.layout.has_partial());
        self
    }

    /// Returns `call` with the description of this tensor, which (or a region of which) is sent in
    /// element type `dtype`.
    pub(super) fn call_as(&self, call: Call, dtype: DType) -> Call {
        let full = TensorMeta {
            shape: self.shape.clone(),
            dtype,
        };
        Call {
            global_tensor: Some(full),
            operand_shapes: self.terms.clone(),
            ..call
        }
    }

    /// Returns the calling thread's shared copy of this spec. Specs that are equal, operand shapes
    /// included, yield the same pointer, which the cache of operator decisions compares.
    ///
    /// A tensor that outlives its launch gets a separate copy; otherwise a thread would keep every
    /// world alive of which it ever used a tensor.
    pub(crate) fn shared(self) -> Arc<Self> {
        if self.mesh.world().is_finished() {
            return Arc::new(self);
        }
        SPECS.with_borrow_mut(|(hasher, specs)| {
            let hash = hasher.hash_one(&self);
            if let Some(known) =
                specs.find(hash, |known| **known == self && known.terms == self.terms)
            {
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

    /// Returns the device mesh over which the tensor is laid out.
    pub fn mesh(&self) -> &DeviceMesh {
        &self.mesh
    }

    /// Returns the placements with shard order and shard sizes.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Returns the placements, one per mesh dimension.
    pub fn placements(&self) -> &[Placement] {
        self.layout.placements()
    }

    /// Returns the operand shapes from which the values of a partial tensor were computed, if
    /// known.
    pub(super) fn terms(&self) -> Option<&Arc<str>> {
        self.terms.as_ref()
    }

    /// Returns the global shape.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// Returns the element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Returns the coordinate of the calling rank in the mesh.
    pub fn coordinate(&self) -> &[usize] {
        self.mesh
            .coordinate()
            .expect("a spec is created only on ranks of its mesh")
    }

    /// Returns the shape of the calling rank's local tensor.
    pub fn local_shape(&self) -> Shape {
        self.local_shape_at(self.coordinate())
    }

    /// Returns the shape of the local tensor at a mesh coordinate.
    pub fn local_shape_at(&self, coordinate: &[usize]) -> Shape {
        Shape::from(self.layout.local_shape(&self.shape, coordinate).to_vec())
    }

    /// Returns the range of the global dimension `dim` that the calling rank's local tensor covers.
    pub fn local_range(&self, dim: usize) -> Range<usize> {
        self.layout
            .local_slices(&self.shape, self.coordinate())
            .swap_remove(dim)
    }

    /// Returns the spec of the same tensor in another layout.
    ///
    /// # Errors
    /// [`DTensorError::LayoutMesh`], and the errors of [`Layout::check_shape`].
    pub fn with_layout(&self, layout: Layout) -> Result<Self> {
        check_layout(&self.mesh, &layout, &self.shape)?;
        let terms = self.terms.clone();
        Ok(Self::decided(&self.mesh, layout, self.shape.clone(), self.dtype).with_terms(terms))
    }

    /// Returns `wanted` with Replicate for each shard that would leave a rank without elements. The
    /// sizes are those that result from `wanted` together with the placements that stay. A tensor
    /// that has no elements at all is left unchanged.
    pub(crate) fn with_elements(&self, mut wanted: RequiredPlacements) -> RequiredPlacements {
        let fits = |layout: &Layout| layout.check(self.shape.num_dims()).is_ok();
        if let Ok(sizes) = self
            .layout
            .replaced(|mesh_dim, own| wanted[mesh_dim].unwrap_or(own))
            && fits(&sizes)
            && self.shape.num_elements() > 0
        {
            let shortest = sizes.min_local_shape(&self.shape);
            wanted
                .iter_mut()
                .flatten()
                .filter(|placement| placement.shard_dim().is_some_and(|dim| shortest[dim] == 0))
                .for_each(|placement| *placement = Placement::Replicate);
        }
        wanted
    }

    /// Checks that `other` is on the same mesh and belongs to the same rank.
    ///
    /// # Errors
    /// [`DTensorError::OneDevice`], [`DTensorError::RankMismatch`] or
    /// [`DTensorError::MeshMismatch`].
    pub fn check_same_mesh(&self, other: &Self) -> Result<(), DTensorError> {
        if self.mesh.congruent(&other.mesh) {
            return Ok(());
        }
        let left = self.mesh.world();
        let right = other.mesh.world();
        if left.is_of_device() != right.is_of_device() {
            let rank = if left.is_of_device() { right } else { left };
            return Err(DTensorError::OneDevice {
                rank: rank.to_string(),
            });
        }
        if left.identity() != right.identity() {
            return Err(DTensorError::RankMismatch {
                left: left.to_string(),
                right: right.to_string(),
            });
        }
        Err(DTensorError::MeshMismatch {
            left: self.mesh.to_string(),
            right: other.mesh.to_string(),
        })
    }

    /// Returns the shard sizes into which `mesh_dims` split this rank's range of the dimension that
    /// they shard, together and in shard order.
    pub(super) fn shard_sizes(&self, mesh_dims: &[usize]) -> ShardSizes {
        self.layout
            .shard_sizes_over(&self.shape, self.coordinate(), mesh_dims)
    }

    /// Returns the spec of the same tensor in another element type.
    pub(crate) fn with_dtype(&self, dtype: DType) -> Self {
        Self {
            dtype,
            ..self.clone()
        }
    }

    /// Like [`with_dtype`](Self::with_dtype), but shared. Returns the spec itself if it already has
    /// that element type.
    pub(crate) fn in_dtype(self: &Arc<Self>, dtype: DType) -> Arc<Self> {
        if self.dtype == dtype {
            self.clone()
        } else {
            self.with_dtype(dtype).shared()
        }
    }
}

/// Number of specs shared per thread, and of operator decisions cached. When it is exceeded, the
/// cache is cleared. This is far more than a model needs; shapes that change from step to step fill
/// it with a few MB.
pub(super) const CAPACITY: usize = 1 << 12;

thread_local! {
    static SPECS: RefCell<(DefaultHashBuilder, HashTable<Arc<DTensorSpec>>)> = RefCell::default();
}

/// Formats a mesh dimension as `index (name)`, for messages.
pub(super) fn mesh_dim_name(mesh: &DeviceMesh, index: usize) -> String {
    match mesh.names().get(index) {
        Some(name) => format!("{index} ({name})"),
        None => index.to_string(),
    }
}

pub(super) fn check_layout(mesh: &DeviceMesh, layout: &Layout, shape: &Shape) -> Result<()> {
    if layout.mesh_shape() != mesh.shape() {
        let layout = layout.mesh_shape().to_vec();
        let mesh = mesh.to_string();
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

    /// Required placements on `[2, 3]` ranks, for tensors of various shapes and layouts, and the
    /// placements that remain.
    #[test]
    fn a_shard_is_dropped_for_the_dimension_alone_that_would_leave_a_rank_empty() {
        let r = Some(Replicate);
        let s = |dim| Some(Shard(dim));
        let run = launch(Launch::threads(6), |world| -> Result<()> {
            let mesh = DeviceMesh::new(world, [2, 3], ["dp", "tp"])?;
            for (shape, own, wanted, left) in [
                // Both shards fit, one of them does, neither does.
                ([4, 3], [Replicate; 2], [s(0), s(1)], [s(0), s(1)]),
                ([4, 2], [Replicate; 2], [s(0), s(1)], [s(0), r]),
                ([1, 3], [Replicate; 2], [s(0), s(1)], [r, s(1)]),
                ([1, 2], [Replicate; 2], [s(0), s(1)], [r, r]),
                // Two ranks and three ranks can share four rows, but six cannot: with chunks of
                // chunks, one rank would have none.
                ([4, 9], [Replicate; 2], [s(0), s(0)], [r, r]),
                // A dimension that stays sharded counts, and is not changed.
                ([4, 9], [Shard(0), Replicate], [None, s(0)], [None, r]),
                ([4, 9], [Shard(0), Replicate], [None, s(1)], [None, s(1)]),
                ([4, 9], [Shard(0), Replicate], [r, s(0)], [r, r]),
                ([6, 9], [Shard(0), Replicate], [None, s(0)], [None, s(0)]),
                // A dimension that stays sharded and leaves a rank empty does not affect another
                // dimension.
                ([1, 9], [Shard(0), Replicate], [None, s(1)], [None, s(1)]),
                // The tensor has no elements.
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
