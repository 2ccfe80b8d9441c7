//! Training: the program of one rank, and the step that the unsharded reference also uses.

use std::ops::Range;
use std::time::Duration;

use burn::lr_scheduler::composed::ComposedLrSchedulerConfig;
use burn::lr_scheduler::cosine::CosineAnnealingLrSchedulerConfig;
use burn::lr_scheduler::linear::LinearLrSchedulerConfig;
use burn::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;
use burn::optim::{AdamWConfig, GradientsAccumulator, GradientsParams};
use burn::prelude::*;
use burn::tensor::DType;
use burn_dtensor::comm::{OffloadTraffic, Snapshot};
use burn_dtensor::debug::Timeline;
use burn_dtensor::fsdp::{FsdpModule, OffloadPolicy, record_events};
use burn_dtensor::optim::sharded;
use burn_dtensor::prelude::*;

use crate::checkpoints::{Checkpoints, Training};
use crate::cli::Settings;
use crate::data::Batch;
use crate::model::Gpt;
use crate::progress::Progress;

/// Result of a rank.
pub struct Outcome {
    /// Loss of each step, averaged over all ranks.
    pub losses: Vec<f32>,
    /// Validation losses, over all ranks.
    pub validations: Vec<f32>,
    /// Number of steps of this run, which may have resumed after others.
    pub steps: usize,
    /// Number of validations of this run.
    pub validated: usize,
    /// Number of optimizer steps of this run that did not overflow.
    pub made: usize,
    /// Elements of this rank's parameter shards.
    pub local_params: usize,
    /// The collectives of training and validation.
    pub ledger: Snapshot,
    /// Traffic between the CPU and the device in training and validation.
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
    let args = &settings.args;
    let names = ["replicate", "shard"];
    let names = &names[names.len() - settings.mesh.len()..];
    let mesh = DeviceMesh::new(world, &settings.mesh, names)?;
    let device = world.device().clone().autodiff();
    let policy = MixedPrecisionPolicy::new()
        .with_param_dtype(args.param_dtype)
        .with_reduce_dtype(args.reduce_dtype);
    let config = FullyShard::new()
        .with_units(["blocks.*"])
        .with_reshard_after_forward(args.reshard)
        .with_mixed_precision(policy.clone().with_output_dtype(DType::F32))
        .with_mixed_precision_for(["blocks.*"], policy)
        .with_offload(if args.offload {
            OffloadPolicy::Cpu
        } else {
            OffloadPolicy::Never
        });
    // With offload, the model need not fit on the device.
    let start = if args.offload {
        Device::flex().autodiff()
    } else {
        device.clone()
    };
    let mut model = initial.clone().fork(&start);
    model.checkpoint = args.checkpoint_activations;
    let model = fully_shard(model, &mesh, config)?;
    if let Some(blocks) = args.prefetch {
        prefetch(&model, blocks)?;
    }
    let local_params = model.num_params();
    let mut training = Training {
        model,
        optim: sharded(AdamWConfig::new()),
        schedule: schedule(settings)?,
        scaler: (args.param_dtype == DType::F16).then(GradScaler::new),
        losses: Vec::with_capacity(args.steps),
        validations: Vec::new(),
    };
    let checkpoints = Checkpoints::open(settings, &mesh)?;
    let mut first = 0;
    if let Some(checkpoints) = checkpoints.as_ref().filter(|_| args.resume) {
        let report;
        (training, first, report) = checkpoints.resume(training)?;
        world.run_on(0, || println!("{report}"));
    }
    let validated_before = training.validations.len();
    world.ledger().reset();

    let tokens = settings.ranks() * args.accumulate * args.batch * settings.model.seq;
    let mut progress = Progress::new(world.rank() == 0, first..args.steps, (tokens, "tokens"));
    let rows = world.rank() * args.batch..(world.rank() + 1) * args.batch;
    let mut made = 0;
    let mut last_step = Vec::new();
    let mut waiting = Duration::ZERO;
    for step in first..args.steps {
        let batches = batches(settings, step, rows.clone(), &device);
        let waited_before = world.ledger().spent().waiting;
        let rate = training.schedule.step();
        let optim_step = |model, grads| training.optim.step(rate, model, grads);
        let scaler = training.scaler.as_mut();
        let (stepped, events) =
            record_events(|| train_step(training.model, optim_step, scaler, batches, settings));
        last_step = events;
        let (loss, is_made);
        (training.model, loss, is_made) = stepped?;
        made += usize::from(is_made);
        let loss = mesh.all_reduce(loss, ReduceOp::Avg)?.into_scalar::<f32>();
        waiting += world.ledger().spent().waiting - waited_before;
        training.losses.push(loss);
        if settings.is_validated_after(step) {
            training
                .validations
                .push(validation_loss(&training.model, settings, &mesh)?);
        }
        match training.validations.last() {
            Some(validation) => progress.step(format_args!(
                "loss {loss:.4}  validation loss {validation:.4}"
            )),
            None => progress.step(format_args!("loss {loss:.4}")),
        }
        if let Some(checkpoints) = checkpoints
            .as_ref()
            .filter(|checkpoints| checkpoints.is_saved_after(step))
        {
            progress.note(checkpoints.save(step + 1, &training)?);
        }
    }
    let tokens_per_s = progress.finish();
    let (ledger, host_copies) = (
        world.ledger().snapshot(),
        world.ledger().summary().host_copies,
    );
    let steps = args.steps - first;
    let waiting = waiting / steps as u32;
    let waiting = world
        .all()
        .gather_object("waiting".into(), &waiting, 0)?
        .unwrap_or_default();
    let full = full_model(&training.model)?;
    let model = (world.rank() == 0).then_some(full);
    let timelines = match args.trace {
        Some(_) => world.all().gather_object(
            "timelines".into(),
            &Timeline::of(world.rank(), &last_step),
            0,
        )?,
        None => None,
    };
    Ok(Outcome {
        validated: training.validations.len() - validated_before,
        losses: training.losses,
        validations: training.validations,
        steps,
        made,
        local_params,
        ledger,
        host_copies,
        model,
        tokens_per_s,
        waiting,
        timelines,
    })
}

/// Returns the mean loss over the validation rows, each of which one rank computes.
///
/// # Collective
/// Every rank calls it.
fn validation_loss(model: &Gpt, settings: &Settings, mesh: &DeviceMesh) -> Result<f32> {
    let all = settings.validation_rows();
    let bound = |rank: usize| rank * all / mesh.size();
    let rows = bound(mesh.rank())..bound(mesh.rank() + 1);
    // All ranks run the same units. One that has no row computes the first, and counts it 0 times.
    let computed = if rows.is_empty() { 0..1 } else { rows.clone() };
    let (tokens, targets) = settings
        .validation
        .rows(computed, settings.model.seq, mesh.device());
    let sum = model.valid().loss(tokens, targets) * rows.len() as f64;
    Ok(mesh.all_reduce(sum, ReduceOp::Sum)?.into_scalar::<f32>() / all as f32)
}

/// Returns the schedule of the learning rate: it rises linearly over a tenth of the steps, then
/// falls to zero along half a cosine wave.
pub fn schedule(settings: &Settings) -> Result<ModuleLrScheduler> {
    let (steps, warm_up) = (settings.args.steps, settings.args.steps.div_ceil(10));
    ComposedLrSchedulerConfig::new()
        .linear(LinearLrSchedulerConfig::new(
            1.0 / warm_up as f64,
            1.0,
            warm_up,
        ))
        .cosine(CosineAnnealingLrSchedulerConfig::new(
            settings.args.lr,
            steps,
        ))
        .init()
        .map_err(Error::other)
}

/// Prefetches `blocks` blocks: in the forward of each block those after it, and in its backward
/// those before it.
fn prefetch(model: &Gpt, blocks: usize) -> Result<()> {
    let all: Vec<FsdpModule> = model
        .blocks()
        .iter()
        .map(FsdpModule::of)
        .collect::<Result<_>>()?;
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
pub fn batches(
    settings: &Settings,
    step: usize,
    rows: Range<usize>,
    device: &Device,
) -> Vec<Batch> {
    let accumulate = settings.args.accumulate;
    let numbers = step * accumulate..(step + 1) * accumulate;
    numbers
        .map(|number| {
            settings.text.batch(
                (settings.args.seed, number),
                rows.clone(),
                settings.model.seq,
                device,
            )
        })
        .collect()
}

/// Makes one step with `optim_step`. Returns the model, the mean loss `[1]` of `batches` before the
/// step, without autodiff, and true if the step was made. A `scaler` skips steps that overflow.
///
/// # Collective
/// If the model is sharded, every rank calls it.
pub fn train_step(
    model: Gpt,
    optim_step: impl FnOnce(Gpt, GradientsParams) -> Result<Gpt>,
    mut scaler: Option<&mut GradScaler>,
    batches: Vec<Batch>,
    settings: &Settings,
) -> Result<(Gpt, Tensor<1>, bool)> {
    let count = batches.len();
    let units = FsdpModule::of(&model).ok();
    let mut sum = GradientsAccumulator::new();
    let mut total = None;
    for (at, (tokens, targets)) in batches.into_iter().enumerate() {
        // Accumulated gradients are reduced with those of the last batch.
        units
            .iter()
            .for_each(|units| units.set_requires_gradient_sync(at + 1 == count));
        let loss = model.loss(tokens, targets) / count as f64;
        let value = loss.clone().inner();
        total = Some(total.map_or(value.clone(), |total: Tensor<1>| total + value));
        let loss = scaler
            .as_ref()
            .map_or(loss.clone(), |scaler| scaler.scale(loss));
        sum.accumulate(&model, GradientsParams::from_grads(loss.backward(), &model));
    }
    let value = total.expect("a step has at least one batch");
    let mut grads = sum.grads();
    let is_finite = match &mut scaler {
        Some(scaler) => scaler.unscale(&model, &mut grads)?,
        None => true,
    };
    if let Some(max_norm) = settings.args.clip.filter(|_| is_finite) {
        clip_grad_norm(&model, &mut grads, max_norm, NormType::L2)?;
    }
    let model = match scaler {
        Some(scaler) => {
            let model = scaler.step(model, grads, optim_step)?;
            scaler.update()?;
            model
        }
        None => optim_step(model, grads)?,
    };
    Ok((model, value, is_finite))
}
