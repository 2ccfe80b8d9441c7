//! [`DTensor`]: a local tensor together with its spec.

use std::sync::Arc;

use burn::tensor::{DType, Device, Float, Gradients, Shape, Tensor};

use super::redistribute_cache::SharedCache;
use super::{DTensorSpec, Kind};
use crate::error::OrUnwind;
use crate::mesh::DeviceMesh;
use crate::placement::{Layout, Placement};

/// A tensor of `D` dimensions that is laid out over a mesh of ranks; this value holds the calling
/// rank's local tensor.
///
/// Cloning is cheap. Clones share a cache of the handles that [`vary`](Self::vary) returns, until
/// backward. So `q`, `k` and `v` computed from clones of one activation share one all-reduce in
/// backward.
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
/// Methods that communicate have a section *Collective*: every rank of the mesh must call them, in
/// the same order.
pub struct DTensor<const D: usize, K: Kind = Float> {
    pub(super) local: Tensor<D, K>,
    pub(super) spec: Arc<DTensorSpec>,
    /// Cache of redistributed results, created by the first `clone` or `vary`.
    pub(super) handles: SharedCache<D>,
}

impl<const D: usize, K: Kind> Clone for DTensor<D, K> {
    fn clone(&self) -> Self {
        Self {
            local: self.local.clone(),
            spec: self.spec.clone(),
            handles: self.handles.clone(),
        }
    }
}

impl<const D: usize, K: Kind> DTensor<D, K> {
    /// Creates a DTensor from a local tensor and its spec, which the caller knows to match.
    pub(crate) fn from_parts(local: Tensor<D, K>, spec: Arc<DTensorSpec>) -> Self {
        debug_assert_eq!(local.shape(), spec.local_shape(), "{spec:?}");
        Self {
            local,
            spec,
            handles: SharedCache::default(),
        }
    }

    /// Returns the spec of the global tensor.
    pub fn spec(&self) -> &Arc<DTensorSpec> {
        &self.spec
    }

    /// Returns the device mesh over which the tensor is laid out.
    pub fn mesh(&self) -> &DeviceMesh {
        self.spec.mesh()
    }

    /// Returns the placements with shard order and shard sizes.
    pub fn layout(&self) -> &Layout {
        self.spec.layout()
    }

    /// Returns the placements, one per mesh dimension.
    pub fn placements(&self) -> &[Placement] {
        self.spec.placements()
    }

    /// Returns the global shape.
    pub fn shape(&self) -> Shape {
        self.spec.shape().clone()
    }

    /// Returns the global shape as an array.
    pub fn dims(&self) -> [usize; D] {
        self.spec.shape().dims()
    }

    /// Returns the element type.
    pub fn dtype(&self) -> DType {
        self.spec.dtype()
    }

    /// Returns the device of the local tensor.
    pub fn device(&self) -> Device {
        self.local.device()
    }

    /// Moves the local tensor to `device`, like burn's [`to_device`](Tensor::to_device). Local:
    /// each rank chooses its own device.
    #[must_use]
    pub fn to_device(self, device: &Device) -> Self {
        Self::from_parts(self.local.to_device(device), self.spec)
    }

    /// Borrows the local tensor, to read its values. Invariant 1 of [this module](super) does not
    /// cover gradients through it.
    pub fn local(&self) -> &Tensor<D, K> {
        &self.local
    }
}

impl<const D: usize> DTensor<D> {
    /// Marks the local tensor as a leaf whose gradient is kept, like burn's
    /// [`require_grad`](Tensor::require_grad). The gradient is laid out according to invariant 1 of
    /// [this module](super). Local.
    #[must_use]
    pub fn require_grad(self) -> Self {
        Self::from_parts(self.local.autodiff().require_grad(), self.spec)
    }

    /// Returns the gradient of this leaf, without autodiff, like burn's [`grad`](Tensor::grad). It
    /// is laid out as the tensor, with Replicate in place of Partial: each rank's partial value
    /// contributes fully to the sum. Returns `None` if the tensor keeps no gradient or is not in
    /// the loss.
    ///
    /// Local: no communication.
    pub fn grad(&self, grads: &Gradients) -> Option<Self> {
        let grad = self.local.grad(grads)?;
        let layout = self
            .layout()
            .replaced(|_, own| {
                if own.partial_op().is_some() {
                    Placement::Replicate
                } else {
                    own
                }
            })
            .expect("the partial placements were replaced");
        let spec = self
            .spec
            .with_layout(layout)
            .expect("same shard sizes")
            .with_dtype(grad.dtype());
        Some(Self::from_parts(grad, spec.shared()))
    }

    /// Computes the gradients of all leaves, like burn's [`backward`](Tensor::backward), from the
    /// full tensor: a partial loss is reduced first.
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor};
    /// use burn_dtensor::dtensor::DTensor;
    ///
    /// let x = DTensor::from(Tensor::<1>::from_floats([1.0, 2.0], &Device::flex().autodiff())).require_grad();
    /// let grads = x.clone().square().sum().backward();
    /// let grad = x.grad(&grads).expect("x is in the loss");
    /// assert_eq!(grad.to_local().into_data().to_vec::<f32>().unwrap(), [2.0, 4.0]);
    /// ```
    ///
    /// # Collective
    /// Every rank of the mesh: [`full_tensor`](Self::full_tensor), then what the forward
    /// communicates in backward.
    ///
    /// # Panics
    /// Unwinds with a typed [`Error`](crate::Error) if a collective fails; as burn's if nothing is
    /// tracked.
    #[track_caller]
    pub fn backward(self) -> Gradients {
        self.full_tensor().or_unwind().backward()
    }

    /// Detaches the tensor from the graph that computed it. Local.
    #[must_use]
    pub fn detach(self) -> Self {
        Self::from_parts(self.local.detach(), self.spec)
    }
}
