//! LoRA adapters of distributed weights.
//!
//! burn keeps one reparameterization of a parameter, and that is [`DistributedParameter`](super::DistributedParameter): it has the adapter in it, and
//! shows visitors and mappers its factors where burn shows them, under `weight.lora.a` and `weight.lora.b`. Those are
//! parameters of the unit like any other.
//!
//! ```text
//! burn's model       weight ── LoraAdapter { a, b, scale }
//! in between         weight                                  LoraAdapter { a, b, scale }       apart
//! distributed        weight ── DistributedParameter { adapter: LoraAdapter { a ── .., b ── .., scale } }
//! ```
//!
//! burn hands visitors and mappers a stored value and the parameters of what is attached to it, never what is attached. So
//! burn's own adapter is found out: with stored value and factors set to 0 and 1, the parameter's value is the scale.

use std::any::Any;
use std::cell::RefCell;
use std::collections::{HashMap, HashSet, VecDeque};

use burn::module::{LoraAdapter, Module, ModuleMapper, ModuleVisitor, Param, Reparameterization, Reparameterizer};
use burn::tensor::{DType, Device, Tensor};

use super::states::copying;

/// What burn calls an adapter in paths.
pub(super) const NAME: &str = LoraAdapter::NAME;

/// Adapters by the paths of their parameters, in burn's order.
pub(super) type Adapters = VecDeque<(String, LoraAdapter)>;

/// Takes burn's adapters off those parameters of `model` that are to be `distributed`. `paths` has all that have one, and no
/// parameter has any other reparameterization.
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

/// Gives the parameters of `model` at these paths burn's adapters.
pub(super) fn put_burns<M: Module>(model: M, adapters: Adapters) -> M {
    match adapters.is_empty() {
        true => model,
        false => model.apply_reparameterization(Put(adapters)),
    }
}

/// Takes the adapters off the distributed parameters of `model`.
pub(super) fn take<M: Module>(model: M) -> (M, Adapters) {
    TAKEN.set(Some(Vec::new()));
    let mut paths = Paths { path: Vec::new(), last: String::new(), adapted: Vec::new() };
    let model = copying(|| model.map(&mut paths));
    let taken = TAKEN.take().unwrap_or_default();
    (model, paths.adapted.into_iter().zip(taken).collect())
}

thread_local! {
    /// Where the adapters of mapped parameters go, if they are being taken.
    static TAKEN: RefCell<Option<Vec<LoraAdapter>>> = const { RefCell::new(None) };
}

/// The adapter of a parameter that is being mapped, unless it has just been taken.
fn left(adapter: LoraAdapter) -> Option<LoraAdapter> {
    TAKEN.with_borrow_mut(|taken| match taken {
        Some(taken) => {
            taken.push(adapter);
            None
        }
        None => Some(adapter),
    })
}

/// Shows `visitor` the adapter's factors as burn does: beside the parameter, and not in the reparameterization of this name
/// that has them.
pub(super) fn visit<V: ModuleVisitor>(adapter: &LoraAdapter, around: &str, visitor: &mut V) {
    visitor.exit_module(around, REPARAMETERIZATION);
    visitor.enter_module(NAME, REPARAMETERIZATION);
    adapter.visit(visitor);
    visitor.exit_module(NAME, REPARAMETERIZATION);
    visitor.enter_module(around, REPARAMETERIZATION);
}

/// [`visit`], of a mapper.
pub(super) fn map<M: ModuleMapper>(adapter: LoraAdapter, around: &str, mapper: &mut M) -> Option<LoraAdapter> {
    mapper.exit_module(around, REPARAMETERIZATION);
    mapper.enter_module(NAME, REPARAMETERIZATION);
    let adapter = left(adapter).map(|adapter| adapter.map(mapper));
    mapper.exit_module(NAME, REPARAMETERIZATION);
    mapper.enter_module(around, REPARAMETERIZATION);
    adapter
}

/// What burn says that a reparameterization is.
pub(super) const REPARAMETERIZATION: &str = "Reparameterization";

/// Puts small tensors in the place of adapted parameters and factors, and keeps these.
struct AdapterProbe {
    /// Of the parameters that have adapters.
    paths: HashSet<String>,
    path: Vec<String>,
    bases: HashMap<String, Box<dyn Any + Send>>,
    /// By their own paths.
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
        self.factors.insert(path, *kept.downcast().expect("an adapter's factors are matrices"));
        param.map(|_| exact(1.0, &device))
    }
}

/// A tensor of one element, where a number is what it was.
fn exact<const D: usize>(number: f64, device: &Device) -> Tensor<D> {
    #[cfg(feature = "flex")]
    let (_, device, dtype) = (device, &Device::flex(), DType::F64);
    #[cfg(not(feature = "flex"))]
    let dtype = DType::F32;
    Tensor::full([1; D], number, (device, dtype))
}

/// Puts them back, without adapters, which it makes of what stands in the parameters' place now.
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
        let scale = param.base().into_data().iter::<f64>().next().expect("one number");
        self.adapters.push_back((path, LoraAdapter { a, b, scale }));
        *base.downcast().expect("it is the parameter that was there")
    }
}

/// Gives parameters burn's adapters.
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

/// Paths of the distributed parameters whose adapters are taken; burn's own stay.
struct Paths {
    path: Vec<String>,
    /// Of the parameter that was mapped last.
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
