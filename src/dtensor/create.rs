//! Between plain local tensors and DTensors: [`from_local`](DTensor::from_local) and
//! [`to_local`](DTensor::to_local).

use burn::tensor::{Shape, Tensor};

use super::spec::mesh_dim_name;
use super::{DTensor, DTensorError, DTensorSpec, Kind, MeshDims};
use crate::Result;
use crate::mesh::DeviceMesh;
use crate::placement::{Layout, PartialOp, Placement};

impl<const D: usize, K: Kind> DTensor<D, K> {
    /// Reads each rank's `local` tensor as its part of one tensor, assuming that all ranks' parts
    /// have the same shape: a dimension sharded over `k` ranks is `k` times as long globally.
    ///
    /// Nothing is sent and nothing is compared; [`from_local_checked`](Self::from_local_checked)
    /// does. The tensor stays in its autodiff graph: its gradient is laid out as invariant 1 of
    /// [this module](super) says.
    ///
    /// # Errors
    /// [`MeshError::NotAMember`](crate::mesh::MeshError::NotAMember), or
    /// [`PlacementError`](crate::placement::PlacementError) for a wrong number of placements or a dimension out of
    /// range.
    pub fn from_local(local: Tensor<D, K>, mesh: &DeviceMesh, placements: &[Placement]) -> Result<Self> {
        let layout = Layout::new(mesh.shape(), placements)?;
        layout.check(D)?;
        let mut dims = local.dims();
        for (dim, shardings) in layout.orders() {
            dims[dim] *= shardings.iter().map(|&sizes| mesh.shape()[sizes]).product::<usize>();
        }
        let spec = DTensorSpec::new(mesh, layout, Shape::from(dims), local.dtype())?;
        Ok(Self::from_parts(local, spec.shared()))
    }

    /// [`from_local`](Self::from_local) of a tensor of known global `shape`, whose parts may be
    /// uneven or empty.
    ///
    /// # Errors
    /// As [`from_local`](Self::from_local), and [`DTensorError::LocalShape`] if `local` is not the
    /// part that `shape` and `placements` put on this rank.
    pub fn from_local_with_shape(
        local: Tensor<D, K>,
        mesh: &DeviceMesh,
        placements: &[Placement],
        shape: impl Into<Shape>,
    ) -> Result<Self> {
        Self::from_local_with_layout(local, mesh, Layout::new(mesh.shape(), placements)?, shape)
    }

    /// [`from_local_with_shape`](Self::from_local_with_shape) with an order of cuts, or lengths.
    ///
    /// # Errors
    /// As [`from_local_with_shape`](Self::from_local_with_shape), [`DTensorError::LayoutMesh`] for a
    /// layout of another mesh shape, and
    /// [`ShardSizeSum`](crate::placement::PlacementError::ShardSizeSum) for lengths that are not the tensor's.
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
        Ok(Self::from_parts(local, spec.shared()))
    }

    /// This rank's tensor.
    ///
    /// The gradient that comes back for it must be laid out as invariant 1 of [this
    /// module](super) says: the same on all ranks that hold the same value. Where ranks go on to
    /// compute different things with a replicated value, use [`vary`](DTensor::vary) or
    /// [`to_local_with_grad_placements`](DTensor::to_local_with_grad_placements).
    pub fn to_local(self) -> Tensor<D, K> {
        self.local
    }
}

impl<const D: usize> DTensor<D> {
    /// This rank's tensor, for a computation whose gradient is laid out as `grad_placements`: the
    /// placements of the value with Replicate for Partial, or `P(sum)` on the mesh dimensions where
    /// each rank makes only a term of the gradient, which backward then adds up.
    ///
    /// # Collective
    /// In backward, with a `P(sum)`: every rank of the mesh.
    ///
    /// # Errors
    /// [`DTensorError::GradPlacement`] for any other placement, and
    /// [`PlacementError`](crate::placement::PlacementError) for a wrong number of them.
    #[track_caller]
    pub fn to_local_with_grad_placements(self, grad_placements: &[Placement]) -> Result<Tensor<D>> {
        let summed = summed_dims(self.mesh(), self.placements(), grad_placements)?;
        self.with_summed_grad(&summed)
    }
}

/// The mesh dimensions on which each rank makes only a term of the gradient of a value laid out as `forward`.
///
/// # Errors
/// As [`to_local_with_grad_placements`](DTensor::to_local_with_grad_placements).
pub(super) fn summed_dims(mesh: &DeviceMesh, forward: &[Placement], grads: &[Placement]) -> Result<MeshDims> {
    Layout::new(mesh.shape(), grads)?;
    let mut summed = MeshDims::new();
    for (dim, (&forward, &grad)) in forward.iter().zip(grads).enumerate() {
        let natural = if forward.shard_dim().is_some() { forward } else { Placement::Replicate };
        // A shard of a sharded value is nobody else's: there is nothing to add up.
        if grad == Placement::Partial(PartialOp::Sum) && natural.is_replicate() {
            summed.push(dim);
        } else if grad != natural {
            let mesh_dim = mesh_dim_name(mesh, dim);
            return Err(DTensorError::GradPlacement { mesh_dim, forward, grad, natural }.into());
        }
    }
    Ok(summed)
}
