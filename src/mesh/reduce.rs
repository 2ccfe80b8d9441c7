//! Reductions of numbers and plain tensors over a mesh: [`DeviceMesh::all_reduce`].

use burn::backend::DispatchTensor;
use burn::tensor::{DType, Device, Tensor};

use super::DeviceMesh;
use crate::Result;
use crate::comm::ReduceOp;

/// A value that [`DeviceMesh::all_reduce`] reduces: an `f32`, an `f64`, or a `Tensor` of floats.
pub trait Reducible: sealed::Sealed {}

impl<T: sealed::Sealed> Reducible for T {}

mod sealed {
    use burn::backend::DispatchTensor;
    use burn::tensor::Device;

    pub trait Sealed: Sized {
        /// Converts the value to a tensor without autodiff. A number is put on `device`.
        fn into_plain(self, device: &Device) -> DispatchTensor;

        fn from_plain(tensor: DispatchTensor) -> Self;
    }
}

impl sealed::Sealed for f64 {
    fn into_plain(self, device: &Device) -> DispatchTensor {
        let dtype = if device.supports_dtype(DType::F64) {
            DType::F64
        } else {
            DType::F32
        };
        Tensor::<1>::from_data([self], (device, dtype)).into_dispatch()
    }

    fn from_plain(tensor: DispatchTensor) -> Self {
        Tensor::<1>::from_dispatch(tensor).into_scalar()
    }
}

impl sealed::Sealed for f32 {
    fn into_plain(self, device: &Device) -> DispatchTensor {
        Tensor::<1>::from_data([self], (device, DType::F32)).into_dispatch()
    }

    fn from_plain(tensor: DispatchTensor) -> Self {
        Tensor::<1>::from_dispatch(tensor).into_scalar()
    }
}

impl<const D: usize> sealed::Sealed for Tensor<D> {
    fn into_plain(self, _: &Device) -> DispatchTensor {
        self.inner().into_dispatch()
    }

    fn from_plain(tensor: DispatchTensor) -> Self {
        Self::from_dispatch(tensor)
    }
}

impl DeviceMesh {
    /// Reduces a loss, a metric or a count over all ranks of the mesh. With [`ReduceOp::Avg`], the
    /// result is the mean of the ranks' values. All ranks get a bitwise identical result.
    ///
    /// Values that control the flow of a program must be equal on all ranks; otherwise the ranks
    /// diverge. For example, each rank computes a validation loss on its own data. By comparing the
    /// mean, all ranks stop training after the same epoch:
    ///
    /// ```
    /// use burn_dtensor::prelude::*;
    ///
    /// launch(Launch::threads(2), |world| {
    ///     let mesh = DeviceMesh::new(world, [2], ["dp"])?;
    ///     // The loss that each rank measures, epoch by epoch.
    ///     let measured = [[4.0, 1.0, 3.0], [4.0, 2.0, 1.0]][world.rank()];
    ///     let (mut best, mut epochs) = (f64::INFINITY, 0);
    ///     for loss in measured {
    ///         let loss = mesh.all_reduce(loss, ReduceOp::Avg)?;
    ///         if loss >= best {
    ///             break; // early stopping: on all ranks, after the same epoch
    ///         }
    ///         (best, epochs) = (loss, epochs + 1);
    ///     }
    ///     assert_eq!((best, epochs), (1.5, 2));
    ///     Ok(())
    /// })?;
    /// # Ok::<_, burn_dtensor::Error>(())
    /// ```
    ///
    /// If ranks average over different numbers of items, reduce a sum and a count instead, together
    /// in one tensor. The result for a tensor is plain, whether or not the tensor has autodiff; for
    /// the gradient of a distributed loss, use a [`DTensor`](crate::dtensor::DTensor). An `f64` is
    /// reduced as `f64` if the device supports it, otherwise as `f32`. Reductions add in a fixed
    /// order.
    ///
    /// # Collective
    /// Every rank of the mesh.
    ///
    /// # Errors
    /// [`NotAMember`](super::MeshError::NotAMember) outside the mesh, and
    /// [`CommError`](crate::comm::CommError) if a rank fails, or passes another shape or element
    /// type.
    pub fn all_reduce<T: Reducible>(&self, value: T, op: ReduceOp) -> Result<T> {
        let work = self
            .all()?
            .all_reduce(self.call(), vec![value.into_plain(self.device())], op);
        Ok(T::from_plain(
            work.wait()?
                .pop()
                .expect("an all-reduce returns every tensor"),
        ))
    }
}
