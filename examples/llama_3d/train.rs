//! Training: the program of one rank, and the unsharded run for comparison.

use std::time::Instant;

use burn::optim::{AdamWConfig, GradientsParams};
use burn::prelude::*;
use burn_dtensor::comm::Snapshot;
use burn_dtensor::fsdp::full_model_on;
use burn_dtensor::optim::sharded;
use burn_dtensor::prelude::*;

use crate::cli::Settings;
use crate::generate::{self, Sampled};
use crate::loading::{self, Load};
use crate::model::Llama;
use crate::plan::parallel;
use crate::progress::Progress;

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
    /// The tokens sampled after training.
    pub sampled: Vec<Sampled>,
    /// The trained model in full, on rank 0, if tokens were sampled.
    pub model: Option<Llama>,
    /// The load of each rank, if weights were loaded.
    pub loads: Option<Vec<Load>>,
}

/// Parallelizes and trains `initial`.
///
/// # Collective
/// Every rank calls it.
pub fn train(settings: &Settings, initial: &Llama, world: &World) -> Result<Outcome> {
    let mesh = DeviceMesh::new(world, &settings.mesh, settings.names().to_vec())?;
    let tp = mesh.slice("tp")?;
    let device = world.device().clone().autodiff();
    let (mut model, loads) = match &settings.weights {
        Some(_) => load(settings, &mesh).map(|(model, loads)| (model, Some(loads)))?,
        None => (parallel(initial.clone(), &settings.model, &mesh)?, None),
    };
    let local_params = model.num_params();
    let mut optim = sharded(AdamWConfig::new());
    let mut losses = Vec::with_capacity(settings.steps);
    world.ledger().reset();

    let tokens = settings.groups() * settings.batch * settings.model.seq;
    let mut progress = Progress::new(world.rank() == 0, 0..settings.steps, (tokens, "tokens"));
    // Ranks of one tensor-parallel group train on the same rows.
    let shard = mesh.data_shard(settings.data_names())?;
    let rows = shard.index * settings.batch..(shard.index + 1) * settings.batch;
    for step in 0..settings.steps {
        let (tokens, targets) = settings.text.batch(
            (settings.seed, step),
            rows.clone(),
            settings.model.seq,
            &device,
        );
        let replicated = |x| DTensor::from_local(x, &tp, &[Placement::Replicate]);
        let loss = model
            .loss(replicated(tokens)?, replicated(targets)?)
            .full_tensor()?;
        // Each group holds the mean over its own rows; together they are a Partial(avg).
        let placements = settings.names().iter().map(|name| match *name {
            "tp" => Placement::Replicate,
            _ => Placement::Partial(PartialOp::Avg),
        });
        let mean =
            DTensor::from_local(loss.clone().inner(), &mesh, &placements.collect::<Vec<_>>())?;
        losses.push(mean.full_tensor()?.into_scalar::<f32>());
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        model = optim.step(settings.lr, model, grads)?;
        progress.step(format_args!("loss {:.4}", losses[step]));
    }
    let tokens_per_s = progress.finish();
    let ledger = world.ledger().snapshot();
    let mut sampled = Vec::new();
    let mut full = None;
    if settings.generate > 0 {
        sampled = generate(settings, &model.valid(), &tp)?;
        full = full_model_on(&model, 0)?.map(|model| model.valid());
    }
    Ok(Outcome {
        losses,
        local_params,
        ledger,
        tokens_per_s,
        sampled,
        model: full,
        loads,
    })
}

/// Loads this rank's shards of the weights. Also returns the loads of all ranks.
///
/// # Collective
/// Every rank calls it.
fn load(settings: &Settings, mesh: &DeviceMesh) -> Result<(Llama, Vec<Load>)> {
    let world = mesh.world();
    let weights = settings
        .weights
        .as_ref()
        .expect("there are weights to load");
    let lazy = settings.model.init(&world.device().clone().autodiff());
    let lazy = parallel(lazy, &settings.model, mesh)?;
    world.barrier("distributed")?;
    let before = loading::reset_peak();
    world.barrier("load")?;
    let start = Instant::now();
    let (model, unused, stats) = weights.load(lazy, mesh, settings.read_memory)?;
    world.barrier("loaded")?;
    let seconds = start.elapsed().as_secs_f64();
    let added = loading::peak()
        .zip(before)
        .map(|(peak, before)| peak.saturating_sub(before));
    let shards = (model.num_params() * size_of::<f32>()) as u64;
    let load = Load {
        stats,
        seconds,
        shards,
        added,
        unused,
    };
    Ok((model, world.all().all_gather_object("loads".into(), &load)?))
}

/// Continues the beginning of the text, with a model on `mesh`.
pub fn generate(settings: &Settings, model: &Llama, mesh: &DeviceMesh) -> Result<Vec<Sampled>> {
    let sizes = (settings.model.seq, settings.generate);
    generate::generate(
        model,
        mesh,
        &settings.text.head(PROMPT),
        sizes,
        settings.seed,
    )
}

/// Returns the prompt and what was sampled after it.
pub fn text_of(settings: &Settings, sampled: &[Sampled]) -> Vec<u32> {
    settings
        .text
        .head(PROMPT)
        .into_iter()
        .chain(sampled.iter().map(|sampled| sampled.token))
        .collect()
}

/// Tokens at the beginning of the text that sampling continues.
const PROMPT: usize = 16;

/// Trains `initial`, or the weights to load, on one device, on the rows of all ranks. Returns the
/// loss of each step.
pub fn unsharded(settings: &Settings, initial: &Llama) -> Result<Vec<f32>> {
    let device = Device::flex().autodiff();
    let mut model = match &settings.weights {
        Some(weights) => {
            let mesh = DeviceMesh::single_device(&Device::flex());
            weights
                .load(settings.model.init(&device), &mesh, settings.read_memory)?
                .0
        }
        None => initial.clone(),
    };
    let mut optim = AdamWConfig::new().init();
    let rows = settings.groups() * settings.batch;
    let step = |step| {
        let (tokens, targets) =
            settings
                .text
                .batch((settings.seed, step), 0..rows, settings.model.seq, &device);
        let loss = model.loss(tokens.into(), targets.into());
        let value = loss.local().clone().inner().into_scalar::<f32>();
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        model = optim.step(settings.lr, model.clone(), grads);
        value
    };
    Ok((0..settings.steps).map(step).collect())
}
