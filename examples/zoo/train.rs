//! Training: the program of one rank, and the unsharded run for comparison.

use burn::lr_scheduler::cosine::CosineAnnealingLrSchedulerConfig;
use burn::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;
use burn::optim::{GradientsAccumulator, GradientsParams};
use burn::prelude::*;
use burn_dtensor::fsdp::FsdpModule;
use burn_dtensor::optim::ema;
use burn_dtensor::prelude::*;

use crate::cli::Settings;
use crate::progress::Progress;
use crate::task::Task;

/// Maximum norm of the gradients of a step.
const MAX_NORM: f64 = 1.0;
/// Decay of the moving average of the weights.
const DECAY: f64 = 0.9;

/// Result of a rank.
pub struct Outcome<T> {
    /// Loss of each step, over the rows of all ranks.
    pub losses: Vec<f32>,
    /// The full model, and the moving average of its weights, on rank 0.
    pub models: Option<[T; 2]>,
    /// Elements of this rank's parameter shards.
    pub held: usize,
    /// Summary of the communication of the training steps, in one line.
    pub sent: String,
}

/// Distributes and trains `initial`.
///
/// # Collective
/// Every rank calls it.
pub fn train<T: Task>(
    settings: &Settings,
    data: &T::Data,
    initial: &T,
    world: &World,
) -> Result<Outcome<T>> {
    let dims = &T::DIMS[T::DIMS.len() - settings.mesh.len()..];
    let mesh = DeviceMesh::new(world, &settings.mesh, dims)?;
    let device = world.device().clone().autodiff();
    let mut model = initial.clone().parallel(&mesh)?;
    let held = model.num_params();
    let mut average = model.clone().freeze();
    let mut optim = T::optimizers().0;
    let mut schedule = schedule(settings)?;
    let mut losses = Vec::with_capacity(settings.steps);
    world.ledger().reset();

    let (rank, ranks) = data_rank::<T>(settings, world.rank());
    let rows = rank * settings.batch..(rank + 1) * settings.batch;
    let mut progress = Progress::new(
        world.rank() == 0,
        0..settings.steps,
        (ranks * settings.batch * settings.accumulate, "rows"),
    );
    for step in 0..settings.steps {
        let mut sum = GradientsAccumulator::new();
        let mut total = 0.0;
        for batch in 0..settings.accumulate {
            // Each rank accumulates gradients, and reduces them with those of the last batch.
            FsdpModule::of(&model)?.set_requires_gradient_sync(batch + 1 == settings.accumulate);
            let number = step * settings.accumulate + batch;
            let loss = model.loss(data, (settings.seed, number), rows.clone(), &device)
                / settings.accumulate as f64;
            total += loss.clone().into_scalar::<f32>();
            sum.accumulate(&model, GradientsParams::from_grads(loss.backward(), &model));
        }
        let mut grads = sum.grads();
        clip_grad_norm(&model, &mut grads, MAX_NORM, NormType::L2)?;
        model = optim.step(schedule.step(), model, grads)?;
        average = ema(average, &model, DECAY)?;
        losses.push(mesh.all_reduce(f64::from(total), ReduceOp::Avg)? as f32);
        progress.step(format_args!("loss {:.4}", losses[step]));
    }
    progress.finish();
    let sent = world.ledger().summary().to_string();
    let models = [full_model(&model)?, full_model(&average)?];
    Ok(Outcome {
        losses,
        models: (world.rank() == 0).then_some(models),
        held,
        sent,
    })
}

/// Trains `initial` on one device, on the rows of all ranks. Each rank's rows are a separate batch,
/// because batch norm depends on it.
pub fn unsharded<T: Task>(
    settings: &Settings,
    data: &T::Data,
    initial: &T,
) -> Result<(Vec<f32>, [T; 2])> {
    let device = Device::flex().autodiff();
    let mut model = initial.clone().fork(&device);
    let mut average = model.clone().freeze();
    let mut optim = T::optimizers().1;
    let mut schedule = schedule(settings)?;
    let mut losses = Vec::with_capacity(settings.steps);
    let (_, ranks) = data_rank::<T>(settings, 0);
    for step in 0..settings.steps {
        let mut sum = GradientsAccumulator::new();
        let mut total = 0.0;
        for batch in 0..settings.accumulate {
            for rank in 0..ranks {
                let number = step * settings.accumulate + batch;
                let rows = rank * settings.batch..(rank + 1) * settings.batch;
                let loss = model.loss(data, (settings.seed, number), rows, &device)
                    / (settings.accumulate * ranks) as f64;
                total += loss.clone().into_scalar::<f32>();
                sum.accumulate(&model, GradientsParams::from_grads(loss.backward(), &model));
            }
        }
        let mut grads = sum.grads();
        clip_grad_norm(&model, &mut grads, MAX_NORM, NormType::L2)?;
        model = optim.step(schedule.step(), model, grads);
        average = ema(average, &model, DECAY)?;
        losses.push(total);
    }
    Ok((losses, [model, average]))
}

/// Returns a schedule in which the learning rate falls to zero along half a cosine wave.
fn schedule(settings: &Settings) -> Result<ModuleLrScheduler> {
    CosineAnnealingLrSchedulerConfig::new(settings.lr, settings.steps + 1)
        .init()
        .map_err(Error::other)
}

/// Returns the data-parallel index of `rank`, and the number of data-parallel ranks. If the last
/// mesh dimension is `tp`, ranks along it have the same rows.
fn data_rank<T: Task>(settings: &Settings, rank: usize) -> (usize, usize) {
    let same = match T::DIMS.last() {
        Some(&"tp") => settings.mesh[settings.mesh.len() - 1],
        _ => 1,
    };
    (rank / same, settings.ranks() / same)
}
