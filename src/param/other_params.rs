//! [`move_other_params`]: what is beside a model's parameters, on the device where they are computed with.

use std::collections::{HashMap, HashSet};

use burn::backend::DispatchTensor;
use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{Device, Shape, Tensor};

use super::model_scan::ModelScan;
use super::states::copying;

/// The model with everything on `device` but its float parameters, which stay where they are: running statistics, integer
/// and boolean parameters, and tensors in fields that are no parameters, such as a positional encoding's.
///
/// burn moves fields that it shows nobody with the whole module alone. So the parameters are taken out for that long.
pub(crate) fn move_other_params<M: Module>(model: M, device: &Device) -> M {
    let paths = ModelScan::of(&model).paths().into_iter().collect();
    let mut parameters = Parameters { path: Vec::new(), paths, taken: HashMap::new() };
    let model = copying(|| model.map(&mut parameters)).to_device(device);
    copying(|| model.map(&mut parameters))
}

/// Takes out those at `paths` when it first comes by, and puts them back the next time.
struct Parameters {
    path: Vec<String>,
    paths: HashSet<String>,
    taken: HashMap<String, DispatchTensor>,
}

impl ModuleMapper for Parameters {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.into());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let path = self.path.join(".");
        if let Some(taken) = self.taken.remove(&path) {
            return param.map(|_| Tensor::from_dispatch(taken));
        }
        if !self.paths.remove(&path) || !param.is_initialized() {
            return param;
        }
        param.map(|tensor| {
            let nothing = Tensor::empty(Shape::from([0; D]), &tensor.device());
            self.taken.insert(path, tensor.into_dispatch());
            nothing
        })
    }
}
