//! Tensors of a model as DTensors by path: [`capture`] reads them, [`targets`] describes them, and [`replace`] replaces
//! them.

use std::collections::BTreeMap;
use std::sync::Arc;

use burn::backend::TensorMetadata;
use burn::module::Module;
use burn::tensor::TensorData;

use crate::Result;
use crate::dtensor::{DTensorSpec, DynDTensor};
use crate::mesh::DeviceMesh;
use crate::param::{NewValue, StoredTensor, replace_tensors, stored_tensors};
use crate::placement::Layout;

/// Returns the tensors of `model` by path, without copying them. Draws the values of lazy parameters. A tensor that is
/// not distributed counts as replicated over `mesh`.
///
/// Local: no communication.
///
/// # Errors
/// [`ParamError::Replaced`](crate::param::ParamError::Replaced), and
/// [`MeshError::NotAMember`](crate::mesh::MeshError::NotAMember) outside `mesh`.
pub(super) fn capture<M: Module>(model: &M, mesh: &DeviceMesh) -> Result<BTreeMap<String, DynDTensor>> {
    let captured = stored_tensors(model, true)?.into_iter().map(|stored| {
        let spec = spec(&stored, mesh)?;
        Ok((stored.path, DynDTensor::from_parts(stored.value, spec)))
    });
    captured.collect()
}

/// Returns the specs of the tensors of `model` by path, for a load that reads only these. A tensor that is not
/// distributed counts as replicated over `mesh`.
///
/// Local: no communication. Lazy parameters are not drawn.
///
/// # Errors
/// Those of [`capture`].
pub(crate) fn targets<M: Module>(model: &M, mesh: &DeviceMesh) -> Result<BTreeMap<String, Arc<DTensorSpec>>> {
    let targets = stored_tensors(model, false)?.into_iter().map(|stored| {
        let spec = spec(&stored, mesh)?;
        Ok((stored.path, spec))
    });
    targets.collect()
}

fn spec(stored: &StoredTensor, mesh: &DeviceMesh) -> Result<Arc<DTensorSpec>> {
    if let Some(spec) = &stored.spec {
        return Ok(spec.clone());
    }
    let (shape, dtype) = (stored.value.shape(), stored.value.dtype());
    Ok(DTensorSpec::new(mesh, Layout::replicate(mesh.shape())?, shape, dtype)?.shared())
}

/// Returns the model with these local tensors at these paths. Each has the local shape that [`targets`] describes, and
/// is cast to the parameter's dtype. All other tensors stay as they are.
///
/// Local: no communication. Every rank of the model must call it, after [`targets`].
///
/// # Errors
/// [`ParamError::ParamNotVisited`](crate::param::ParamError::ParamNotVisited) for a path that the model's `map` does not
/// visit.
pub(crate) fn replace<M: Module>(model: M, values: BTreeMap<String, TensorData>) -> Result<M> {
    replace_tensors(model, values.into_iter().map(|(path, data)| (path, NewValue::Data(data))).collect())
}
