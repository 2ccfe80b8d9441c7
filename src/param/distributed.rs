//! [`DistributedParameter`]: the reparameterization through which `param.val()` returns the full parameter.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, Weak};

use burn::module::{
    Content, Devices, LoraAdapter, Module, ModuleDisplay, ModuleDisplayDefault, ModuleMapper,
    ModuleVisitor, Param, Reparameterization,
};
use burn::tensor::{DType, Device, Tensor};

use super::states::{ParamStateHandle, WeakState};
use super::unit::Unit;
use super::unit_name::UnitName;
use super::unit_spec::{DataParallelGroups, UnitParam};
use crate::Result;
use crate::burn_compat::{
    ADAPTER, Adapters, ModulePath, REPARAMETERIZATION, TensorMapper, map_tensors,
};
use crate::dtensor::DTensorSpec;

/// The reparameterization that [`fully_shard`](crate::fsdp::fully_shard) and
/// [`parallelize`](crate::parallel::parallelize) attach to a parameter. It refers to the
/// parameter's unit.
///
/// The parameter's base is this rank's shard, an ordinary leaf, and the only tensor that burn's
/// optimizers, records and visitors see. Its value is the full parameter. The unit gathers it over
/// the data-parallel ranks; a parameter that is also sharded over tensor-parallel ranks is gathered
/// over them separately.
///
/// # Collective
/// Outside its unit's scope, `param.val()` is an all-gather, so every rank must call it. Inside the
/// scope it is local, except for a parameter that is sharded over tensor-parallel ranks, which is
/// gathered over them. `param.base()` is always local.
#[derive(Debug, Clone)]
pub struct DistributedParameter {
    pub(crate) unit: Arc<Unit>,
    pub(super) index: usize,
    /// State of the parameter to which its shard belongs.
    pub(super) state: ParamStateHandle,
    /// LoRA adapter of the full parameter.
    pub(super) adapter: Option<Box<LoraAdapter>>,
}

/// Groups parameters into units, and returns each as a distributed parameter, in the same order.
/// The key of a parameter is the name of its unit, and a value `K` that identifies its
/// distribution. Parameters of the same module that are distributed differently are put into
/// separate units. `data` returns the data-parallel groups of a unit.
///
/// # Errors
/// [`TensorMeshes`](super::ParamError::TensorMeshes) for parameters of one unit parallelized over
/// different meshes.
pub(crate) fn make_units<K: Clone + Eq + Hash>(
    params: Vec<((UnitName, K), UnitParam)>,
    data: impl Fn(&UnitName, &K) -> Option<DataParallelGroups>,
) -> Result<Vec<DistributedParameter>> {
    let mut members: HashMap<(UnitName, K), Vec<UnitParam>> = HashMap::new();
    let mut places = Vec::new();
    for (key, param) in params {
        let unit = members.entry(key.clone()).or_default();
        places.push((key, unit.len()));
        unit.push(param);
    }
    let units = members.into_iter().map(|(key, params)| {
        let unit = Unit::new(key.0.clone(), params, data(&key.0, &key.1))?;
        Ok((key, Arc::new(unit)))
    });
    let units: HashMap<_, _> = units.collect::<Result<_>>()?;
    Ok(places
        .into_iter()
        .map(|(key, index)| {
            DistributedParameter::new(units[&key].clone(), index, ParamStateHandle::default())
        })
        .collect())
}

impl DistributedParameter {
    fn new(unit: Arc<Unit>, index: usize, state: ParamStateHandle) -> Self {
        Self {
            unit,
            index,
            state,
            adapter: None,
        }
    }

    /// Returns the parameter with this adapter, whose factors are not distributed yet.
    pub(crate) fn adapted(self, adapter: Option<LoraAdapter>) -> Self {
        Self {
            adapter: adapter.map(Box::new),
            ..self
        }
    }

    pub(crate) fn info(&self) -> &UnitParam {
        &self.unit.spec().params[self.index]
    }

    pub(super) fn with_adapter(mut self, change: impl FnOnce(LoraAdapter) -> LoraAdapter) -> Self {
        self.adapter = self.adapter.map(|adapter| Box::new(change(*adapter)));
        self
    }

    /// Returns true if `fully_shard` distributed the parameter.
    pub(crate) fn is_data_parallel(&self) -> bool {
        self.unit.spec().data.is_some()
    }

    /// Returns the spec of the parameter over all mesh dimensions that place it, of which the base
    /// is the local tensor.
    pub(crate) fn spec(&self, dtype: DType) -> Arc<DTensorSpec> {
        self.info().spec.in_dtype(dtype)
    }

    /// Returns the parameter's spec on the tensor-parallel mesh, or `None` if it was not
    /// parallelized.
    pub(super) fn tensor_spec(&self, dtype: DType) -> Option<Arc<DTensorSpec>> {
        self.info()
            .parallel
            .as_ref()
            .map(|parallel| parallel.spec.in_dtype(dtype))
    }
}

/// State of the traversal of a module on a thread, which burn's visitors and mappers cannot pass
/// on.
#[derive(Default)]
struct ModuleTraversal {
    /// Record of the distributed parameter that was visited last, because burn passes only its base
    /// to visitors. Every visitor causes such a record, even one that does not use it. Therefore
    /// the record does not keep the unit alive.
    visited: RefCell<Option<(Weak<Unit>, usize, WeakState)>>,
    /// Replacement for the parameter whose base was mapped last. burn gives the parameter its
    /// previous reparameterization again after mapping that too.
    next: RefCell<Option<DistributedParameter>>,
    /// Destination of the adapters of mapped parameters while [`take_adapters`] runs; `None`
    /// otherwise.
    adapters: RefCell<Option<Vec<LoraAdapter>>>,
    /// True while mapped parameters keep their state.
    is_copying: Cell<bool>,
}

thread_local! {
    static TRAVERSAL: ModuleTraversal = ModuleTraversal::default();
}

/// Runs `copy`, which maps modules without changing the values of their shards, perhaps on one rank
/// only. Mapped parameters keep their state.
pub(crate) fn copying<T>(copy: impl FnOnce() -> T) -> T {
    struct RestoreGuard(bool);
    impl Drop for RestoreGuard {
        fn drop(&mut self) {
            TRAVERSAL.with(|traversal| traversal.is_copying.set(self.0));
        }
    }
    let _restore = RestoreGuard(TRAVERSAL.with(|traversal| traversal.is_copying.replace(true)));
    copy()
}

/// Returns the parameter whose base was visited last. Call it after its reparameterization was
/// visited, too.
pub(super) fn take_visited() -> Option<DistributedParameter> {
    let (unit, index, state) = TRAVERSAL.with(|traversal| traversal.visited.take())?;
    Some(DistributedParameter::new(
        unit.upgrade()?,
        index,
        ParamStateHandle::upgrade(&state)?,
    ))
}

/// Replaces the distributed parameter whose base is being mapped by `param`.
pub(super) fn replace_next(param: &DistributedParameter) {
    TRAVERSAL.with(|traversal| traversal.next.replace(Some(param.clone())));
}

impl Module for DistributedParameter {
    fn visit<V: ModuleVisitor>(&self, visitor: &mut V) {
        let visited = (
            Arc::downgrade(&self.unit),
            self.index,
            self.state.downgrade(),
        );
        TRAVERSAL.with(|traversal| traversal.visited.replace(Some(visited)));
        self.unit.spec().markers[self.index]
            .iter()
            .for_each(|part| part.visit(visitor));
        self.adapter
            .iter()
            .for_each(|adapter| visit_adapter(adapter, visitor));
    }

    fn map<M: ModuleMapper>(self, mapper: &mut M) -> Self {
        self.unit.spec().markers[self.index]
            .iter()
            .for_each(|part| part.map(mapper));
        // Mapping the adapter's factors may set `next` too, so take it first.
        let (next, is_copying) =
            TRAVERSAL.with(|traversal| (traversal.next.take(), traversal.is_copying.get()));
        if !is_copying {
            self.unit.note_step();
        }
        let Self {
            unit,
            index,
            state,
            adapter,
        } = self;
        let state = if is_copying { state } else { state.mapped() };
        let adapter = adapter.and_then(|adapter| map_adapter(*adapter, mapper));
        next.unwrap_or(Self::new(unit, index, state))
            .adapted(adapter)
    }

    fn collect_devices(&self, devices: Devices) -> Devices {
        self.adapter
            .iter()
            .fold(devices, |devices, adapter| adapter.collect_devices(devices))
    }

    fn fork(self, device: &Device) -> Self {
        self.with_adapter(|adapter| adapter.fork(device))
    }

    fn to_device(self, device: &Device) -> Self {
        self.with_adapter(|adapter| adapter.to_device(device))
    }

    fn train(self) -> Self {
        self.with_adapter(Module::train)
    }

    fn valid(&self) -> Self {
        self.clone().with_adapter(|adapter| adapter.valid())
    }

    fn materialize(self) -> Self {
        self
    }
}

impl ModuleDisplayDefault for DistributedParameter {
    fn content(&self, content: Content) -> Option<Content> {
        content
            .add_formatted(&format!("{}", self.info().spec.layout()))
            .optional()
    }
}

impl ModuleDisplay for DistributedParameter {}

/// Removes the adapters from the distributed parameters of `model`, and returns them.
///
/// A burn parameter can have only one reparameterization, and that is
/// [`DistributedParameter`](super::DistributedParameter). It therefore contains the adapter, and
/// presents the adapter's factors to visitors and mappers at the paths where burn does,
/// `weight.lora.a` and `weight.lora.b`. The factors are ordinary parameters of the unit.
///
/// ```text
/// burn's model       weight ── LoraAdapter { a, b, scale }
/// in between         weight                                  LoraAdapter { a, b, scale }       separate
/// distributed        weight ── DistributedParameter { adapter: LoraAdapter { a ── .., b ── .., scale } }
/// ```
pub(super) fn take_adapters<M: Module>(model: M) -> (M, Adapters) {
    TRAVERSAL.with(|traversal| traversal.adapters.replace(Some(Vec::new())));
    let mut paths = Paths {
        last: String::new(),
        adapted: Vec::new(),
    };
    let model = copying(|| map_tensors(model, &mut paths));
    let taken = TRAVERSAL
        .with(|traversal| traversal.adapters.take())
        .unwrap_or_default();
    (model, paths.adapted.into_iter().zip(taken).collect())
}

/// Returns the adapter of a parameter that is being mapped, or moves it away and returns `None`
/// while [`take_adapters`] runs.
fn left(adapter: LoraAdapter) -> Option<LoraAdapter> {
    TRAVERSAL.with(|traversal| match traversal.adapters.borrow_mut().as_mut() {
        Some(taken) => {
            taken.push(adapter);
            None
        }
        None => Some(adapter),
    })
}

/// Presents the adapter's factors to `visitor` as burn does: next to the parameter, instead of
/// inside the reparameterization that contains them.
fn visit_adapter<V: ModuleVisitor>(adapter: &LoraAdapter, visitor: &mut V) {
    visitor.exit_module(DistributedParameter::NAME, REPARAMETERIZATION);
    visitor.enter_module(ADAPTER, REPARAMETERIZATION);
    adapter.visit(visitor);
    visitor.exit_module(ADAPTER, REPARAMETERIZATION);
    visitor.enter_module(DistributedParameter::NAME, REPARAMETERIZATION);
}

/// Does the same as [`visit_adapter`] for a mapper. Returns the mapped adapter, or `None` if
/// [`take_adapters`] removed it.
fn map_adapter<M: ModuleMapper>(adapter: LoraAdapter, mapper: &mut M) -> Option<LoraAdapter> {
    mapper.exit_module(DistributedParameter::NAME, REPARAMETERIZATION);
    mapper.enter_module(ADAPTER, REPARAMETERIZATION);
    let adapter = left(adapter).map(|adapter| adapter.map(mapper));
    mapper.exit_module(ADAPTER, REPARAMETERIZATION);
    mapper.enter_module(DistributedParameter::NAME, REPARAMETERIZATION);
    adapter
}

/// A mapper that collects the paths of the distributed parameters whose adapters are removed.
/// burn's own adapters stay.
struct Paths {
    /// Path of the parameter that was mapped last.
    last: String,
    adapted: Vec<String>,
}

impl TensorMapper for Paths {
    fn exit(&mut self, _: &ModulePath) {
        let taken =
            TRAVERSAL.with(|traversal| traversal.adapters.borrow().as_ref().map_or(0, Vec::len));
        if taken > self.adapted.len() {
            self.adapted.push(self.last.clone());
        }
    }

    fn float<const D: usize>(
        &mut self,
        path: &ModulePath,
        param: Param<Tensor<D>>,
    ) -> Param<Tensor<D>> {
        self.last = path.join();
        param
    }
}
