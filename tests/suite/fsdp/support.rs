//! What the `fully_shard` tests share.

use std::collections::BTreeMap;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::{Device, Tensor, TensorData};

use crate::models::Init;

/// Values of every parameter by path; gradients instead where given, zeros where missing.
pub fn values<M: Module>(module: &M, grads: Option<&GradientsParams>) -> BTreeMap<String, Vec<f32>> {
    let mut values = Values { path: vec![], grads, values: BTreeMap::new() };
    module.visit(&mut values);
    values.values
}

struct Values<'a> {
    path: Vec<String>,
    grads: Option<&'a GradientsParams>,
    values: BTreeMap<String, Vec<f32>>,
}

impl ModuleVisitor for Values<'_> {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.into());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let tensor = match self.grads {
            Some(grads) => grads.get::<D>(param.id).unwrap_or_else(|| param.base().inner().zeros_like()),
            None => param.base(),
        };
        let path = self.path.join(".");
        // Buffers are neither sharded nor trained.
        if path.contains("running_") {
            return;
        }
        self.values.insert(path, tensor.into_data().try_to_vec().unwrap());
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
            Tensor::from_data(base.into_data(), &self.0).set_require_grad(trained && self.0.is_autodiff())
        })
    }
}

pub fn max_diff(a: &BTreeMap<String, Vec<f32>>, b: &BTreeMap<String, Vec<f32>>) -> f32 {
    assert_eq!(a.keys().collect::<Vec<_>>(), b.keys().collect::<Vec<_>>());
    a.iter()
        .flat_map(|(path, values)| {
            assert_eq!(values.len(), b[path].len(), "{path}");
            values.iter().zip(&b[path]).map(|(x, y)| (x - y).abs())
        })
        .fold(0.0, f32::max)
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
        let seed = path.bytes().fold(7u64, |seed, byte| seed.wrapping_mul(31) + byte as u64);
        fill(seed, &(self.0)(path))
    }
}
