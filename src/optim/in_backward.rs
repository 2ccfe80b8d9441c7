//! [`ShardedOptimizer::backward`]: a backward that steps a parameter as soon as its gradient is reduced.

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::mem;
use std::rc::Rc;

use burn::backend::DispatchTensor;
use burn::backend::autodiff::NodeId;
use burn::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::module::{Devices, Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::optim::{GradientsParams, ModuleOptimizer, SgdConfig};
use burn::tensor::{Device, Tensor};
use itertools::Itertools;

use super::OptimError;
use super::factor::scaled_losses;
use super::sharded::ShardedOptimizer;
use crate::autodiff;
use crate::burn_compat::{ModulePath, TensorMapper, map_tensors};
use crate::memory;
use crate::param::{
    LeftGradients, ParamError, awaited_leaves, backward_with_steps, check_not_replaced, copying,
    stored_like, walk,
};
use crate::{Error, Result};

impl ShardedOptimizer {
    /// Runs the backward of `loss`, and steps each distributed parameter of `model` as soon as its
    /// gradient is reduced, which frees the gradient. Parameters that are not distributed are
    /// stepped at the end. The result is that of `loss.backward()` and [`step`](Self::step), with
    /// the same bits. If forward enters [units](fn@crate::fsdp::unit), the gradients of all shards
    /// are never in memory together.
    ///
    /// A parameter that several passes train (tied weights, a unit that was entered twice) is
    /// stepped after the last of their reductions. If forwards wait for a backward that are not in
    /// the graph of `loss`, their parameters are stepped at the end. Gradients of other models and
    /// of inputs are dropped: for those, call `loss.backward()`.
    ///
    /// ```
    /// # use burn::nn::LinearConfig;
    /// # use burn::optim::AdamWConfig;
    /// # use burn::tensor::Tensor;
    /// # use burn_dtensor::optim::sharded;
    /// # use burn_dtensor::prelude::*;
    /// # launch(Launch::threads(2), |world| {
    /// # let mesh = DeviceMesh::new(world, [2], ["shard"])?;
    /// # let device = world.device().clone().autodiff();
    /// # let mut model = fully_shard(LinearConfig::new(8, 6).init(&device), &mesh, FullyShard::new())?;
    /// # let mut optim = sharded(AdamWConfig::new());
    /// # let x = Tensor::<2>::ones([1, 8], &device);
    /// let loss = unit(&model, x, |model, x| model.forward(x)).square().sum();
    /// model = optim.backward(1e-3, model, loss)?;
    /// # let _ = model;
    /// # Ok(())
    /// # })?;
    /// # Ok::<_, burn_dtensor::Error>(())
    /// ```
    ///
    /// # Collective
    /// Like `loss.backward()`. The steps are local.
    ///
    /// # Errors
    /// Before the backward: [`OptimError::InBackward`] if a step needs all gradients, with clipping
    /// by norm, with Muon, for a loss that a [`GradScaler`](crate::fsdp::GradScaler) has scaled, and
    /// if a unit does not synchronize its gradients;
    /// [`ParamError::Replaced`](crate::param::ParamError::Replaced).
    ///
    /// After it: those of [`step`](Self::step), and
    /// [`ParamError::LateGradient`](crate::param::ParamError::LateGradient) if the loss reads a
    /// shard (`param.base()`, `param.shard()`) outside its unit.
    ///
    /// # Panics
    /// Like `loss.backward()`: a rank unwinds with the error of a failed collective, and with
    /// [`OptimError::InBackward`], before any step, if a scaled loss is part of `loss`. If a
    /// backward unwinds later, some parameters may have been stepped, and the model is gone: load a
    /// checkpoint.
    pub fn backward<M: Module, const D: usize>(
        &mut self,
        lr: impl Into<ModuleLearningRate>,
        model: M,
        loss: Tensor<D>,
    ) -> Result<M> {
        let lr = lr.into();
        let distributed = self.check_backward(&model, &loss)?;
        let mut take = TakeShards {
            awaited: awaited_leaves(),
            shards: HashMap::new(),
            placed: HashMap::new(),
        };
        // Not a step: the units' postponed gradients still belong to these parameters.
        let model = copying(|| map_tensors(model, &mut take));
        let paths = take
            .shards
            .iter()
            .map(|(leaf, shard)| (*leaf, shard.path.iter().join(".")))
            .collect();
        let steps = Rc::new(RefCell::new(StepsOfShards {
            optim: mem::replace(&mut self.optim, SgdConfig::new().init()),
            lr: lr.clone(),
            shards: take.shards,
            stepped: 0,
        }));
        let restored = RestoreOptimizer {
            optim: &mut self.optim,
            steps: steps.clone(),
        };
        let step = {
            let steps = steps.clone();
            Box::new(move |leaf, grad| steps.borrow_mut().step(leaf, grad))
        };
        let (
            grads,
            LeftGradients {
                grads: left,
                direct,
            },
        ) = backward_with_steps(paths, step, (scaled_losses(), refuse_scaled), || {
            loss.backward()
        });
        for (leaf, grad) in left {
            steps.borrow_mut().step(leaf, grad);
        }
        drop(restored);
        let StepsOfShards {
            shards, stepped, ..
        } = Rc::try_unwrap(steps)
            .unwrap_or_else(|_| unreachable!("the backward has dropped its steps"))
            .into_inner();
        let mut restore = ReturnShards {
            shards,
            placed: take.placed,
            stored: HashMap::new(),
        };
        let restore = || map_tensors(model, &mut restore);
        // Without a step, postponed gradients have missed none.
        let model = match stepped {
            0 => copying(restore),
            _ => restore(),
        };
        if let Some(param) = direct {
            return Err(ParamError::LateGradient { param }.into());
        }
        let grads = GradientsParams::from_grads(grads, &model);
        let model = match stepped > 0 && grads.is_empty() {
            true => model,
            false => {
                let allowed = self.allows_empty_steps;
                self.allows_empty_steps |= stepped > 0;
                let model = self.step(lr, model, grads);
                self.allows_empty_steps = allowed;
                model?
            }
        };
        Ok(copying(|| {
            map_tensors(model, &mut RenewLeaves { distributed })
        }))
    }
}

impl ShardedOptimizer {
    /// Checks that the parameters of `model` can be stepped one by one in the backward of `loss`.
    /// Returns the distributed parameters.
    fn check_backward<M: Module, const D: usize>(
        &self,
        model: &M,
        loss: &Tensor<D>,
    ) -> Result<HashSet<ParamId>> {
        let found = walk(model);
        check_not_replaced(model, &found)?;
        let refuse = |problem: String| Err(OptimError::InBackward { problem }.into());
        if self.groups.iter().any(|group| group.muon.is_some()) {
            return refuse("Muon gathers the matrices of a group together".into());
        }
        if self.groups.iter().any(|group| group.clip.is_some()) {
            return refuse("the norm of a gradient is reduced with those of its group".into());
        }
        let node = autodiff::node_id(loss.clone().into_dispatch());
        if node.is_some_and(|node| scaled_losses().contains(&node)) {
            return refuse(SCALED.into());
        }
        let mut units = found.distributed.iter().map(|visited| &visited.param.unit);
        match units.find(|unit| unit.puts_off()) {
            Some(unit) => refuse(format!(
                "unit `{}` does not synchronize its gradients in this backward",
                unit.label()
            )),
            None => Ok(found.distributed.iter().map(|found| found.id).collect()),
        }
    }
}

/// Problem of a loss that a scaler has scaled.
const SCALED: &str =
    "a `GradScaler` has scaled the loss, and skips a step if any gradient is not finite";

fn refuse_scaled() -> ! {
    let problem = SCALED.into();
    Error::from(OptimError::InBackward { problem }).unwind()
}

/// A shard that was taken out of its model for a backward.
struct ShardInBackward {
    id: ParamId,
    path: Vec<String>,
    /// The shard, without autodiff; `None` while it is stepped. A step may write its memory if no
    /// other handle is left.
    shard: Option<DispatchTensor>,
    step: StepShard,
}

type StepShard = fn(
    &mut ModuleOptimizer,
    &ModuleLearningRate,
    &ShardInBackward,
    DispatchTensor,
    DispatchTensor,
) -> DispatchTensor;

/// Mapper that takes the shards of these leaves out of a model. Zeros of their shapes, which have
/// no memory of their own, stand for them.
struct TakeShards {
    awaited: HashSet<NodeId>,
    shards: HashMap<NodeId, ShardInBackward>,
    /// The leaf of the shard at each path.
    placed: HashMap<String, NodeId>,
}

impl TensorMapper for TakeShards {
    fn float<const D: usize>(
        &mut self,
        path: &ModulePath,
        param: Param<Tensor<D>>,
    ) -> Param<Tensor<D>> {
        let leaf = match param.is_initialized() {
            true => autodiff::node_id(param.base().into_dispatch()),
            false => None,
        };
        let Some(leaf) = leaf.filter(|leaf| self.awaited.contains(leaf)) else {
            return param;
        };
        self.placed.insert(path.join(), leaf);
        let id = param.id;
        param.map(|shard| {
            let placeholder = memory::placeholder(&shard.clone().into_dispatch());
            let placeholder = stored_like(&shard, Tensor::from_dispatch(placeholder));
            self.shards.entry(leaf).or_insert_with(|| ShardInBackward {
                id,
                path: path.names().to_vec(),
                shard: Some(shard.inner().into_dispatch()),
                step: step_shard::<D>,
            });
            placeholder
        })
    }
}

/// The steps of one backward.
struct StepsOfShards {
    optim: ModuleOptimizer,
    lr: ModuleLearningRate,
    shards: HashMap<NodeId, ShardInBackward>,
    /// Number of shards that were stepped.
    stepped: usize,
}

impl StepsOfShards {
    fn step(&mut self, leaf: NodeId, grad: DispatchTensor) {
        let mut taken = self.shards.remove(&leaf).expect("a shard that was taken");
        let shard = taken
            .shard
            .take()
            .expect("it was put back after its last step");
        taken.shard = Some((taken.step)(&mut self.optim, &self.lr, &taken, shard, grad));
        self.shards.insert(leaf, taken);
        self.stepped += 1;
    }
}

fn step_shard<const D: usize>(
    optim: &mut ModuleOptimizer,
    lr: &ModuleLearningRate,
    taken: &ShardInBackward,
    shard: DispatchTensor,
    grad: DispatchTensor,
) -> DispatchTensor {
    let mut grads = GradientsParams::new();
    grads.register(taken.id, Tensor::<D>::from_dispatch(grad));
    // burn's optimizer steps tensors with autodiff. Not a leaf: the graph is locked.
    let param = Tensor::<D>::from_inner(Tensor::from_dispatch(shard));
    let module = ParamAtPath {
        path: taken.path.clone(),
        param: Param::initialized(taken.id, param),
    };
    let stepped = optim.step(lr.clone(), module, grads).param;
    stepped.into_value().inner().into_dispatch()
}

/// Moves burn's optimizer back to where it was taken from, also if a backward unwinds.
struct RestoreOptimizer<'a> {
    optim: &'a mut ModuleOptimizer,
    steps: Rc<RefCell<StepsOfShards>>,
}

impl Drop for RestoreOptimizer<'_> {
    fn drop(&mut self) {
        if let Ok(mut steps) = self.steps.try_borrow_mut() {
            mem::swap(self.optim, &mut steps.optim);
        }
    }
}

/// Mapper that returns shards to their model. Tied parameters share one tensor.
struct ReturnShards {
    shards: HashMap<NodeId, ShardInBackward>,
    placed: HashMap<String, NodeId>,
    stored: HashMap<NodeId, DispatchTensor>,
}

impl TensorMapper for ReturnShards {
    fn float<const D: usize>(
        &mut self,
        path: &ModulePath,
        param: Param<Tensor<D>>,
    ) -> Param<Tensor<D>> {
        let Some(leaf) = self.placed.get(&path.join()) else {
            return param;
        };
        if let Some(stored) = self.stored.get(leaf) {
            let stored = stored.clone();
            return param.map(|_| Tensor::from_dispatch(stored));
        }
        let taken = self.shards.remove(leaf).expect("a shard that was taken");
        param.map(|placeholder| {
            let shard = taken.shard.expect("it was put back after its last step");
            let stored = stored_like(&placeholder, Tensor::<D>::from_dispatch(shard));
            self.stored.insert(*leaf, stored.clone().into_dispatch());
            stored
        })
    }
}

/// Mapper that gives new leaves to distributed parameters. Which of them have new ones after a
/// backward depends on the passes that exist on this rank, and leaves identify gathered weights.
struct RenewLeaves {
    distributed: HashSet<ParamId>,
}

impl TensorMapper for RenewLeaves {
    fn float<const D: usize>(
        &mut self,
        _: &ModulePath,
        param: Param<Tensor<D>>,
    ) -> Param<Tensor<D>> {
        match self.distributed.contains(&param.id) && param.is_initialized() {
            true => param.map(|shard| match shard.is_require_grad() {
                true => stored_like(&shard.clone(), shard.inner()),
                false => shard,
            }),
            false => param,
        }
    }
}

/// A parameter at a path, as burn's optimizers, which step modules, select its group by.
#[derive(Debug, Clone)]
struct ParamAtPath<const D: usize> {
    path: Vec<String>,
    param: Param<Tensor<D>>,
}

impl<const D: usize> Module for ParamAtPath<D> {
    fn collect_devices(&self, devices: Devices) -> Devices {
        self.param.collect_devices(devices)
    }

    fn fork(self, device: &Device) -> Self {
        let param = self.param.fork(device);
        Self { param, ..self }
    }

    fn to_device(self, device: &Device) -> Self {
        let param = self.param.to_device(device);
        Self { param, ..self }
    }

    fn train(self) -> Self {
        let param = self.param.train();
        Self { param, ..self }
    }

    fn valid(&self) -> Self {
        Self {
            path: self.path.clone(),
            param: self.param.valid(),
        }
    }

    fn materialize(self) -> Self {
        let param = self.param.materialize();
        Self { param, ..self }
    }

    fn visit<V: ModuleVisitor>(&self, visitor: &mut V) {
        for name in &self.path {
            visitor.enter_module(name, "Struct:ParamAtPath");
        }
        visitor.visit_float(&self.param);
        for name in self.path.iter().rev() {
            visitor.exit_module(name, "Struct:ParamAtPath");
        }
    }

    fn map<T: ModuleMapper>(self, mapper: &mut T) -> Self {
        let Self { path, param } = self;
        for name in &path {
            mapper.enter_module(name, "Struct:ParamAtPath");
        }
        let param = mapper.map_float(param);
        for name in path.iter().rev() {
            mapper.exit_module(name, "Struct:ParamAtPath");
        }
        Self { path, param }
    }
}
