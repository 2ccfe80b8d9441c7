//! [`DTensor`]: a local tensor and its spec.

use std::sync::Arc;

use burn::tensor::{DType, Device, Float, Gradients, Shape, Tensor};

use super::redistribute_cache::SharedCache;
use super::{DTensorSpec, Kind};
use crate::mesh::DeviceMesh;
use crate::placement::{Layout, Placement};

/// This rank's part of a tensor of `D` dimensions that is laid out over a mesh of ranks.
///
/// Cheap to clone. Clones share the handles that [`vary`](Self::vary) makes, until backward, so that
/// q, k and v computed from clones of one activation share one all-reduce in it.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_dtensor::Error;
/// use burn_dtensor::comm::{Launch, launch};
/// use burn_dtensor::dtensor::DTensor;
/// use burn_dtensor::mesh::DeviceMesh;
/// use burn_dtensor::placement::Placement::{Replicate, Shard};
///
/// launch(Launch::threads(4), |world| {
///     let mesh = DeviceMesh::new(world, [2, 2], ["dp", "tp"])?;
///     let full = Tensor::<2>::ones([8, 16], &Device::flex());
///     let rows = DTensor::distribute_tensor(full, &mesh, &[Shard(0), Replicate])?;
///     assert_eq!(rows.local().dims(), [4, 16]);
///     let columns = rows.redistribute(&[Replicate, Shard(1)])?;
///     assert_eq!(columns.local().dims(), [8, 8]);
///     assert_eq!(columns.full_tensor()?.dims(), [8, 16]);
///     Ok(())
/// })?;
/// # Ok::<_, burn_dtensor::Error>(())
/// ```
///
/// Methods that communicate say so under *Collective*: every rank of the mesh must call them, in
/// the same order.
pub struct DTensor<const D: usize, K: Kind = Float> {
    pub(super) local: Tensor<D, K>,
    pub(super) spec: Arc<DTensorSpec>,
    /// Made by the first `clone` or `vary`.
    pub(super) handles: SharedCache<D>,
}

impl<const D: usize, K: Kind> Clone for DTensor<D, K> {
    fn clone(&self) -> Self {
        Self { local: self.local.clone(), spec: self.spec.clone(), handles: self.handles.clone() }
    }
}

impl<const D: usize, K: Kind> DTensor<D, K> {
    /// Joins a local tensor and its spec. The caller knows that they fit.
    pub(crate) fn from_parts(local: Tensor<D, K>, spec: Arc<DTensorSpec>) -> Self {
        debug_assert_eq!(local.shape(), spec.local_shape(), "{spec:?}");
        Self { local, spec, handles: SharedCache::default() }
    }

    /// What the local tensor is a part of.
    pub fn spec(&self) -> &Arc<DTensorSpec> {
        &self.spec
    }

    /// The mesh.
    pub fn mesh(&self) -> &DeviceMesh {
        self.spec.mesh()
    }

    /// Placements and the order of cuts.
    pub fn layout(&self) -> &Layout {
        self.spec.layout()
    }

    /// One placement per mesh dimension.
    pub fn placements(&self) -> &[Placement] {
        self.spec.placements()
    }

    /// Global shape.
    pub fn shape(&self) -> Shape {
        self.spec.shape().clone()
    }

    /// Global shape, as an array.
    pub fn dims(&self) -> [usize; D] {
        self.spec.shape().dims()
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.spec.dtype()
    }

    /// Where the local tensor is.
    pub fn device(&self) -> Device {
        self.local.device()
    }

    /// The same, with the local tensor on `device`, as burn's [`to_device`](Tensor::to_device); each rank
    /// chooses its own.
    #[must_use]
    pub fn to_device(self, device: &Device) -> Self {
        Self::from_parts(self.local.to_device(device), self.spec)
    }

    /// The local tensor, borrowed: its values, outside the layout's rules for gradients.
    pub fn local(&self) -> &Tensor<D, K> {
        &self.local
    }
}

impl<const D: usize> DTensor<D> {
    /// Marks the local tensor as a leaf whose gradient is kept, as burn's
    /// [`require_grad`](Tensor::require_grad) does. The gradient is laid out as invariant 1 of
    /// [this module](super) says.
    #[must_use]
    pub fn require_grad(self) -> Self {
        Self::from_parts(self.local.autodiff().require_grad(), self.spec)
    }

    /// The gradient of this tensor, which is a leaf, as burn's [`grad`](Tensor::grad): laid out as the tensor,
    /// but Replicate where that is Partial, since every rank's term counts in full. Without autodiff. `None` for
    /// a tensor that keeps none, or that is not in the loss.
    ///
    /// Local: no communication.
    pub fn grad(&self, grads: &Gradients) -> Option<Self> {
        let grad = self.local.grad(grads)?;
        let full = |_, own: Placement| if own.partial_op().is_some() { Placement::Replicate } else { own };
        let layout = self.layout().replaced(full).expect("there is no partial placement");
        let spec = self.spec.with_layout(layout).expect("its cuts are those of the tensor").with_dtype(grad.dtype());
        Some(Self::from_parts(grad, spec.shared()))
    }

    /// Cuts the tensor off the graph that made it.
    #[must_use]
    pub fn detach(self) -> Self {
        Self::from_parts(self.local.detach(), self.spec)
    }
}
