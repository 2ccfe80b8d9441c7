//! LoRA adapters of distributed parameters.
//!
//! A burn parameter can have only one reparameterization, and that is
//! [`DistributedParameter`](super::DistributedParameter). It therefore contains the adapter, and presents the
//! adapter's factors to visitors and mappers at the paths where burn does, `weight.lora.a` and `weight.lora.b`. The
//! factors are ordinary parameters of the unit.
//!
//! ```text
//! burn's model       weight ── LoraAdapter { a, b, scale }
//! in between         weight                                  LoraAdapter { a, b, scale }       separate
//! distributed        weight ── DistributedParameter { adapter: LoraAdapter { a ── .., b ── .., scale } }
//! ```
//!
//! burn passes visitors and mappers the stored value and the parameters of a reparameterization, but never the
//! reparameterization. The scale of burn's own adapter is therefore computed: if the stored value is set to 0 and the
//! factors to 1, the parameter's value equals the scale.

use std::any::Any;
use std::cell::RefCell;
use std::collections::{HashMap, HashSet, VecDeque};

use burn::module::{LoraAdapter, Module, ModuleMapper, ModuleVisitor, Param, Reparameterization, Reparameterizer};
use burn::tensor::{DType, Device, Tensor};

use super::states::copying;

/// Name of an adapter in burn's paths.
pub(super) const NAME: &str = LoraAdapter::NAME;

/// Adapters by the paths of their parameters, in burn's order.
pub(super) type Adapters = VecDeque<(String, LoraAdapter)>;

/// Removes burn's adapters from those parameters of `model` for which `distributed` returns true, and returns them by
/// path. `paths` must contain all parameters that have an adapter, and no parameter may have another
/// reparameterization.
pub(crate) fn take_burns<M: Module>(
    model: M,
    paths: HashSet<String>,
    distributed: impl Fn(&str) -> bool,
) -> (M, HashMap<String, LoraAdapter>) {
    if paths.is_empty() {
        return (model, HashMap::new());
    }
    let mut probe = AdapterProbe { paths, path: Vec::new(), bases: HashMap::new(), factors: HashMap::new() };
    let probed = model.map(&mut probe).materialize();
    let AdapterProbe { bases, factors, .. } = probe;
    let mut restore = RestoreAdapters { path: Vec::new(), bases, factors, adapters: Adapters::new() };
    let model = probed.map(&mut restore);
    let (taken, stay): (Adapters, Adapters) = restore.adapters.into_iter().partition(|(path, _)| distributed(path));
    (put_burns(model, stay), taken.into_iter().collect())
}

/// Attaches burn's adapters to the parameters of `model` at these paths.
pub(super) fn put_burns<M: Module>(model: M, adapters: Adapters) -> M {
    match adapters.is_empty() {
        true => model,
        false => model.apply_reparameterization(Put(adapters)),
    }
}

/// Removes the adapters from the distributed parameters of `model`, and returns them.
pub(super) fn take<M: Module>(model: M) -> (M, Adapters) {
    TAKEN.set(Some(Vec::new()));
    let mut paths = Paths { path: Vec::new(), last: String::new(), adapted: Vec::new() };
    let model = copying(|| model.map(&mut paths));
    let taken = TAKEN.take().unwrap_or_default();
    (model, paths.adapted.into_iter().zip(taken).collect())
}

thread_local! {
    /// Destination of the adapters of mapped parameters while [`take`] runs; `None` otherwise.
    static TAKEN: RefCell<Option<Vec<LoraAdapter>>> = const { RefCell::new(None) };
}

/// Returns the adapter of a parameter that is being mapped, or moves it to `TAKEN` and returns `None` while
/// [`take`] runs.
fn left(adapter: LoraAdapter) -> Option<LoraAdapter> {
    TAKEN.with_borrow_mut(|taken| match taken {
        Some(taken) => {
            taken.push(adapter);
            None
        }
        None => Some(adapter),
    })
}

/// Presents the adapter's factors to `visitor` as burn does: next to the parameter, instead of inside the
/// reparameterization named `around` that contains them.
pub(super) fn visit<V: ModuleVisitor>(adapter: &LoraAdapter, around: &str, visitor: &mut V) {
    visitor.exit_module(around, REPARAMETERIZATION);
    visitor.enter_module(NAME, REPARAMETERIZATION);
    adapter.visit(visitor);
    visitor.exit_module(NAME, REPARAMETERIZATION);
    visitor.enter_module(around, REPARAMETERIZATION);
}

/// Does the same as [`visit`] for a mapper. Returns the mapped adapter, or `None` if [`take`] removed it.
pub(super) fn map<M: ModuleMapper>(adapter: LoraAdapter, around: &str, mapper: &mut M) -> Option<LoraAdapter> {
    mapper.exit_module(around, REPARAMETERIZATION);
    mapper.enter_module(NAME, REPARAMETERIZATION);
    let adapter = left(adapter).map(|adapter| adapter.map(mapper));
    mapper.exit_module(NAME, REPARAMETERIZATION);
    mapper.enter_module(around, REPARAMETERIZATION);
    adapter
}

/// Container name that burn passes to visitors and mappers for a reparameterization.
pub(super) const REPARAMETERIZATION: &str = "Reparameterization";

/// A mapper that replaces adapted parameters and their factors by one-element tensors, and keeps the originals.
struct AdapterProbe {
    /// Paths of the parameters that have adapters.
    paths: HashSet<String>,
    path: Vec<String>,
    bases: HashMap<String, Box<dyn Any + Send>>,
    /// Factors, by their own paths.
    factors: HashMap<String, Param<Tensor<2>>>,
}

impl ModuleMapper for AdapterProbe {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.into());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let path = self.path.join(".");
        let device = param.lazy_device().inner();
        if self.paths.contains(&path) {
            self.bases.insert(path, Box::new(param.clone()));
            return param.map(|_| exact(0.0, &device));
        }
        let factor = match self.path.as_slice() {
            [owner @ .., name, _] if name == NAME => self.paths.contains(&owner.join(".")),
            _ => false,
        };
        if !factor {
            return param;
        }
        let kept: Box<dyn Any> = Box::new(param.clone());
        self.factors.insert(path, *kept.downcast().expect("the factors of an adapter are matrices"));
        param.map(|_| exact(1.0, &device))
    }
}

/// Returns a tensor of one element, in a dtype and on a device that represent `number` exactly.
fn exact<const D: usize>(number: f64, device: &Device) -> Tensor<D> {
    #[cfg(feature = "flex")]
    let (_, device, dtype) = (device, &Device::flex(), DType::F64);
    #[cfg(not(feature = "flex"))]
    let dtype = DType::F32;
    Tensor::full([1; D], number, (device, dtype))
}

/// A mapper that puts the original parameters back without adapters. It builds the adapters, with the scales that it
/// reads from the values of the replacement tensors.
struct RestoreAdapters {
    path: Vec<String>,
    bases: HashMap<String, Box<dyn Any + Send>>,
    factors: HashMap<String, Param<Tensor<2>>>,
    adapters: Adapters,
}

impl ModuleMapper for RestoreAdapters {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.into());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let path = self.path.join(".");
        let Some(base) = self.bases.remove(&path) else { return param };
        let base: Box<dyn Any> = base;
        let mut factor =
            |name| self.factors.remove(&format!("{path}.{NAME}.{name}")).expect("an adapter has two factors");
        let (a, b) = (factor("a"), factor("b"));
        let scale = param.base().into_data().iter::<f64>().next().expect("the replacement tensor has one element");
        self.adapters.push_back((path, LoraAdapter { a, b, scale }));
        *base.downcast().expect("a parameter keeps its rank (number of dimensions)")
    }
}

/// Attaches burn's adapters to parameters.
struct Put(Adapters);

impl Reparameterizer for Put {
    type Reparam = LoraAdapter;

    fn reparameterize<const D: usize>(
        &mut self,
        path: &str,
        param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Option<LoraAdapter>) {
        let next = self.0.pop_front_if(|(adapted, _)| adapted == path);
        (param, next.map(|(_, adapter)| adapter))
    }
}

/// A mapper that collects the paths of the distributed parameters whose adapters are removed. burn's own adapters
/// stay.
struct Paths {
    path: Vec<String>,
    /// Path of the parameter that was mapped last.
    last: String,
    adapted: Vec<String>,
}

impl ModuleMapper for Paths {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.into());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
        let taken = TAKEN.with_borrow(|taken| taken.as_ref().map_or(0, Vec::len));
        if taken > self.adapted.len() {
            self.adapted.push(self.last.clone());
        }
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        self.last = self.path.join(".");
        param
    }
}
