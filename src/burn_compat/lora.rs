//! [`take_adapters`] and [`put_adapters`]: remove burn's LoRA adapters from a model, and attach
//! them.
//!
//! A burn parameter has at most one reparameterization. So an adapter is removed from a parameter
//! before the parameter is distributed, and attached when the model becomes an ordinary one again.
//!
//! # What it relies on
//! * An adapter's factors are visited as the parameters `lora.a` and `lora.b` below the adapted
//!   one.
//! * The value of an adapted parameter is its stored value plus the scale times the product of the
//!   factors. burn shows the scale to no visitor: if the stored value is set to 0 and the factors
//!   to 1, the value equals the scale.
//!
//! # The issue to file
//! *Access to a parameter's reparameterization while a module is mapped.* `ModuleMapper` gets the
//! stored tensor of a parameter and the parameters of its reparameterization, but not the
//! reparameterization, so that its other fields cannot be read, nor can it be removed.
//! `Param::take_reparameterization::<R>()` in `map_float` would be enough.

use std::any::Any;
use std::collections::{HashMap, HashSet, VecDeque};

use burn::module::{LoraAdapter, Module, Param, Reparameterization, Reparameterizer};
use burn::tensor::{DType, Device, Tensor};

use super::visitor::{ModulePath, TensorMapper, map_tensors};

/// Name of an adapter in burn's paths.
pub(crate) const ADAPTER: &str = LoraAdapter::NAME;

/// Adapters by the paths of their parameters, in burn's order.
pub(crate) type Adapters = VecDeque<(String, LoraAdapter)>;

/// Removes burn's adapters from those parameters of `model` for which `distributed` returns true,
/// and returns them by path. `paths` must contain all parameters that have an adapter, and no
/// parameter may have another reparameterization.
pub(crate) fn take_adapters<M: Module>(
    model: M,
    paths: HashSet<String>,
    distributed: impl Fn(&str) -> bool,
) -> (M, HashMap<String, LoraAdapter>) {
    if paths.is_empty() {
        return (model, HashMap::new());
    }
    let mut probe = AdapterProbe {
        paths,
        bases: HashMap::new(),
        factors: HashMap::new(),
    };
    let probed = map_tensors(model, &mut probe).materialize();
    let AdapterProbe { bases, factors, .. } = probe;
    let mut restore = RestoreAdapters {
        bases,
        factors,
        adapters: Adapters::new(),
    };
    let model = map_tensors(probed, &mut restore);
    let (taken, stay): (Adapters, Adapters) = restore
        .adapters
        .into_iter()
        .partition(|(path, _)| distributed(path));
    (put_adapters(model, stay), taken.into_iter().collect())
}

/// Attaches burn's adapters to the parameters of `model` at these paths.
pub(crate) fn put_adapters<M: Module>(model: M, adapters: Adapters) -> M {
    match adapters.is_empty() {
        true => model,
        false => model.apply_reparameterization(Put(adapters)),
    }
}

/// A mapper that replaces adapted parameters and their factors by one-element tensors, and keeps
/// the originals.
struct AdapterProbe {
    /// Paths of the parameters that have adapters.
    paths: HashSet<String>,
    bases: HashMap<String, Box<dyn Any + Send>>,
    /// Factors, by their own paths.
    factors: HashMap<String, Param<Tensor<2>>>,
}

impl TensorMapper for AdapterProbe {
    fn float<const D: usize>(
        &mut self,
        at: &ModulePath,
        param: Param<Tensor<D>>,
    ) -> Param<Tensor<D>> {
        let path = at.join();
        let device = param.lazy_device().inner();
        if self.paths.contains(&path) {
            self.bases.insert(path, Box::new(param.clone()));
            return param.map(|_| exact(0.0, &device));
        }
        let factor = match at.names() {
            [owner @ .., name, _] if name == ADAPTER => self.paths.contains(&owner.join(".")),
            _ => false,
        };
        if !factor {
            return param;
        }
        let kept: Box<dyn Any> = Box::new(param.clone());
        self.factors.insert(
            path,
            *kept
                .downcast()
                .expect("the factors of an adapter are matrices"),
        );
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

/// A mapper that puts the original parameters back without adapters. It builds the adapters, with
/// the scales that it reads from the values of the replacement tensors.
struct RestoreAdapters {
    bases: HashMap<String, Box<dyn Any + Send>>,
    factors: HashMap<String, Param<Tensor<2>>>,
    adapters: Adapters,
}

impl TensorMapper for RestoreAdapters {
    fn float<const D: usize>(
        &mut self,
        at: &ModulePath,
        param: Param<Tensor<D>>,
    ) -> Param<Tensor<D>> {
        let path = at.join();
        let Some(base) = self.bases.remove(&path) else {
            return param;
        };
        let base: Box<dyn Any> = base;
        let mut factor = |name| {
            self.factors
                .remove(&format!("{path}.{ADAPTER}.{name}"))
                .expect("an adapter has two factors")
        };
        let a = factor("a");
        let b = factor("b");
        let scale = param
            .base()
            .into_data()
            .iter::<f64>()
            .next()
            .expect("the replacement tensor has one element");
        self.adapters.push_back((path, LoraAdapter { a, b, scale }));
        *base
            .downcast()
            .expect("a parameter keeps its rank (number of dimensions)")
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

#[cfg(test)]
#[cfg(feature = "flex")]
mod tests {
    use burn::module::Lora;
    use burn::nn::{Linear, LinearConfig};

    use super::*;

    #[test]
    fn the_scale_of_an_adapter_is_the_value_of_ones_over_zero() {
        let linear: Linear = LinearConfig::new(2, 3)
            .with_bias(false)
            .init(&Device::flex());
        let values = linear.weight.val().into_data();
        let adapted = linear.apply_lora(Lora::new(2, 5.0));
        let (plain, taken) = take_adapters(adapted, ["weight".into()].into(), |_| true);
        assert_eq!(taken["weight"].scale, 2.5, "alpha divided by the rank");
        assert_eq!(plain.weight.val().into_data(), values);
        let put = put_adapters(plain, taken.into_iter().collect());
        assert!(put.weight.reparameterization::<LoraAdapter>().is_some());
    }
}
