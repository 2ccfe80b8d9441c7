//! Training: the program of one rank, and the step that the unsharded reference also uses.

use std::ops::Range;
use std::time::Duration;

use burn::optim::{AdamWConfig, GradientsAccumulator, GradientsParams, ModuleOptimizer};
use burn::prelude::*;
use burn::tensor::DType;
use burn_dtensor::comm::{OffloadTraffic, Snapshot};
use burn_dtensor::debug::Timeline;
use burn_dtensor::fsdp::{FsdpModule, OffloadPolicy, record_events};
use burn_dtensor::prelude::*;

use crate::cli::Settings;
use crate::data::Batch;
use crate::model::Gpt;
use crate::progress::Progress;

/// Result of a rank.
pub struct Outcome {
    /// Loss of each step, averaged over all ranks.
    pub losses: Vec<f32>,
    /// Number of optimizer steps that did not overflow.
    pub made: usize,
    /// Elements of this rank's parameter shards.
    pub local_params: usize,
    /// The collectives of the training steps.
    pub ledger: Snapshot,
    /// Traffic between the CPU and the device in the training steps.
    pub host_copies: OffloadTraffic,
    /// The full model, on rank 0.
    pub model: Option<Gpt>,
    /// Tokens of all ranks per second.
    pub tokens_per_s: f64,
    /// Time for which each rank waited for others per step, on rank 0.
    pub waiting: Vec<Duration>,
    /// Timelines of all ranks, on rank 0, if a trace is requested.
    pub timelines: Option<Vec<Timeline>>,
}

/// Trains the model, sharded, starting from `initial`.
///
/// # Collective
/// Every rank calls it.
pub fn train(settings: &Settings, initial: &Gpt, world: &World) -> Result<Outcome> {
    let names = ["replicate", "shard"];
    let names = &names[names.len() - settings.mesh.len()..];
    let mesh = DeviceMesh::new(world, &settings.mesh, names)?;
    let device = world.device().clone().autodiff();
    let policy =
        MixedPrecisionPolicy::new().with_param_dtype(settings.param_dtype).with_reduce_dtype(settings.reduce_dtype);
    let config = FullyShard::new()
        .with_units(["blocks.*"])
        .with_reshard_after_forward(settings.reshard)
        .with_mixed_precision(policy.clone().with_output_dtype(DType::F32))
        .with_mixed_precision_for(["blocks.*"], policy)
        .with_offload(if settings.offload { OffloadPolicy::Cpu } else { OffloadPolicy::Never });
    // With offload, the model need not fit on the device.
    let start = if settings.offload { Device::flex().autodiff() } else { device.clone() };
    let mut model = initial.clone().fork(&start);
    model.checkpoint = settings.checkpoint_activations;
    let mut model = fully_shard(model, &mesh, config)?;
    if let Some(blocks) = settings.prefetch {
        prefetch(&model, blocks)?;
    }
    let local_params = model.num_params();
    let mut optim = AdamWConfig::new().init();
    let mut scaler = (settings.param_dtype == DType::F16).then(GradScaler::new);
    let (mut losses, mut made) = (Vec::with_capacity(settings.steps), 0);
    world.ledger().reset();

    let tokens = settings.ranks() * settings.accumulate * settings.batch * settings.model.seq;
    let mut progress = Progress::new(world.rank() == 0, settings.steps, (tokens, "tokens"));
    let rows = world.rank() * settings.batch..(world.rank() + 1) * settings.batch;
    let mut last_step = Vec::new();
    for step in 0..settings.steps {
        let batches = batches(settings, step, rows.clone(), &device);
        let (stepped, events) = record_events(|| train_step(model, &mut optim, scaler.as_mut(), batches, settings));
        last_step = events;
        let (loss, is_made);
        (model, loss, is_made) = stepped?;
        // Each rank holds the mean over its own rows; together they are a Partial(avg).
        let placements = vec![Placement::Partial(PartialOp::Avg); mesh.ndim()];
        let loss = DTensor::from_local(loss, &mesh, &placements)?.full_tensor()?.into_scalar::<f32>();
        losses.push(loss);
        made += usize::from(is_made);
        progress.step(loss);
    }
    let tokens_per_s = progress.finish();
    let (ledger, host_copies) = (world.ledger().snapshot(), world.ledger().summary().host_copies);
    let waiting = world.ledger().spent().waiting / settings.steps as u32;
    let waiting = world.all().gather_object("waiting".into(), &waiting, 0)?.unwrap_or_default();
    let full = full_model(&model)?;
    let model = (world.rank() == 0).then_some(full);
    let timelines = match settings.trace {
        Some(_) => world.all().gather_object("timelines".into(), &Timeline::of(world.rank(), &last_step), 0)?,
        None => None,
    };
    Ok(Outcome { losses, made, local_params, ledger, host_copies, model, tokens_per_s, waiting, timelines })
}

/// Prefetches `blocks` blocks: in the forward of each block those after it, and in its backward those before it.
fn prefetch(model: &Gpt, blocks: usize) -> Result<()> {
    let all: Vec<FsdpModule> = model.blocks().iter().map(FsdpModule::of).collect::<Result<_>>()?;
    let after = |at: usize| all[at..].iter().take(blocks).cloned();
    // The first blocks follow the embeddings, which belong to the root unit.
    FsdpModule::of(model)?.own().set_forward_prefetch(after(0));
    for (at, block) in all.iter().enumerate() {
        block.set_forward_prefetch(after(at + 1));
        block.set_backward_prefetch(all[..at].iter().rev().take(blocks).cloned());
    }
    Ok(())
}

/// Returns the batches of a step, restricted to these rows.
pub fn batches(settings: &Settings, step: usize, rows: Range<usize>, device: &Device) -> Vec<Batch> {
    let numbers = step * settings.accumulate..(step + 1) * settings.accumulate;
    let batch = |number| settings.text.batch((settings.seed, number), rows.clone(), settings.model.seq, device);
    numbers.map(batch).collect()
}

/// Makes one step of AdamW. Returns the model, the mean loss `[1]` of `batches` before the step, without autodiff,
/// and true if the step was made. A `scaler` skips steps that overflow.
///
/// # Collective
/// If the model is sharded, every rank calls it.
pub fn train_step(
    model: Gpt,
    optim: &mut ModuleOptimizer,
    mut scaler: Option<&mut GradScaler>,
    batches: Vec<Batch>,
    settings: &Settings,
) -> Result<(Gpt, Tensor<1>, bool)> {
    let count = batches.len();
    let units = FsdpModule::of(&model).ok();
    let (mut sum, mut total) = (GradientsAccumulator::new(), None);
    for (at, (tokens, targets)) in batches.into_iter().enumerate() {
        // Accumulated gradients are reduced with those of the last batch.
        units.iter().for_each(|units| units.set_requires_gradient_sync(at + 1 == count));
        let loss = model.loss(tokens, targets) / count as f64;
        let value = loss.clone().inner();
        total = Some(total.map_or(value.clone(), |total: Tensor<1>| total + value));
        let loss = scaler.as_ref().map_or(loss.clone(), |scaler| scaler.scale(loss));
        sum.accumulate(&model, GradientsParams::from_grads(loss.backward(), &model));
    }
    let value = total.expect("a step has at least one batch");
    let mut grads = sum.grads();
    let is_finite = match &mut scaler {
        Some(scaler) => scaler.unscale(&model, &mut grads)?,
        None => true,
    };
    if let Some(max_norm) = settings.clip.filter(|_| is_finite) {
        clip_grad_norm(&model, &mut grads, max_norm, NormType::L2)?;
    }
    let model = match scaler {
        Some(scaler) => {
            let model = scaler.step(model, grads, |model, grads| Ok(optim.step(settings.lr, model, grads)))?;
            scaler.update()?;
            model
        }
        None => optim.step(settings.lr, model, grads),
    };
    Ok((model, value, is_finite))
}
