//! `--check`: the same training without sharding, and the difference between the two.

use burn::optim::AdamWConfig;
use burn::prelude::*;
use burn_dtensor::prelude::*;

use crate::cli::Settings;
use crate::difference::{Difference, weights};
use crate::model::Gpt;
use crate::train::{Outcome, batches, train_step};

/// Trains the model unsharded, starting from `initial`, on the combined batches of all ranks. Returns the losses
/// and the model. It runs on the device of the ranks, because other devices round differently.
///
/// # Errors
/// None without a mesh. The result is a `Result` because the sharded run uses the same step.
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

/// Compares the outcome of rank 0 with the reference.
pub fn difference(outcome: &Outcome, (losses, model): &(Vec<f32>, Gpt)) -> Difference {
    let sharded = weights(outcome.model.iter().map(|model| ("model", model)));
    Difference::new((&outcome.losses, sharded), (losses, weights([("model", model)])))
}
