//! [`ema`]: exponential moving average of a model's weights.

use std::collections::BTreeMap;

use burn::backend::{DispatchTensor, TensorMetadata};
use burn::module::{Module, Param};
use burn::tensor::Tensor;

use super::OptimError;
use super::state::describe;
use crate::Result;
use crate::burn_compat::{ModulePath, TensorMapper, TensorVisitor, map_tensors, visit_tensors};
use crate::param::{Visited, check_not_replaced, stored_like, walk_with_paths};

/// Returns `average * decay + model * (1 - decay)` for every float parameter and buffer. Use it for
/// an exponential moving average of the weights, or for the teacher of a student model
/// (`torch.optim.swa_utils`).
///
/// `average` is an earlier clone of `model`, or was built and distributed in the same way. Each
/// rank averages its shards. Tensors of `average` that track gradients still do so in the result.
///
/// ```
/// use burn::module::Module;
/// use burn::nn::LinearConfig;
/// use burn_dtensor::optim::ema;
/// use burn_dtensor::prelude::*;
///
/// launch(Launch::threads(2), |world| {
///     let mesh = DeviceMesh::new(world, [2], ["shard"])?;
///     let device = world.device().clone().autodiff();
///     let model = fully_shard(LinearConfig::new(8, 6).init(&device), &mesh, FullyShard::new())?;
///     let mut teacher = model.clone().freeze();
///     // After each step of the optimizer:
///     teacher = ema(teacher, &model, 0.999)?;
///     # let _ = teacher;
///     Ok(())
/// })?;
/// # Ok::<_, burn_dtensor::Error>(())
/// ```
///
/// Clone and freeze the distributed model, as above. burn draws the parameters of most layers when
/// they are first read, and all clones share what is drawn. `model.clone().freeze()` before that,
/// on a model that is not distributed, therefore freezes `model` itself too.
/// [`fully_shard`](crate::fsdp::fully_shard) draws them.
///
/// Local: no communication.
///
/// # Errors
/// [`OptimError::Average`] for a model with other parameters or other layouts;
/// [`ParamError::Replaced`](crate::param::ParamError::Replaced) if a parameter of either model was
/// replaced after it was distributed.
pub fn ema<M: Module>(average: M, model: &M, decay: f64) -> Result<M> {
    let own = StoredValues::of(&average)?;
    let values = StoredValues::of(model)?;
    let paths = own.0.keys().chain(values.0.keys());
    for path in paths {
        let [was, is] =
            [&own, &values].map(|values| values.0.get(path).map(|(laid_out, _)| laid_out));
        if was != is {
            let [average, model] =
                [was, is].map(|laid_out| laid_out.map_or("nothing", |text| text).to_owned());
            return Err(OptimError::Average {
                path: path.clone(),
                average,
                model,
            }
            .into());
        }
    }
    drop(own);
    Ok(map_tensors(average, &mut Average { values, decay }))
}

/// Stored value of each parameter of a model, by path, with a description of its layout.
struct StoredValues(BTreeMap<String, (String, DispatchTensor)>);

impl StoredValues {
    fn of<M: Module>(model: &M) -> Result<Self> {
        let walk = walk_with_paths(model);
        check_not_replaced(model, &walk)?;
        let mut visit = Visit {
            found: BTreeMap::new(),
        };
        visit_tensors(model, &mut visit);
        for Visited {
            param, base, path, ..
        } in walk.distributed
        {
            let stored = visit
                .found
                .get_mut(&path.expect("the walk records paths"))
                .expect("it was visited");
            stored.0 = describe(&param.spec(base.dtype()));
        }
        Ok(Self(visit.found))
    }
}

struct Visit {
    found: BTreeMap<String, (String, DispatchTensor)>,
}

impl TensorVisitor for Visit {
    fn float<const D: usize>(&mut self, path: &ModulePath, param: &Param<Tensor<D>>) {
        let value = param.base().inner();
        let laid_out = format!("{:?} {}", value.dims(), value.dtype().name());
        self.found
            .insert(path.join(), (laid_out, value.into_dispatch()));
    }
}

struct Average {
    values: StoredValues,
    decay: f64,
}

impl TensorMapper for Average {
    fn float<const D: usize>(
        &mut self,
        path: &ModulePath,
        param: Param<Tensor<D>>,
    ) -> Param<Tensor<D>> {
        let (_, value) = self
            .values
            .0
            .remove(&path.join())
            .expect("`ema` has compared the paths");
        let value = Tensor::<D>::from_dispatch(value);
        param.map(|was| {
            let average =
                was.clone().inner().mul_scalar(self.decay) + value.mul_scalar(1.0 - self.decay);
            stored_like(&was, average)
        })
    }
}
