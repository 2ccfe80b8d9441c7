//! Tensors of a model as DTensors by path: [`capture`] reads them, and [`targets`] describes them.

use std::collections::BTreeMap;
use std::sync::Arc;

use burn::backend::TensorMetadata;
use burn::module::Module;

use crate::Result;
use crate::dtensor::{DTensorSpec, DynDTensor};
use crate::mesh::DeviceMesh;
use crate::param::{StoredTensor, stored_tensors};
use crate::placement::Layout;

/// Returns the tensors of `model` by path, without copying them. Draws the values of lazy
/// parameters. A tensor that is not distributed counts as replicated over `mesh`.
///
/// Local: no communication.
///
/// # Errors
/// [`ParamError::Replaced`](crate::param::ParamError::Replaced), and
/// [`MeshError::NotAMember`](crate::mesh::MeshError::NotAMember) outside `mesh`.
pub(super) fn capture<M: Module>(
    model: &M,
    mesh: &DeviceMesh,
) -> Result<BTreeMap<String, DynDTensor>> {
    let captured = stored_tensors(model, true)?.into_iter().map(|stored| {
        let spec = spec(&stored, mesh)?;
        Ok((stored.path, DynDTensor::from_parts(stored.value, spec)))
    });
    captured.collect()
}

/// Returns the specs of the tensors of `model` by path, for a load that reads only these. A tensor
/// that is not distributed counts as replicated over `mesh`.
///
/// Local: no communication. Lazy parameters are not drawn.
///
/// # Errors
/// Those of [`capture`].
pub(super) fn targets<M: Module>(
    model: &M,
    mesh: &DeviceMesh,
) -> Result<BTreeMap<String, Arc<DTensorSpec>>> {
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
    let shape = stored.value.shape();
    let dtype = stored.value.dtype();
    Ok(DTensorSpec::new(mesh, Layout::replicate(mesh.shape())?, shape, dtype)?.shared())
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use burn::nn::{Linear, LinearConfig};
    use burn::tensor::{DType, TensorData};

    use super::*;
    use crate::comm::{Launch, launch};
    use crate::fsdp::{FullyShard, full_model, fully_shard};
    use crate::memory;
    use crate::param::{NewValue, replace_tensors};

    /// Rows of four equal elements, in memory that is not an ordinary allocation, as a reader of
    /// files may pass them.
    fn foreign(rows: usize) -> TensorData {
        memory::flex::tests::foreign(rows).into_data()
    }

    /// Each rank passes its shard of the full values, in another dtype.
    #[test]
    fn local_values_replace_those_of_the_paths() {
        launch(Launch::threads(2), |world| {
            let mesh = DeviceMesh::new(world, [2], ["shard"])?;
            let device = world.device().clone().autodiff();
            let model: Linear = fully_shard(
                LinearConfig::new(6, 4).init(&device),
                &mesh,
                FullyShard::new(),
            )?;
            let bias = full_model(&model)?.bias.map(|bias| bias.val().into_data());
            let id = model.weight.id;
            let targets = targets(&model, &mesh)?;
            assert_eq!(targets["weight"].local_range(0), [0..3, 3..6][mesh.rank()]);
            let full = foreign(6);
            let local = |full: &TensorData| {
                let tensor = DynDTensor::from_full_data(
                    full.clone(),
                    &mesh,
                    targets["weight"].layout().clone(),
                )?;
                Ok::<_, crate::Error>(tensor.local_data())
            };
            let values = |data| BTreeMap::from([("weight".to_owned(), NewValue::Data(data))]);
            let model = replace_tensors(model, values(local(&full)?.convert_dtype(DType::F64)))?;
            let gathered = full_model(&model)?;
            assert_eq!(gathered.weight.val().into_data(), full);
            assert_eq!(gathered.bias.map(|bias| bias.val().into_data()), bias);
            assert!(model.weight.is_require_grad() && model.weight.id == id);
            // Other ranks read shards in place.
            let model = replace_tensors(model, values(foreign(3)))?;
            assert!(memory::is_persistent(
                &model.weight.base().inner().into_dispatch()
            ));
            assert!(
                replace_tensors(
                    model,
                    BTreeMap::from([("other".to_owned(), NewValue::Data(full))])
                )
                .is_err()
            );
            Ok(())
        })
        .unwrap_or_else(|error| panic!("{error}"));
    }
}
