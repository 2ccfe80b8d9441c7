//! Shapes and values of every parameter (or gradient), by path.

use std::collections::BTreeMap;

use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::Tensor;

#[derive(Default)]
struct Values<'a> {
    path: Vec<String>,
    grads: Option<&'a GradientsParams>,
    shapes: BTreeMap<String, Vec<usize>>,
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
            Some(grads) => grads
                .get::<D>(param.id)
                .expect("every parameter has a gradient"),
            None => param.base(),
        };
        let path = self.path.join(".");
        self.shapes.insert(path.clone(), tensor.dims().to_vec());
        self.values
            .insert(path, tensor.into_data().try_to_vec().unwrap());
    }
}

/// Shapes, and flat values.
pub fn values<M: Module>(
    module: &M,
    grads: Option<&GradientsParams>,
) -> (BTreeMap<String, Vec<usize>>, BTreeMap<String, Vec<f32>>) {
    let mut values = Values {
        grads,
        ..Default::default()
    };
    module.visit(&mut values);
    (values.shapes, values.values)
}
