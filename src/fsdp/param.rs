//! [`ShardedParameter`]: what makes `param.val()` the gathered weight.

use std::cell::RefCell;
use std::sync::Arc;

use burn::module::{
    Content, Devices, Module, ModuleDisplay, ModuleDisplayDefault, ModuleMapper, ModuleVisitor, Param,
    Reparameterization,
};
use burn::tensor::{DType, Device, Tensor};

use super::scope;
use super::unit::{Unit, UnitParam};
use crate::Result;
use crate::dtensor::{DTensor, DTensorSpec};

/// The reparameterization `fully_shard` attaches to a parameter.
///
/// The parameter's base is this rank's shard, an ordinary leaf: burn's optimizers, records and
/// visitors see it and nothing else. Its value is the whole weight, gathered by its unit.
///
/// # Collective
/// `param.val()` outside its unit's scope is an all-gather: every rank must call it. Inside the
/// scope, and `param.base()` anywhere, are local.
#[derive(Debug, Clone)]
pub struct ShardedParameter {
    pub(super) unit: Arc<Unit>,
    pub(super) index: usize,
}

impl ShardedParameter {
    pub(super) fn info(&self) -> &UnitParam {
        &self.unit.params[self.index]
    }

    /// What the shard is a part of.
    pub(super) fn spec(&self, dtype: DType) -> Result<DTensorSpec> {
        let UnitParam { layout, shape, .. } = self.info();
        DTensorSpec::new(&self.unit.mesh, layout.clone(), shape.clone().into(), dtype)
    }
}

impl Reparameterization for ShardedParameter {
    const NAME: &'static str = "fully_shard";

    fn apply<const D: usize>(&self, base: Tensor<D>) -> Tensor<D> {
        Tensor::from_dispatch(scope::gathered(self, base.into_dispatch()))
    }
}

thread_local! {
    /// Where a visited parameter leaves word of itself: burn hands visitors the base alone.
    static VISITED: RefCell<Option<ShardedParameter>> = const { RefCell::new(None) };
}

/// The sharded parameter whose base was visited last, once its reparameterization was too.
pub(super) fn take_visited() -> Option<ShardedParameter> {
    VISITED.take()
}

impl Module for ShardedParameter {
    fn visit<V: ModuleVisitor>(&self, _: &mut V) {
        VISITED.set(Some(self.clone()));
    }

    fn map<M: ModuleMapper>(self, _: &mut M) -> Self {
        self
    }

    fn collect_devices(&self, devices: Devices) -> Devices {
        devices
    }

    fn fork(self, _: &Device) -> Self {
        self
    }

    fn to_device(self, _: &Device) -> Self {
        self
    }

    fn train(self) -> Self {
        self
    }

    fn valid(&self) -> Self {
        self.clone()
    }

    fn materialize(self) -> Self {
        self
    }
}

impl ModuleDisplayDefault for ShardedParameter {
    fn content(&self, content: Content) -> Option<Content> {
        content.add_formatted(&format!("{}", self.info().layout)).optional()
    }
}

impl ModuleDisplay for ShardedParameter {}

/// A parameter's distributed view.
pub trait ParamExt<const D: usize> {
    /// This parameter as a [`DTensor`] on its mesh; `None` when it is not sharded.
    ///
    /// Local: no communication. The local tensor is the shard the optimizer steps.
    fn dtensor(&self) -> Option<DTensor<D>>;
}

impl<const D: usize> ParamExt<D> for Param<Tensor<D>> {
    fn dtensor(&self) -> Option<DTensor<D>> {
        let sharded = self.reparameterization::<ShardedParameter>()?;
        let base = self.base();
        let spec = sharded.spec(base.dtype()).expect("the shard was made from this spec");
        Some(DTensor::from_parts(base, spec.shared()))
    }
}
