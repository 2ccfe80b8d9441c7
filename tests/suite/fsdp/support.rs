//! What the `fully_shard` tests share.

use std::collections::BTreeMap;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::{DType, Device, Element, Tensor, TensorData};

use crate::models::Init;

/// Values of every parameter by path; gradients instead where given, zeros where missing.
pub fn values<M: Module>(
    module: &M,
    grads: Option<&GradientsParams>,
) -> BTreeMap<String, Vec<f32>> {
    elements(module, grads)
}

/// [`values`], of a module whose parameters are of another element type.
pub fn elements<E: Element>(
    module: &impl Module,
    grads: Option<&GradientsParams>,
) -> BTreeMap<String, Vec<E>> {
    let mut values = Values {
        path: vec![],
        grads,
        values: BTreeMap::new(),
    };
    module.visit(&mut values);
    values.values
}

struct Values<'a, E> {
    path: Vec<String>,
    grads: Option<&'a GradientsParams>,
    values: BTreeMap<String, Vec<E>>,
}

impl<E: Element> ModuleVisitor for Values<'_, E> {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.into());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let tensor = match self.grads {
            Some(grads) => grads
                .get::<D>(param.id)
                .unwrap_or_else(|| param.base().inner().zeros_like()),
            None => param.base(),
        };
        let path = self.path.join(".");
        // Buffers are neither sharded nor trained.
        if path.contains("running_") {
            return;
        }
        self.values
            .insert(path, tensor.into_data().try_to_vec().unwrap());
    }
}

/// A copy of `model` on `device`, with its setting of autodiff and gradient checkpointing.
pub fn on_device<M: Module>(model: &M, device: &Device) -> M {
    model.clone().train().map(&mut OnDevice(device.clone()))
}

struct OnDevice(Device);

impl ModuleMapper for OnDevice {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|base| {
            let trained = base.is_require_grad();
            let dtype = base.dtype();
            Tensor::from_data(base.into_data(), (&self.0, dtype))
                .set_require_grad(trained && self.0.is_autodiff())
        })
    }
}

/// How far apart two lists of values are where they are furthest; NaN if one has a NaN, infinity if
/// one is longer.
pub fn furthest<E: Copy + Into<f64>>(a: &[E], b: &[E]) -> f64 {
    if a.len() != b.len() {
        return f64::INFINITY;
    }
    greatest(a.iter().zip(b).map(|(&a, &b)| (a.into() - b.into()).abs()))
}

/// NaN if one is: `f64::max` would pass over it.
fn greatest(distances: impl Iterator<Item = f64>) -> f64 {
    distances.fold(0.0, |greatest, distance| {
        if distance.is_nan() || distance > greatest {
            distance
        } else {
            greatest
        }
    })
}

/// [`furthest`] over all parameters.
pub fn max_diff(a: &BTreeMap<String, Vec<f32>>, b: &BTreeMap<String, Vec<f32>>) -> f64 {
    assert_eq!(a.keys().collect::<Vec<_>>(), b.keys().collect::<Vec<_>>());
    greatest(a.iter().map(|(path, values)| furthest(values, &b[path])))
}

/// Random trees of frozen layers would else have none.
#[test]
fn a_copy_of_a_frozen_layer_is_frozen() {
    let device = Device::flex().autodiff();
    let layer = burn::nn::LinearConfig::new(2, 2).init(&device);
    assert!(on_device(&layer, &device).weight.is_require_grad());
    assert!(
        !on_device(&layer.no_grad(), &device)
            .weight
            .is_require_grad()
    );
}

#[test]
fn nan_is_near_nothing() {
    let by_path =
        |values: [f32; 3]| BTreeMap::from([("a".into(), vec![1.0]), ("b".into(), values.into())]);
    for broken in [[f32::NAN, 1.0, 1.0], [1.0, 1.0, f32::NAN], [f32::NAN; 3]] {
        let diff = max_diff(&by_path(broken), &by_path([1.0; 3]));
        assert!(diff.is_nan(), "{broken:?}: {diff}");
    }
    assert_eq!(max_diff(&by_path([1.0, 4.0, 1.0]), &by_path([1.0; 3])), 3.0);
}

/// The mean over ranks of values by path.
pub fn mean<'a>(
    ranks: impl ExactSizeIterator<Item = &'a BTreeMap<String, Vec<f32>>> + Clone,
) -> BTreeMap<String, Vec<f32>> {
    let mut mean = ranks.clone().next().expect("at least one rank").clone();
    for (path, values) in &mut mean {
        for (i, value) in values.iter_mut().enumerate() {
            *value = ranks.clone().map(|rank| rank[path][i]).sum::<f32>() / ranks.len() as f32;
        }
    }
    mean
}

/// Puts gradients where the parameters are.
pub struct Holder<'a>(pub &'a mut GradientsParams);

impl ModuleMapper for Holder<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let grad = self.0.remove::<D>(param.id);
        param.map(|base| match grad {
            Some(grad) => Tensor::from_data(grad.into_data(), &base.device()),
            None => base.zeros_like().detach(),
        })
    }
}

/// An optimizer of sorts: new leaves.
pub struct Shift;

impl ModuleMapper for Shift {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|base| {
            Tensor::from_data((base.inner() + 1.0).into_data(), &Device::flex().autodiff())
                .require_grad()
        })
    }
}

/// Casts every parameter.
pub struct Cast(pub DType);

impl ModuleMapper for Cast {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|base| {
            let is_trained = base.is_require_grad();
            base.cast(self.0).detach().set_require_grad(is_trained)
        })
    }
}

/// Deterministic values in `-0.5..0.5`, different for every `seed`.
pub fn fill(seed: u64, shape: &[usize]) -> TensorData {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1u64 << 24) as f32 - 0.5
    };
    let data: Vec<f32> = (0..shape.iter().product()).map(|_| next()).collect();
    TensorData::new(data, shape.to_vec())
}

pub fn tensor<const D: usize>(seed: u64, shape: [usize; D], device: &Device) -> Tensor<D> {
    Tensor::from_data(fill(seed, &shape), device)
}

/// Initial values from shapes by path.
pub struct Shapes(pub fn(&str) -> Vec<usize>);

impl Init for Shapes {
    fn data(&self, path: &str) -> TensorData {
        let seed = path
            .bytes()
            .fold(7u64, |seed, byte| seed.wrapping_mul(31) + byte as u64);
        fill(seed, &(self.0)(path))
    }
}
