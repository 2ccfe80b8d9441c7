//! Training as a plan says, sharded: what one rank does.

use std::collections::BTreeMap;

use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::{AdamWConfig, GradientsAccumulator, GradientsParams, ModuleOptimizer, SgdConfig};
use burn::tensor::{DType, Device, Tensor};
use burn_dtensor::comm::World;
use burn_dtensor::fsdp::{FsdpModule, ParamError, full_model, full_model_on, fully_shard};
use burn_dtensor::mesh::DeviceMesh;
use burn_dtensor::parallel::parallelize;
use burn_dtensor::replicate::replicate;
use burn_dtensor::{Error, Result};

use super::choices::{Backwards, Kept, Waits};
use super::net::Net;
use super::node::Run;
use super::plan::Plan;
use crate::fsdp::support::{elements, on_device};

pub const LEARNING_RATE: f64 = 0.05;

/// The results of a training.
#[derive(Debug, PartialEq)]
pub struct Trained {
    /// The values of every parameter, by path.
    pub params: BTreeMap<String, Vec<f64>>,
    /// The parameters of which the rank holds something, by path, and whether they had a gradient:
    /// of each model in each step.
    pub stepped: Vec<BTreeMap<String, bool>>,
    /// The losses of forwards that no backward followed, before they are scaled.
    pub evaluated: Vec<f64>,
}

/// Returns what one rank has of it.
pub fn sharded(plan: &Plan, start: &[Net], world: &World) -> Result<Trained> {
    let meshes = Meshes::new(plan, world)?;
    let device = device(plan, world.device());
    let shard = |net| meshes.distribute(plan, on_device(net, &device));
    let mut nets = start.iter().map(shard).collect::<Result<Vec<_>>>()?;
    let mut optimizers: Vec<_> = nets.iter().map(|_| optimizer(plan)).collect();
    nets.iter().try_for_each(|net| scale(plan, net))?;
    if plan.exports {
        nets.iter()
            .try_for_each(|net| full_model_on(net, 0).map(drop))?;
    }
    let (mut stepped, mut evaluated) = (Vec::new(), Vec::new());
    for step in 0..plan.steps {
        let [first, last] = plan.batches_of(step);
        let mut sums: Vec<_> = nets.iter().map(|_| GradientsAccumulator::new()).collect();
        nets.iter()
            .try_for_each(|net| keep(plan, net, plan.kept[step]))?;
        if plan.unshards {
            nets.iter()
                .try_for_each(|net| net.modules(unshard, unshard))?;
        }
        for batch in first..=last {
            nets.iter()
                .try_for_each(|net| wait(plan.waits, net, batch == last))?;
            let run = |model| Run {
                model,
                rank: meshes.data_rank(),
                batch,
            };
            let tp = meshes.tensor.as_ref();
            let mut evaluate = || {
                for valid in plan.mode.forwards() {
                    let loss = |(model, net): (usize, &Net)| match valid {
                        true => net.valid().loss(plan, run(model), tp, world.device()),
                        false => net.loss(plan, run(model), tp, &device),
                    };
                    let losses = nets.iter().enumerate().map(loss);
                    evaluated
                        .extend(losses.map(|loss| loss.into_scalar::<f64>() / plan.scaling.loss));
                }
            };
            let reshard = || {
                nets.iter().try_for_each(|net| {
                    FsdpModule::of(net)?.reshard();
                    Ok::<_, Error>(())
                })
            };
            if plan.is_before(plan.evaluated, batch) {
                evaluate();
            }
            if plan.is_before(plan.resharded, batch) {
                reshard()?;
            }
            let loss = |(model, net): (usize, &Net)| net.loss(plan, run(model), tp, &device);
            let trained = nets.iter().enumerate().map(loss).collect();
            if plan.evaluated.before_backwards {
                evaluate();
            }
            if plan.resharded.before_backwards {
                reshard()?;
            }
            for ((net, sum), grads) in
                nets.iter()
                    .zip(&mut sums)
                    .zip(backward(plan.backwards, &nets, trained))
            {
                if plan.waits == Waits::Reduced || batch == last {
                    sum.accumulate(net, grads);
                }
            }
        }
        for ((net, sum), optimizer) in nets.iter_mut().zip(&mut sums).zip(&mut optimizers) {
            let grads = sum.grads();
            stepped.push(steps(net, &grads));
            *net = optimizer.step(LEARNING_RATE, net.clone(), grads);
        }
    }
    let mut params = BTreeMap::new();
    for (model, net) in nets.iter().enumerate() {
        let full = on_device(&full_model(net)?, &Device::flex()).cast(DType::F64);
        params.extend(by_path(model, &full));
    }
    Ok(Trained {
        params,
        stepped,
        evaluated,
    })
}

/// The ranks that share a model: by their data, and by what they compute of it.
struct Meshes {
    data: DeviceMesh,
    tensor: Option<DeviceMesh>,
}

impl Meshes {
    fn new(plan: &Plan, world: &World) -> Result<Self> {
        let names = if plan.mesh.len() == 1 {
            vec!["shard"]
        } else {
            vec!["replicate", "shard"]
        };
        if plan.tensor_parallel == 1 {
            return Ok(Self {
                data: DeviceMesh::new(world, &plan.mesh, names)?,
                tensor: None,
            });
        }
        let shape = [&plan.mesh[..], &[plan.tensor_parallel]].concat();
        let mesh = DeviceMesh::new(world, &shape, [&names[..], &["tp"]].concat())?;
        Ok(Self {
            data: mesh.slice(names)?,
            tensor: Some(mesh.slice("tp")?),
        })
    }

    fn distribute(&self, plan: &Plan, net: Net) -> Result<Net> {
        let net = match &self.tensor {
            None => net,
            Some(mesh) => parallelize(net, mesh, plan.styles())?,
        };
        let net = match plan.nested() {
            None => net,
            Some((child, units, is_replicated)) => {
                net.map_child(child, |child| match is_replicated {
                    true => replicate(child, &self.data, plan.replicated(units)),
                    false => fully_shard(child, &self.data, plan.nested_sharded(units)),
                })?
            }
        };
        match plan.buckets {
            None => fully_shard(net, &self.data, plan.config()),
            Some(_) => replicate(net, &self.data, plan.data_parallel()),
        }
    }

    /// This rank's number among those that have data of their own.
    fn data_rank(&self) -> usize {
        let coordinate = self.data.coordinate().expect("a member");
        coordinate
            .iter()
            .zip(self.data.shape())
            .fold(0, |rank, (at, size)| rank * size + at)
    }
}

/// Returns the values of a model's parameters by path, which begins with the model's number.
pub fn by_path(model: usize, net: &Net) -> impl Iterator<Item = (String, Vec<f64>)> + use<> {
    elements(net, None)
        .into_iter()
        .map(move |(path, values)| (format!("{model}.{path}"), values))
}

/// Returns the gradients of each model.
fn backward(order: Backwards, nets: &[Net], losses: Vec<Tensor<1>>) -> Vec<GradientsParams> {
    let each = losses.into_iter().zip(nets);
    let of_one = |(loss, net): (Tensor<1>, &Net)| GradientsParams::from_grads(loss.backward(), net);
    match order {
        Backwards::Joint => {
            let sum = each
                .map(|(loss, _)| loss)
                .reduce(|a, b| a + b)
                .expect("a model");
            let mut grads = sum.backward();
            nets.iter()
                .map(|net| GradientsParams::from_module(&mut grads, net))
                .collect()
        }
        Backwards::InOrder => each.map(of_one).collect(),
        Backwards::Reversed => {
            let mut grads: Vec<_> = each.rev().map(of_one).collect();
            grads.reverse();
            grads
        }
    }
}

/// Says what becomes of sums of gradients.
fn scale(plan: &Plan, net: &Net) -> Result<()> {
    let units = FsdpModule::of(net)?;
    if plan.scaling.sums_forced {
        units.set_force_sum_reduction(true);
    }
    units.set_gradient_divide_factor(plan.scaling.divisor)
}

/// Says which units stay gathered after the backwards of a step.
fn keep(plan: &Plan, net: &Net, kept: Kept) -> Result<()> {
    FsdpModule::of(net)?.set_reshard_after_backward(kept != Kept::All);
    let some = plan.tree.paths("tree", |node| node.unit && node.kept);
    if kept == Kept::Some && !some.is_empty() {
        FsdpModule::of(net)?
            .matching(some)?
            .set_reshard_after_backward(false);
    }
    Ok(())
}

/// Starts to gather a module's unit, if it is a unit of this module alone.
fn unshard<M: Module>(module: &M) -> Result<()> {
    match burn_dtensor::fsdp::unshard(module) {
        Ok(_)
        | Err(Error::Param(ParamError::NotSharded | ParamError::UnshardOnGroupUnit { .. })) => {
            Ok(())
        }
        Err(error) => Err(error),
    }
}

/// Says where the gradients of a micro-batch go.
fn wait(waits: Waits, net: &Net, is_last: bool) -> Result<()> {
    let units = FsdpModule::of(net)?;
    match waits {
        Waits::Unreduced => units.set_requires_gradient_sync(is_last),
        Waits::Scattered => units.set_requires_all_reduce(is_last),
        Waits::Reduced => {}
    }
    Ok(())
}

pub fn device(plan: &Plan, device: &Device) -> Device {
    let device = device.clone().autodiff();
    if plan.checkpointing {
        device.gradient_checkpointing()
    } else {
        device
    }
}

pub fn optimizer(plan: &Plan) -> ModuleOptimizer {
    if plan.adam {
        AdamWConfig::new().with_epsilon(1e-5).init()
    } else {
        SgdConfig::new().init()
    }
}

/// Returns whether each parameter has a gradient, by path, but for empty shards.
fn steps(net: &Net, grads: &GradientsParams) -> BTreeMap<String, bool> {
    let mut visitor = Stepped {
        grads,
        path: Vec::new(),
        stepped: BTreeMap::new(),
    };
    net.visit(&mut visitor);
    visitor.stepped
}

struct Stepped<'a> {
    grads: &'a GradientsParams,
    path: Vec<String>,
    stepped: BTreeMap<String, bool>,
}

impl ModuleVisitor for Stepped<'_> {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.into());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if param.base().shape().num_elements() > 0 {
            self.stepped
                .insert(self.path.join("."), self.grads.get::<D>(param.id).is_some());
        }
    }
}
