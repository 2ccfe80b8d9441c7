//! [`DistributedParameter`]: what makes `param.val()` the whole weight.

use std::cell::RefCell;
use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, Weak};

use burn::module::{
    Content, Devices, LoraAdapter, Module, ModuleDisplay, ModuleDisplayDefault, ModuleMapper, ModuleVisitor,
    Reparameterization,
};
use burn::tensor::{DType, Device};

use super::adapter;
use super::states::{ParamStateHandle, WeakState, is_copying};
use super::unit::{DataParallelGroups, Unit, UnitParam};
use super::unit_name::UnitName;
use crate::Result;
use crate::dtensor::DTensorSpec;

/// The reparameterization that [`fully_shard`](crate::fsdp::fully_shard) and
/// [`parallelize`](crate::parallel::parallelize) attach to a parameter: its unit, its place there,
/// and its tensor-parallel part.
///
/// The parameter's base is this rank's shard, an ordinary leaf: burn's optimizers, records and
/// visitors see it and nothing else. Its value is the whole weight, gathered over the data-parallel
/// ranks by its unit, and over the tensor-parallel ranks by itself.
///
/// # Collective
/// `param.val()` outside its unit's scope is an all-gather: every rank must call it. Inside the
/// scope it is local, but for a weight sharded over tensor-parallel ranks, which is gathered over
/// them. `param.base()` is local anywhere.
#[derive(Debug, Clone)]
pub struct DistributedParameter {
    pub(crate) unit: Arc<Unit>,
    pub(super) index: usize,
    /// Which state of the parameter its shard is of.
    pub(super) state: ParamStateHandle,
    /// LoRA of the whole weight.
    pub(super) adapter: Option<Box<LoraAdapter>>,
}

/// Makes units of parameters, each given with the path of its unit's module and what it is distributed over, and
/// returns their places in the same order: of what is distributed differently each module has units apart. `data` has the
/// data-parallel ranks of a unit.
///
/// # Errors
/// [`TensorMeshes`](super::ParamError::TensorMeshes) for parameters of one unit parallelized over different meshes.
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
        .map(|(key, index)| DistributedParameter::new(units[&key].clone(), index, ParamStateHandle::default()))
        .collect())
}

impl DistributedParameter {
    fn new(unit: Arc<Unit>, index: usize, state: ParamStateHandle) -> Self {
        Self { unit, index, state, adapter: None }
    }

    /// The same with an adapter, of which only the weight is distributed yet.
    pub(crate) fn adapted(self, adapter: Option<LoraAdapter>) -> Self {
        Self { adapter: adapter.map(Box::new), ..self }
    }

    pub(crate) fn info(&self) -> &UnitParam {
        &self.unit.params[self.index]
    }

    pub(super) fn with_adapter(mut self, change: impl FnOnce(LoraAdapter) -> LoraAdapter) -> Self {
        self.adapter = self.adapter.map(|adapter| Box::new(change(*adapter)));
        self
    }

    /// Whether `fully_shard` made it one.
    pub(crate) fn is_data_parallel(&self) -> bool {
        self.unit.is_data_parallel()
    }

    /// What the stored shard is a part of.
    pub(crate) fn spec(&self, dtype: DType) -> Arc<DTensorSpec> {
        self.info().spec.in_dtype(dtype)
    }

    /// What the tensor-parallel shard is a part of, if the parameter was parallelized.
    pub(super) fn tensor_spec(&self, dtype: DType) -> Option<Arc<DTensorSpec>> {
        self.info().parallel.as_ref().map(|parallel| parallel.spec.in_dtype(dtype))
    }
}

thread_local! {
    /// Where a visited parameter leaves word of itself: burn hands visitors the base alone. Any visitor
    /// comes by, also one that does not ask: so the word keeps no unit alive.
    static VISITED: RefCell<Option<(Weak<Unit>, usize, WeakState)>> = const { RefCell::new(None) };
    /// What the parameter whose base was mapped last becomes: burn gives it back the
    /// reparameterization it had, once that has been mapped too.
    static NEXT: RefCell<Option<DistributedParameter>> = const { RefCell::new(None) };
}

/// The parameter whose base was visited last, once its reparameterization was too.
pub(super) fn take_visited() -> Option<DistributedParameter> {
    let (unit, index, state) = VISITED.take()?;
    Some(DistributedParameter::new(unit.upgrade()?, index, state.upgrade()?))
}

/// Makes `param` of the distributed parameter whose base is being mapped.
pub(super) fn replace_next(param: &DistributedParameter) {
    NEXT.set(Some(param.clone()));
}

impl Module for DistributedParameter {
    fn visit<V: ModuleVisitor>(&self, visitor: &mut V) {
        VISITED.set(Some((Arc::downgrade(&self.unit), self.index, self.state.downgrade())));
        self.unit.parts[self.index].iter().for_each(|part| part.visit(visitor));
        self.adapter.iter().for_each(|adapter| adapter::visit(adapter, Self::NAME, visitor));
    }

    fn map<M: ModuleMapper>(self, mapper: &mut M) -> Self {
        self.unit.parts[self.index].iter().for_each(|part| part.map(mapper));
        // The adapter's factors may become others too.
        let next = NEXT.take();
        if !is_copying() {
            self.unit.note_step();
        }
        let Self { unit, index, state, adapter } = self;
        let state = state.mapped();
        let adapter = adapter.and_then(|adapter| adapter::map(*adapter, Self::NAME, mapper));
        next.unwrap_or(Self::new(unit, index, state)).adapted(adapter)
    }

    fn collect_devices(&self, devices: Devices) -> Devices {
        self.adapter.iter().fold(devices, |devices, adapter| adapter.collect_devices(devices))
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
        content.add_formatted(&format!("{}", self.info().spec.layout())).optional()
    }
}

impl ModuleDisplay for DistributedParameter {}
