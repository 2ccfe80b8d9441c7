//! Training: the program of one rank, and the unsharded run for comparison.

use burn::optim::{AdamWConfig, GradientsParams};
use burn::prelude::*;
use burn_dtensor::comm::Snapshot;
use burn_dtensor::prelude::*;

use crate::cli::Settings;
use crate::model::Llama;
use crate::plan::parallel;
use crate::progress::Progress;
use crate::reference;

/// Result of a rank.
pub struct Outcome {
    /// Loss of each step, over the rows of all ranks.
    pub losses: Vec<f32>,
    /// Elements of this rank's parameter shards.
    pub local_params: usize,
    /// The collectives of the training steps.
    pub ledger: Snapshot,
    /// Tokens of all ranks per second.
    pub tokens_per_s: f64,
}

/// Parallelizes and trains `initial`.
///
/// # Collective
/// Every rank calls it.
pub fn train(settings: &Settings, initial: &Llama, world: &World) -> Result<Outcome> {
    let mesh = DeviceMesh::new(world, &settings.mesh, settings.names().to_vec())?;
    let (tp, device) = (mesh.slice("tp")?, world.device().clone().autodiff());
    let mut model = parallel(initial.clone(), &settings.model, &mesh)?;
    let local_params = model.num_params();
    let mut optim = AdamWConfig::new().init();
    let mut losses = Vec::with_capacity(settings.steps);
    world.ledger().reset();

    let tokens = settings.groups() * settings.batch * settings.model.seq;
    let mut progress = Progress::new(world.rank() == 0, settings.steps, (tokens, "tokens"));
    // Ranks of one tensor-parallel group train on the same rows.
    let shard = mesh.data_shard(settings.data_names())?;
    let rows = shard.index * settings.batch..(shard.index + 1) * settings.batch;
    for step in 0..settings.steps {
        let (tokens, targets) = settings.text.batch((settings.seed, step), rows.clone(), settings.model.seq, &device);
        let replicated = |x| DTensor::from_local(x, &tp, &[Placement::Replicate]);
        let loss = model.loss(replicated(tokens)?, replicated(targets)?).full_tensor()?;
        // Each group holds the mean over its own rows; together they are a Partial(avg).
        let placements = settings.names().iter().map(|name| match *name {
            "tp" => Placement::Replicate,
            _ => Placement::Partial(PartialOp::Avg),
        });
        let mean = DTensor::from_local(loss.clone().inner(), &mesh, &placements.collect::<Vec<_>>())?;
        losses.push(mean.full_tensor()?.into_scalar::<f32>());
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        model = optim.step(settings.lr, model, grads);
        progress.step(losses[step]);
    }
    let tokens_per_s = progress.finish();
    Ok(Outcome { losses, local_params, ledger: world.ledger().snapshot(), tokens_per_s })
}

/// Trains `initial` on one device, on the rows of all ranks. Returns the loss of each step.
pub fn unsharded(settings: &Settings, initial: &Llama) -> Vec<f32> {
    let device = Device::flex().autodiff();
    let mut model = initial.clone();
    let mut optim = AdamWConfig::new().init();
    let rows = settings.groups() * settings.batch;
    let step = |step| {
        let (tokens, targets) = settings.text.batch((settings.seed, step), 0..rows, settings.model.seq, &device);
        let loss = reference::loss(&model, tokens, targets);
        let value = loss.clone().inner().into_scalar::<f32>();
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        model = optim.step(settings.lr, model.clone(), grads);
        value
    };
    (0..settings.steps).map(step).collect()
}
