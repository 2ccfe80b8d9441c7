//! `--check`: the same training without sharding, and how far the two part.

use burn::optim::AdamWConfig;
use burn::prelude::*;
use burn_dtensor::prelude::*;

use crate::cli::Settings;
use crate::difference::{Difference, weights};
use crate::model::Gpt;
use crate::train::{Outcome, batches, train_step};

/// Trains the model from `initial` on, unsharded, on the batches of all ranks joined; returns its losses and itself.
/// On the ranks' device: others round otherwise.
///
/// # Errors
/// None without a mesh; the step's signature is that of the sharded run.
pub fn reference(settings: &Settings, initial: Gpt) -> Result<(Vec<f32>, Gpt)> {
    let device = &settings.device.device().autodiff();
    let mut model = initial.fork(device);
    let mut optim = AdamWConfig::new().init();
    let mut losses = Vec::with_capacity(settings.steps);
    let rows = 0..settings.ranks() * settings.batch;
    for step in 0..settings.steps {
        let batches = batches(settings, step, rows.clone(), device);
        let loss;
        (model, loss, _) = train_step(model, &mut optim, None, batches, settings)?;
        losses.push(loss.into_scalar::<f32>());
    }
    Ok((losses, model))
}

/// How far the outcome of rank 0 parts from the reference.
pub fn difference(outcome: &Outcome, (losses, model): &(Vec<f32>, Gpt)) -> Difference {
    let sharded = weights(outcome.model.iter().map(|model| ("model", model)));
    Difference::new((&outcome.losses, sharded), (losses, weights([("model", model)])))
}
