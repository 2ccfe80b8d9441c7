//! [`move_other_params`]: moves what is not a float parameter of a model to another device.

use std::collections::{HashMap, HashSet};

use burn::backend::DispatchTensor;
use burn::module::{Module, Param};
use burn::tensor::{Device, Shape, Tensor};

use super::distributed::copying;
use super::model_scan::ModelScan;
use crate::burn_compat::{ModulePath, TensorMapper, map_tensors};

/// Moves everything except the float parameters of `model` to `device`: running statistics, integer
/// and boolean parameters, and tensors in fields that are not parameters, such as that of a
/// positional encoding. Used for models whose parameters are offloaded to the CPU.
///
/// burn can move fields that it does not show to mappers only together with the module. Therefore
/// the parameters are taken out of the model while it moves.
pub(crate) fn move_other_params<M: Module>(model: M, device: &Device) -> M {
    let paths = ModelScan::of(&model).paths().into_iter().collect();
    let mut parameters = Parameters {
        paths,
        taken: HashMap::new(),
    };
    let model = copying(|| map_tensors(model, &mut parameters)).to_device(device);
    copying(|| map_tensors(model, &mut parameters))
}

/// A mapper that takes the parameters at `paths` out of a model on its first run, and puts them
/// back on its second.
struct Parameters {
    paths: HashSet<String>,
    taken: HashMap<String, DispatchTensor>,
}

impl TensorMapper for Parameters {
    fn float<const D: usize>(
        &mut self,
        at: &ModulePath,
        param: Param<Tensor<D>>,
    ) -> Param<Tensor<D>> {
        let path = at.join();
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
