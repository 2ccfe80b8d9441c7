//! Access to buffers by path: [`read`] and [`write`].

use std::collections::HashSet;

use burn::backend::{DispatchTensor, TensorMetadata};
use burn::module::Module;

use crate::burn_compat::map_tensors;
use crate::comm::TensorMeta;
use crate::param::states::copying;
use crate::param::stored::{NewValue, Replace, visit_stored};

/// Returns the plain values at `paths`, which are in burn's order.
///
/// Reading a lazy value initializes it. If `draw` is false, a lazy value is read as zeros instead.
pub(super) fn read<M: Module>(model: &M, paths: &[String], draw: bool) -> Vec<DispatchTensor> {
    let wanted: HashSet<_> = paths.iter().map(String::as_str).collect();
    visit_stored(model, draw, |path| wanted.contains(path)).into_iter().map(|stored| stored.value).collect()
}

/// Returns the model with these plain values at these paths. Running statistics are written in place, so all clones
/// of the model see them.
pub(super) fn write<M: Module>(model: M, paths: Vec<String>, values: Vec<DispatchTensor>) -> M {
    let values = paths.into_iter().zip(values.into_iter().map(|value| NewValue::Tensor(Box::new(value)))).collect();
    copying(|| map_tensors(model, &mut Replace::new(values)))
}

/// Returns the shape and element type of a tensor that the other ranks will receive.
pub(super) fn meta(tensor: &DispatchTensor) -> TensorMeta {
    TensorMeta { shape: tensor.shape(), dtype: tensor.dtype() }
}
