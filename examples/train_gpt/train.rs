//! Training: what one rank does, and the step it shares with the unsharded reference.

use burn::optim::{AdamWConfig, GradientsParams, ModuleOptimizer};
use burn::prelude::*;
use burn_dtensor::comm::Snapshot;
use burn_dtensor::prelude::*;

use crate::cli::Settings;
use crate::data::Batch;
use crate::model::Gpt;
use crate::progress::Progress;

/// What a rank brings home.
pub struct Outcome {
    /// Loss of each step, averaged over all ranks.
    pub losses: Vec<f32>,
    /// Elements of this rank's parameter shards.
    pub local_params: usize,
    /// The collectives of the training steps.
    pub ledger: Snapshot,
    /// The gathered model, on rank 0.
    pub model: Option<Gpt>,
    /// Tokens of all ranks per second.
    pub tokens_per_s: f64,
}

/// Trains the model from `initial` on, sharded.
///
/// # Collective
/// Every rank calls it.
pub fn train(settings: &Settings, initial: &Gpt, world: &World) -> Result<Outcome> {
    let names = ["replicate", "shard"];
    let names = &names[names.len() - settings.mesh.len()..];
    let mesh = DeviceMesh::new(world, &settings.mesh, names)?;
    let device = world.device().clone().autodiff();
    let config = FullyShard::new().units(["blocks.*"]).reshard_after_forward(settings.reshard);
    let mut model = fully_shard(initial.clone().fork(&device), &mesh, config)?;
    let local_params = model.num_params();
    let mut optim = AdamWConfig::new().init();
    let mut losses = Vec::with_capacity(settings.steps);
    world.ledger().reset();

    let mut progress =
        Progress::new(world.rank() == 0, settings.steps, settings.ranks() * settings.batch * settings.model.seq);
    let rows = world.rank() * settings.batch..(world.rank() + 1) * settings.batch;
    for step in 0..settings.steps {
        let batch = settings.text.batch((settings.seed, step), rows.clone(), settings.model.seq, &device);
        let loss;
        (model, loss) = train_step(model, &mut optim, batch, settings)?;
        // Each rank holds the mean over its own rows; together they are a Partial(avg).
        let placements = vec![Placement::Partial(PartialOp::Avg); mesh.ndim()];
        let loss = DTensor::from_local(loss, &mesh, &placements)?.full_tensor()?.into_scalar::<f32>();
        losses.push(loss);
        progress.step(loss);
    }
    let tokens_per_s = progress.finish();
    let ledger = world.ledger().snapshot();
    let full = full_model(&model)?;
    let model = (world.rank() == 0).then_some(full);
    Ok(Outcome { losses, local_params, ledger, model, tokens_per_s })
}

/// One step of AdamW; returns the loss `[1]` of `batch` before it, without autodiff.
///
/// # Collective
/// On a sharded model every rank calls it.
pub fn train_step(
    model: Gpt,
    optim: &mut ModuleOptimizer,
    (tokens, targets): Batch,
    settings: &Settings,
) -> Result<(Gpt, Tensor<1>)> {
    let loss = model.loss(tokens, targets);
    let value = loss.clone().inner();
    let mut grads = GradientsParams::from_grads(loss.backward(), &model);
    if let Some(max_norm) = settings.clip {
        clip_grad_norm(&model, &mut grads, max_norm, NormType::L2)?;
    }
    Ok((optim.step(settings.lr, model, grads), value))
}
