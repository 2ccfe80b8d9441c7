//! One rank's training, and what it saw.

use std::collections::BTreeMap;

use burn::optim::{AdamWConfig, GradientsParams};
use burn_dtensor::Result;
use burn_dtensor::comm::{Op, World};
use burn_dtensor::fsdp::{FsdpModule, NormType, clip_grad_norm, full_model, fully_shard};
use burn_dtensor::mesh::DeviceMesh;
use burn_dtensor::parallel::parallelize;
use serde_json::Value;

use super::file::{AdamW, Golden, Run};
use super::sharding::{config, meshes};
use super::task::Task;
use super::values::values;

/// What one rank saw.
pub struct Trained {
    pub losses: Vec<f64>,
    pub norms: Vec<f64>,
    pub weights: BTreeMap<String, Vec<f32>>,
    pub local_shapes: BTreeMap<String, Vec<usize>>,
    pub first_grads: BTreeMap<String, Vec<f32>>,
    pub counts: BTreeMap<String, u64>,
}

pub fn train<M: Task>(golden: &Golden, run: &Run, world: &World) -> Result<Trained> {
    let device = world.device().clone().autodiff();
    let mut model = M::build(golden, run, &device);
    let (data, tensor) = meshes(world, run)?;
    if let Some(mesh) = &tensor {
        model = parallelize(model, mesh, M::plan(golden, run))?;
    }
    if let Some(mesh) = &data {
        model = fully_shard(model, mesh, config(run))?;
    }
    let local_shapes = values(&model, None).0;
    let units = data.as_ref().map(|_| FsdpModule::of(&model)).transpose()?;
    if let Some(units) = &units {
        units.set_gradient_divide_factor(run.rest.get("divf").and_then(Value::as_f64))?;
        units.set_force_sum_reduction(run.is("force_sum"));
    }
    let AdamW {
        lr,
        betas,
        eps,
        weight_decay,
    } = golden.optimizer;
    let mut optim = AdamWConfig::new()
        .with_beta_1(betas[0])
        .with_beta_2(betas[1])
        .with_epsilon(eps)
        .with_weight_decay(weight_decay)
        .init();
    let steps = match run.losses.len() {
        0 => golden.gpt_inputs.shape[0],
        steps => steps,
    };
    let sharing = tensor.as_ref().map_or(1, DeviceMesh::size);
    let rows = M::batch(golden) * sharing / run.ws;
    let first = world.rank() / sharing * rows;
    let acc = run.acc.unwrap_or(1);
    let mut trained = Trained {
        losses: vec![],
        norms: vec![],
        weights: BTreeMap::new(),
        local_shapes,
        first_grads: BTreeMap::new(),
        counts: BTreeMap::new(),
    };
    for step in 0..steps {
        world.ledger().reset();
        let mut accumulator = burn::optim::GradientsAccumulator::new();
        let mut total = 0.0;
        for micro in 0..acc {
            let size = rows / acc;
            if let Some(units) = &units {
                let is_last = micro + 1 == acc;
                units.set_requires_gradient_sync(is_last || !run.is("nosync"));
                units.set_requires_all_reduce(is_last || !run.is("noar"));
                units.set_reshard_after_backward(is_last || !run.is("norb"));
            }
            let start = first + micro * size;
            let loss = model.loss(golden, step, start..start + size, tensor.as_ref(), &device)?
                / acc as f64;
            total += loss.clone().into_scalar::<f32>() as f64;
            let grads = GradientsParams::from_grads(loss.backward(), &model);
            accumulator.accumulate(&model, grads);
        }
        let mut grads = accumulator.grads();
        if step == 0 {
            trained.first_grads = values(&model, Some(&grads)).1;
        }
        if step == 1 {
            let ledger = world.ledger();
            trained.counts = [
                ("_allgather_base_", Op::AllGather),
                ("_reduce_scatter_base_", Op::ReduceScatter),
                ("allreduce_", Op::AllReduce),
            ]
            .into_iter()
            .map(|(name, op)| (name.to_string(), ledger.calls(op)))
            .filter(|(_, calls)| *calls > 0)
            .collect();
        }
        if let Some(max_norm) = run.clip {
            trained
                .norms
                .push(clip_grad_norm(&model, &mut grads, max_norm, NormType::L2)?);
        }
        model = optim.step(lr, model, grads);
        trained.losses.push(total);
    }
    trained.weights = values(&full_model(&model)?, None).1;
    Ok(trained)
}
