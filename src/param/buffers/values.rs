//! Access to buffers by path: [`read`] and [`write`].

use std::collections::{HashMap, HashSet};

use burn::backend::{DispatchTensor, TensorMetadata};
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, Parameter};
use burn::tensor::{Bool, Int, Tensor};

use crate::comm::TensorMeta;
use crate::dtensor::{Kind, associate};
use crate::param::lazy::undrawn;
use crate::param::states::copying;

/// Returns the plain values at `paths`, which are in burn's order.
///
/// Reading a lazy value initializes it. If `draw` is false, a lazy value is read as zeros instead.
pub(super) fn read<M: Module>(model: &M, paths: &[String], draw: bool) -> Vec<DispatchTensor> {
    let wanted = paths.iter().map(String::as_str).collect();
    let mut read = BufferReader { wanted, draw, path: Vec::new(), values: Vec::new() };
    model.visit(&mut read);
    read.values
}

/// Returns the model with these plain values at these paths. Running statistics are written in place, so all clones
/// of the model see them.
pub(super) fn write<M: Module>(model: M, paths: Vec<String>, values: Vec<DispatchTensor>) -> M {
    let mut write = Write { path: Vec::new(), values: paths.into_iter().zip(values).collect() };
    copying(|| model.map(&mut write))
}

/// Returns the shape and element type of a tensor that the other ranks will receive.
pub(super) fn meta(tensor: &DispatchTensor) -> TensorMeta {
    TensorMeta { shape: tensor.shape(), dtype: tensor.dtype() }
}

struct BufferReader<'a> {
    wanted: HashSet<&'a str>,
    draw: bool,
    path: Vec<String>,
    values: Vec<DispatchTensor>,
}

impl BufferReader<'_> {
    fn read<const D: usize, K: Kind>(&mut self, param: &Param<Tensor<D, K>>)
    where
        Tensor<D, K>: Parameter,
    {
        if self.wanted.contains(self.path.join(".").as_str()) {
            let value = match param.is_initialized() || self.draw {
                true => param.base(),
                false => undrawn(param.clone()).base(),
            };
            self.values.push(value.without_autodiff().into_dispatch());
        }
    }
}

impl ModuleVisitor for BufferReader<'_> {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.into());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.read(param);
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        self.read(param);
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<D, Bool>>) {
        self.read(param);
    }
}

struct Write {
    path: Vec<String>,
    values: HashMap<String, DispatchTensor>,
}

impl Write {
    fn write<const D: usize, K: Kind>(&mut self, param: Param<Tensor<D, K>>) -> Param<Tensor<D, K>>
    where
        Tensor<D, K>: Parameter,
    {
        let Some(value) = self.values.remove(&self.path.join(".")) else { return param };
        let param = if param.is_initialized() { param } else { undrawn(param) };
        param.map(|old| associate(Tensor::from_dispatch(value), old.gradient_checkpointing_strategy()))
    }
}

impl ModuleMapper for Write {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.into());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        self.write(param)
    }

    fn map_int<const D: usize>(&mut self, param: Param<Tensor<D, Int>>) -> Param<Tensor<D, Int>> {
        self.write(param)
    }

    fn map_bool<const D: usize>(&mut self, param: Param<Tensor<D, Bool>>) -> Param<Tensor<D, Bool>> {
        self.write(param)
    }
}
