//! Tensors that a model stores, by path: [`stored_tensors`], [`release_shards`] and
//! [`replace_tensors`].

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use burn::backend::{DispatchTensor, TensorMetadata};
use burn::module::{Module, Param, ParamId, Parameter, Reparameterization};
use burn::tensor::{DType, Device, Tensor, TensorData};

use super::ParamError;
use super::distributed::{DistributedParameter, copying, take_visited};
use super::model_scan::ModelScan;
use super::shards::ShardMarker;
use crate::Result;
use crate::burn_compat::{
    self, ModulePath, TensorMapper, TensorVisitor, map_tensors, undrawn, visit_tensors,
};
use crate::dtensor::{DTensorSpec, Kind, associate, cast, own};
use crate::memory;

/// A tensor that a model stores: a parameter, this rank's shard of one, or a buffer.
pub(crate) struct StoredTensor {
    pub(crate) path: String,
    /// Value without autodiff. A lazy parameter that was not drawn has zeros, which take no memory.
    pub(crate) value: DispatchTensor,
    /// Spec of a distributed parameter; `None` for every other tensor.
    pub(crate) spec: Option<Arc<DTensorSpec>>,
}

/// Returns all tensors of `model`, in burn's order. They share the memory of the model. Updates of
/// running statistics that a thread has postponed are applied first, in `model` too.
///
/// Reading a lazy parameter draws its values. If `draw` is false, it is read as zeros instead.
///
/// Local: no communication.
///
/// # Errors
/// [`ParamError::Replaced`] if a parameter was replaced after it was distributed.
pub(crate) fn stored_tensors<M: Module>(model: &M, draw: bool) -> Result<Vec<StoredTensor>> {
    let scan = ModelScan::of(model);
    scan.check_not_replaced()?;
    if scan.has_running() {
        settled(model);
    }
    Ok(visit_stored(model, draw, |_| true))
}

/// Returns the model in validation, with private buffers. Lazy parameters are replaced by empty
/// tensors, so nothing is initialized.
///
/// Updates of statistics that a thread has postponed are applied now, in `model` too.
pub(crate) fn settled<M: Module>(model: &M) -> M {
    copying(|| burn_compat::settled(model))
}

/// Returns the tensors of `model` whose paths are `wanted`, in burn's order, without checks.
pub(super) fn visit_stored<M: Module>(
    model: &M,
    draw: bool,
    wanted: impl FnMut(&str) -> bool,
) -> Vec<StoredTensor> {
    let mut visit = StoredVisitor {
        wanted,
        draw,
        last: false,
        found: Vec::new(),
    };
    take_visited();
    visit_tensors(model, &mut visit);
    visit.found
}

struct StoredVisitor<F> {
    wanted: F,
    draw: bool,
    /// True if the last tensor of `found` is the one that was visited last. It is distributed if
    /// its reparameterization follows.
    last: bool,
    found: Vec<StoredTensor>,
}

impl<F: FnMut(&str) -> bool> TensorVisitor for StoredVisitor<F> {
    fn exit(&mut self, path: &ModulePath) {
        if path
            .last()
            .is_some_and(|(name, _)| name == DistributedParameter::NAME)
            && let Some(param) = take_visited()
            && std::mem::take(&mut self.last)
            && let Some(stored) = self.found.last_mut()
        {
            stored.spec = Some(param.spec(stored.value.dtype()));
        }
    }

    fn tensor<const D: usize, K: Kind>(&mut self, at: &ModulePath, param: &Param<Tensor<D, K>>)
    where
        Tensor<D, K>: Parameter,
    {
        if ShardMarker::is_at(at) {
            return;
        }
        let path = at.join();
        self.last = (self.wanted)(&path);
        if self.last {
            let value = match param.is_initialized() || self.draw {
                true => param.base(),
                false => undrawn(param.clone()).base(),
            };
            self.found.push(StoredTensor {
                path,
                value: value.without_autodiff().into_dispatch(),
                spec: None,
            });
        }
    }
}

/// Returns the model with zeros, which take no memory, in place of this rank's shards of the
/// distributed parameters whose paths are `wanted`. The rest of the parameters stays as it is, and
/// so do all clones of the model: their shards are freed with the last of them. [`replace_tensors`]
/// then gives the parameters new values.
///
/// Local: no communication. Every rank of the model must call it, because clones of a parameter are
/// then told apart.
pub(crate) fn release_shards<M: Module>(model: M, wanted: impl FnMut(&str) -> bool) -> M {
    let stored = visit_stored(&model, false, wanted).into_iter();
    let paths = stored
        .filter(|stored| stored.spec.is_some())
        .map(|stored| stored.path)
        .collect();
    map_tensors(model, &mut Release { paths })
}

struct Release {
    paths: HashSet<String>,
}

impl TensorMapper for Release {
    fn float<const D: usize>(
        &mut self,
        path: &ModulePath,
        param: Param<Tensor<D>>,
    ) -> Param<Tensor<D>> {
        if !self.paths.contains(&path.join()) {
            return param;
        }
        param.map(|shard| {
            let placeholder = memory::placeholder(&shard.clone().into_dispatch());
            stored_like(&shard, Tensor::from_dispatch(placeholder))
        })
    }
}

/// Returns a tensor without autodiff as the model stores it in place of `old`: with its autodiff
/// settings.
pub(crate) fn stored_like<const D: usize, K: Kind>(
    old: &Tensor<D, K>,
    plain: Tensor<D, K>,
) -> Tensor<D, K>
where
    Tensor<D, K>: Parameter,
{
    let stored = associate(plain, old.gradient_checkpointing_strategy());
    Parameter::set_require_grad(stored, Parameter::is_require_grad(old))
}

/// A value for a tensor of a model, of the same shape and kind.
#[derive(Debug, Clone)]
pub(crate) enum NewValue {
    /// Elements in host memory.
    Data(TensorData),
    /// A tensor without autodiff, whose memory the model will share if it is on the right device
    /// and has the right dtype.
    Tensor(Box<DispatchTensor>),
}

/// Returns the model with these values in place of the stored tensors at their paths. All other
/// tensors stay as they are, and lazy ones stay lazy. Ids, devices, dtypes, mappers, training state
/// and distribution are kept.
///
/// Parameters with one id that get the same value (tied weights) share one tensor. Running
/// statistics are written in place, so all clones of the model see them.
///
/// Local: no communication. Every rank of the model must call it, because clones of a parameter are
/// then told apart. Call [`stored_tensors`] before: an update of running statistics that is still
/// postponed would take the place of the new value.
///
/// # Errors
/// [`ParamError::ParamNotVisited`] for a path that the model's `map` does not visit.
pub(crate) fn replace_tensors<M: Module>(
    model: M,
    values: BTreeMap<String, NewValue>,
) -> Result<M> {
    let mut replace = Replace::new(values);
    let model = map_tensors(model, &mut replace);
    match replace.values.pop_first() {
        Some((param, _)) => Err(ParamError::ParamNotVisited { param }.into()),
        None => Ok(model),
    }
}

/// Mapper that replaces the tensors at the paths of `values`.
pub(super) struct Replace {
    values: BTreeMap<String, NewValue>,
    /// New tensors by their parameters' ids and training state: without autodiff, and as the model
    /// stores them.
    known: HashMap<(ParamId, bool), [DispatchTensor; 2]>,
}

impl Replace {
    pub(super) fn new(values: BTreeMap<String, NewValue>) -> Self {
        Self {
            values,
            known: HashMap::new(),
        }
    }
}

impl TensorMapper for Replace {
    fn tensor<const D: usize, K: Kind>(
        &mut self,
        path: &ModulePath,
        param: Param<Tensor<D, K>>,
    ) -> Param<Tensor<D, K>>
    where
        Tensor<D, K>: Parameter,
    {
        let Some(value) = self.values.remove(&path.join()) else {
            return param;
        };
        let param = if param.is_initialized() {
            param
        } else {
            undrawn(param)
        };
        let id = param.id;
        param.map(|old| {
            let is_trained = Parameter::is_require_grad(&old);
            let plain: Tensor<D, K> = value.on(&old.device().inner(), old.dtype());
            debug_assert_eq!(plain.shape(), old.shape());
            if let Some([known, stored]) = self.known.get(&(id, is_trained))
                && Tensor::<D, K>::from_dispatch(known.clone()).into_data()
                    == plain.clone().into_data()
            {
                return Tensor::from_dispatch(stored.clone());
            }
            let stored = stored_like(&old, plain.clone());
            self.known.insert(
                (id, is_trained),
                [plain.into_dispatch(), stored.clone().into_dispatch()],
            );
            stored
        })
    }
}

impl NewValue {
    /// Returns the value on this device and with this dtype.
    fn on<const D: usize, K: Kind>(self, device: &Device, dtype: DType) -> Tensor<D, K> {
        match self {
            Self::Data(data) => {
                // The memory of data that was read from a file is not always that of tensors.
                Tensor::from_dispatch(own(
                    Tensor::<D, K>::from_data(data, (device, dtype)).into_dispatch()
                ))
            }
            Self::Tensor(tensor) => {
                let tensor = Tensor::<D, K>::from_dispatch(*tensor);
                let tensor = match tensor.device() == *device {
                    true => tensor,
                    // Data of a GPU that is moved to the host is read later, and keeps its memory
                    // there.
                    false => Tensor::from_dispatch(own(tensor.to_device(device).into_dispatch())),
                };
                match tensor.dtype() == dtype {
                    _ if dtype.is_float() => cast(tensor, dtype),
                    true => tensor,
                    false => Self::Data(tensor.into_data()).on(device, dtype),
                }
            }
        }
    }
}
