//! [`DynDTensor`]: a DTensor whose number of dimensions and kind are not in its type.

use std::fmt;
use std::sync::Arc;

use burn::backend::DispatchTensor;
use burn::tensor::{DType, Tensor, TensorData};

use super::distribute::send_parts;
use super::kind::is_of_kind;
use super::{DTensor, DTensorSpec, Kind};
use crate::comm::Call;
use crate::mesh::DeviceMesh;
use crate::placement::Layout;
use crate::{Result, memory};

/// Evaluates an expression with the number of dimensions and the kind of a spec's tensors as
/// constants.
macro_rules! with_type {
    ($spec:expr, $D:ident, $K:ident => $run:expr) => {{
        use burn::tensor::{Bool, Float, Int, kind};
        macro_rules! of {
            ($n:literal) => {{
                const $D: usize = $n;
                match super::kind::kind_of($spec.dtype()) {
                    kind::Kind::Float => {
                        type $K = Float;
                        $run
                    }
                    kind::Kind::Int => {
                        type $K = Int;
                        $run
                    }
                    kind::Kind::Bool => {
                        type $K = Bool;
                        $run
                    }
                }
            }};
        }
        match $spec.shape().num_dims() {
            0 => of!(0),
            1 => of!(1),
            2 => of!(2),
            3 => of!(3),
            4 => of!(4),
            5 => of!(5),
            6 => of!(6),
            7 => of!(7),
            8 => of!(8),
            dims => unreachable!(
                "burn's parameters and optimizer states have at most 8 dimensions, not {dims}"
            ),
        }
    }};
}

/// A [`DTensor`] whose number of dimensions and kind are not in its type, for collections of
/// different tensors. It has no autodiff graph.
///
/// ```
/// use burn::tensor::{Bool, Int, Tensor};
/// use burn_dtensor::dtensor::DynDTensor;
/// use burn_dtensor::prelude::*;
///
/// launch(Launch::threads(2), |world| {
///     let mesh = DeviceMesh::new(world, [2], ["shard"])?;
///     let rows = DTensor::distribute_replicated(Tensor::<2>::ones([4, 3], world.device()), &mesh, &[Placement::Shard(0)])?;
///     let tensors: Vec<DynDTensor> = vec![rows.clone().lower_elem(2.0).into(), rows.into()];
///     assert_eq!(tensors[1].local_data().shape().as_slice(), [2, 3]);
///     let rows: DTensor<2> = tensors[1].dtensor().expect("it is a float matrix");
///     assert_eq!(rows.dims(), [4, 3]);
///     let bools = &tensors[0];
///     assert!(bools.dtensor::<2, Bool>().is_some());
///     assert!(bools.dtensor::<1, Bool>().is_none() && bools.dtensor::<2, Int>().is_none());
///     Ok(())
/// })?;
/// # Ok::<_, burn_dtensor::Error>(())
/// ```
#[derive(Clone)]
pub struct DynDTensor {
    spec: Arc<DTensorSpec>,
    local: DispatchTensor,
}

impl<const D: usize, K: Kind> From<DTensor<D, K>> for DynDTensor {
    fn from(tensor: DTensor<D, K>) -> Self {
        let spec = tensor.spec.clone();
        Self {
            spec,
            local: tensor.local.inner().into_dispatch(),
        }
    }
}

impl<const D: usize, K: Kind> From<&DTensor<D, K>> for DynDTensor {
    fn from(tensor: &DTensor<D, K>) -> Self {
        tensor.clone().into()
    }
}

impl DynDTensor {
    /// Creates the tensor from a plain local tensor and its spec, which the caller knows to match.
    pub(crate) fn from_parts(local: DispatchTensor, spec: Arc<DTensorSpec>) -> Self {
        Self { spec, local }
    }

    /// Returns the tensor, which is of floats, in another float dtype. Local: no communication.
    pub(crate) fn cast(self, dtype: DType) -> Self {
        let spec = self.spec.in_dtype(dtype);
        let data = self.into_local_data().convert_dtype(dtype);
        Self::from_local_data(data, &spec)
    }

    /// Creates the tensor from this rank's local tensor, in host memory and with the dtype of the
    /// data. The caller knows that the shape matches the spec.
    pub(crate) fn from_local_data(data: TensorData, spec: &Arc<DTensorSpec>) -> Self {
        let spec = spec.in_dtype(data.dtype());
        let local = with_type!(spec, D, K => on_host::<D, K>(data).into_dispatch());
        Self { spec, local }
    }

    /// Distributes a full tensor that every rank holds, in host memory and with the dtype of the
    /// data. Local: each rank takes its shard.
    pub(crate) fn from_full_data(
        data: TensorData,
        mesh: &DeviceMesh,
        layout: Layout,
    ) -> Result<Self> {
        let full = DTensorSpec::new(
            mesh,
            Layout::replicate(mesh.shape())?,
            data.shape().clone(),
            data.dtype(),
        )?;
        with_type!(full, D, K => Ok(DTensor::distribute_computed(on_host::<D, K>(data), mesh, layout)?.into()))
    }

    /// Sends the full tensor that global rank `source` of the spec's mesh passes, cast to the
    /// spec's dtype. The other ranks pass `None`. The local tensors are on the ranks' devices.
    ///
    /// # Collective
    /// Every rank of the mesh.
    pub(crate) fn distribute_from(
        source: usize,
        full: Option<TensorData>,
        spec: Arc<DTensorSpec>,
        call: &Call,
    ) -> Result<Self> {
        let mesh = spec.mesh();
        let position = mesh
            .ranks()
            .iter()
            .position(|&rank| rank == source)
            .expect("the source is in the mesh");
        let source = mesh.coordinate_at(position)?;
        let local = with_type!(spec, D, K => {
            let full = full.map(|data| Tensor::<D, K>::from_data(data, (mesh.device(), spec.dtype())));
            send_parts(full, &spec, &source, call)?.into_dispatch()
        });
        Ok(Self { spec, local })
    }

    /// Returns mesh, layout, global shape and dtype.
    pub fn spec(&self) -> &Arc<DTensorSpec> {
        &self.spec
    }

    /// Returns this rank's local tensor, without autodiff.
    pub(crate) fn local(&self) -> &DispatchTensor {
        &self.local
    }

    /// Returns the tensor; `None` if it does not have `D` dimensions or is not of kind `K`. Local:
    /// no communication.
    pub fn dtensor<const D: usize, K: Kind>(&self) -> Option<DTensor<D, K>> {
        (self.spec.shape().num_dims() == D && is_of_kind::<K>(self.spec.dtype()))
            .then(|| self.typed())
    }

    fn typed<const D: usize, K: Kind>(&self) -> DTensor<D, K> {
        DTensor::from_parts(Tensor::from_dispatch(self.local.clone()), self.spec.clone())
    }

    /// Returns this rank's local tensor as data. Local: no communication.
    pub fn local_data(&self) -> TensorData {
        self.clone().into_local_data()
    }

    /// Returns this rank's local tensor as data, without a copy if nothing else shares its memory.
    pub(crate) fn into_local_data(self) -> TensorData {
        let data =
            with_type!(self.spec, D, K => Tensor::<D, K>::from_dispatch(self.local).into_data());
        // On a GPU, data is read when it is first accessed, and may have been written in place by
        // then.
        let _ = data.as_bytes();
        data
    }

    /// Returns the full tensor as data, on every rank.
    ///
    /// # Collective
    /// Every rank of the mesh.
    ///
    /// # Errors
    /// [`Error::Comm`](crate::Error::Comm) if a collective fails.
    pub fn full_data(&self) -> Result<TensorData> {
        Ok(self.clone().replicated()?.local_data())
    }

    /// Redistributes the tensor, like [`DTensor::redistribute_to`].
    ///
    /// # Collective
    /// Every rank of the mesh.
    ///
    /// # Errors
    /// As [`DTensor::redistribute_to`].
    pub fn redistribute_to(self, layout: &Layout) -> Result<Self> {
        if self.spec.layout() == layout {
            return Ok(self);
        }
        with_type!(self.spec, D, K => Ok(self.typed::<D, K>().redistribute_to(layout)?.into()))
    }

    /// Gathers the full tensor on every rank.
    ///
    /// # Collective
    /// Every rank of the mesh.
    pub(crate) fn replicated(self) -> Result<Self> {
        let layout = Layout::replicate(self.spec.mesh().shape())?;
        self.redistribute_to(&layout)
    }

    /// Redistributes the tensor to `layout` on `mesh`. If that is another mesh, every rank holds
    /// the full tensor for a moment.
    ///
    /// # Collective
    /// Every rank of both meshes, which must have the same ranks.
    ///
    /// # Errors
    /// As [`DTensor::redistribute_to`].
    pub(crate) fn redistribute_onto(self, mesh: &DeviceMesh, layout: &Layout) -> Result<Self> {
        if self.spec.mesh().congruent(mesh) {
            return self.redistribute_to(layout);
        }
        let full = self.replicated()?;
        with_type!(full.spec, D, K => {
            Ok(DTensor::distribute_computed(full.typed::<D, K>().to_local(), mesh, layout.clone())?.into())
        })
    }
}

/// Creates a tensor in host memory, in the dtype of the data instead of the device's default.
fn on_host<const D: usize, K: Kind>(data: TensorData) -> Tensor<D, K> {
    let dtype = data.dtype();
    Tensor::from_data(data, (&memory::host(), dtype))
}

/// Formats the tensor as [`DTensor`] is formatted: `DTensor[8, 16] f32 on DeviceMesh(dp=2, tp=2):
/// [S(0), R]`.
impl fmt::Debug for DynDTensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DTensor{}", self.spec)
    }
}
