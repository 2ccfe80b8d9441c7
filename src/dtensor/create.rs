//! Conversions between plain local tensors and DTensors: [`from_local`](DTensor::from_local) and
//! [`to_local`](DTensor::to_local).

use burn::tensor::{Shape, Tensor};

use super::check::check_replicas;
use super::spec::mesh_dim_name;
use super::{DTensor, DTensorError, DTensorSpec, Kind, MeshDims};
use crate::Result;
use crate::error::OrUnwind;
use crate::mesh::DeviceMesh;
use crate::placement::{Layout, PartialOp, Placement};

impl<const D: usize, K: Kind> DTensor<D, K> {
    /// Creates a DTensor whose local tensor on this rank is `local`. Assumes that all ranks' local
    /// tensors have the same shape: a dimension that `k` ranks shard is `k` times as long globally.
    ///
    /// The local tensor stays in its autodiff graph, and its gradient is laid out according to
    /// invariant 1 of [this module](super).
    ///
    /// # Collective
    /// Local: nothing is sent or compared. If the launch [checks
    /// replicas](crate::comm::Launch::with_replica_checks), every rank of the mesh, because what is
    /// placed `Replicate` is compared. [`from_local_checked`](Self::from_local_checked) always
    /// compares the ranks.
    ///
    /// # Errors
    /// [`MeshError::NotAMember`](crate::mesh::MeshError::NotAMember), or
    /// [`PlacementError`](crate::placement::PlacementError) for a wrong number of placements or a
    /// dimension out of range.
    pub fn from_local(
        local: Tensor<D, K>,
        mesh: &DeviceMesh,
        placements: &[Placement],
    ) -> Result<Self> {
        let layout = Layout::new(mesh.shape(), placements)?;
        layout.check(D)?;
        let mut dims = local.dims();
        for (dim, shardings) in layout.orders() {
            dims[dim] *= shardings
                .iter()
                .map(|&sizes| mesh.shape()[sizes])
                .product::<usize>();
        }
        let spec = DTensorSpec::new(mesh, layout, Shape::from(dims), local.dtype())?;
        check_replicas(&local, mesh, replicated_dims(&spec))?;
        Ok(Self::from_parts(local, spec.shared()))
    }

    /// Like [`from_local`](Self::from_local), but with a known global `shape`, so that the shards
    /// may be uneven or empty.
    ///
    /// # Collective
    /// Like [`from_local`](Self::from_local).
    ///
    /// # Errors
    /// As [`from_local`](Self::from_local), and [`DTensorError::LocalShape`] if `local` does not
    /// have the shape that `shape` and `placements` require on this rank.
    pub fn from_local_with_shape(
        local: Tensor<D, K>,
        mesh: &DeviceMesh,
        placements: &[Placement],
        shape: impl Into<Shape>,
    ) -> Result<Self> {
        Self::from_local_with_layout(local, mesh, Layout::new(mesh.shape(), placements)?, shape)
    }

    /// Like [`from_local_with_shape`](Self::from_local_with_shape), but with a [`Layout`], which
    /// may have its own shard order or uneven shard sizes.
    ///
    /// # Collective
    /// Like [`from_local`](Self::from_local).
    ///
    /// # Errors
    /// As [`from_local_with_shape`](Self::from_local_with_shape), [`DTensorError::LayoutMesh`] for
    /// a layout of another mesh shape, and
    /// [`ShardSizeSum`](crate::placement::PlacementError::ShardSizeSum) for uneven shard sizes that
    /// do not add up to the tensor's.
    pub fn from_local_with_layout(
        local: Tensor<D, K>,
        mesh: &DeviceMesh,
        layout: Layout,
        shape: impl Into<Shape>,
    ) -> Result<Self> {
        let spec = DTensorSpec::new(mesh, layout, shape.into(), local.dtype())?;
        let expected = spec.local_shape();
        if local.shape() != expected {
            return Err(DTensorError::LocalShape {
                rank: mesh.rank(),
                local: local.shape().to_vec(),
                expected: expected.to_vec(),
                global: spec.shape().to_vec(),
                layout: spec.layout().to_string(),
            }
            .into());
        }
        check_replicas(&local, mesh, replicated_dims(&spec))?;
        Ok(Self::from_parts(local, spec.shared()))
    }

    /// Makes a plain tensor that this crate has computed on every rank a replicated DTensor. It is
    /// never compared.
    pub(crate) fn replicated_on(full: Tensor<D, K>, mesh: &DeviceMesh) -> Result<Self> {
        let spec = DTensorSpec::new(
            mesh,
            Layout::replicate(mesh.shape())?,
            full.shape(),
            full.dtype(),
        )?;
        Ok(Self::from_parts(full, spec.shared()))
    }

    /// Makes a plain tensor a DTensor on the mesh of `like`, replicated. Every rank passes the same
    /// values, such as a table or a mask that all ranks compute.
    ///
    /// # Collective
    /// Like [`from_local`](Self::from_local).
    ///
    /// # Panics
    /// Unwinds with a typed [`Error`](crate::Error) if a check of replicas fails.
    #[track_caller]
    pub fn replicated_like<const L: usize, M: Kind>(
        full: Tensor<D, K>,
        like: &DTensor<L, M>,
    ) -> Self {
        let mesh = like.mesh();
        let placements = vec![Placement::Replicate; mesh.ndim()];
        Self::from_local(full, mesh, &placements).or_unwind()
    }

    /// Returns this rank's local tensor. Local, also in backward.
    ///
    /// The gradient that the caller's computation passes back must be laid out according to
    /// invariant 1 of [this module](super): identical on all ranks that hold the same value. If
    /// ranks compute different things with a replicated value, use [`vary`](DTensor::vary) or
    /// [`to_local_with_grad_placements`](DTensor::to_local_with_grad_placements).
    pub fn to_local(self) -> Tensor<D, K> {
        self.local
    }
}

impl<const D: usize> DTensor<D> {
    /// Returns this rank's local tensor, for a computation whose gradient is laid out as
    /// `grad_placements`. By default a gradient has the placements of the value, with Replicate in
    /// place of Partial. Pass `P(sum)` for a mesh dimension on which each rank computes only a
    /// partial sum of the gradient; backward then all-reduces it.
    ///
    /// # Collective
    /// In backward, if `grad_placements` contains `P(sum)`: every rank of the mesh.
    ///
    /// # Errors
    /// [`DTensorError::GradPlacement`] for any other placement, and
    /// [`PlacementError`](crate::placement::PlacementError) for a wrong number of placements.
    #[track_caller]
    pub fn to_local_with_grad_placements(self, grad_placements: &[Placement]) -> Result<Tensor<D>> {
        let summed = summed_dims(self.mesh(), self.placements(), grad_placements)?;
        self.with_summed_grad(&summed)
    }
}

fn replicated_dims(spec: &DTensorSpec) -> impl Iterator<Item = usize> {
    let placements = spec.placements().iter().enumerate();
    placements
        .filter(|(_, placement)| placement.is_replicate())
        .map(|(dim, _)| dim)
}

/// Returns the mesh dimensions on which each rank computes only a partial sum of the gradient of a
/// value laid out as `forward`.
///
/// # Errors
/// As [`to_local_with_grad_placements`](DTensor::to_local_with_grad_placements).
pub(super) fn summed_dims(
    mesh: &DeviceMesh,
    forward: &[Placement],
    grads: &[Placement],
) -> Result<MeshDims> {
    Layout::new(mesh.shape(), grads)?;
    let mut summed = MeshDims::new();
    for (dim, (&forward, &grad)) in forward.iter().zip(grads).enumerate() {
        let natural = if forward.shard_dim().is_some() {
            forward
        } else {
            Placement::Replicate
        };
        // No other rank has a gradient for a shard of this value, so nothing has to be summed.
        if grad == Placement::Partial(PartialOp::Sum) && natural.is_replicate() {
            summed.push(dim);
        } else if grad != natural {
            let mesh_dim = mesh_dim_name(mesh, dim);
            return Err(DTensorError::GradPlacement {
                mesh_dim,
                forward,
                grad,
                natural,
            }
            .into());
        }
    }
    Ok(summed)
}

/// The tensor on the [mesh of its device](DeviceMesh::single_device), for a program that runs on
/// one device. On ranks of a launch, name the mesh: [`from_local`](DTensor::from_local),
/// [`replicated_like`](DTensor::replicated_like).
impl<const D: usize, K: Kind> From<Tensor<D, K>> for DTensor<D, K> {
    fn from(tensor: Tensor<D, K>) -> Self {
        let mesh = DeviceMesh::single_device(&tensor.device());
        Self::replicated_on(tensor, &mesh).expect("the mesh has this rank alone")
    }
}
