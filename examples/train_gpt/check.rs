//! `--check`: the same training without sharding, and the difference between the two.

use burn::optim::AdamWConfig;
use burn::prelude::*;
use burn_dtensor::prelude::*;

use crate::cli::Settings;
use crate::difference::{Difference, weights};
use crate::model::Gpt;
use crate::train::{Outcome, batches, schedule, train_step};

/// Trains the model unsharded, starting from `initial`, on the combined batches of all ranks.
/// Returns the losses, first those of training and then those of validation, and the model. It runs
/// on the device of the ranks, because other devices round differently.
///
/// # Errors
/// None without a mesh. The result is a `Result` because the sharded run uses the same step.
pub fn reference(settings: &Settings, initial: Gpt) -> Result<(Vec<f32>, Gpt)> {
    let device = settings.args.device.devices()?.swap_remove(0);
    let validation =
        settings
            .validation
            .rows(0..settings.validation_rows(), settings.model.seq, &device);
    let device = device.autodiff();
    let mut model = initial.fork(&device);
    let mut optim = AdamWConfig::new().init();
    let mut schedule = schedule(settings)?;
    let mut losses = Vec::new();
    let mut validations = Vec::new();
    let rows = 0..settings.ranks() * settings.args.batch;
    for step in 0..settings.args.steps {
        let batches = batches(settings, step, rows.clone(), &device);
        let rate = schedule.step();
        let optim_step = |model, grads| Ok(optim.step(rate, model, grads));
        let loss;
        (model, loss, _) = train_step(model, optim_step, None, batches, settings)?;
        losses.push(loss.into_scalar::<f32>());
        if settings.is_validated_after(step) {
            let (tokens, targets) = validation.clone();
            validations.push(model.valid().loss(tokens, targets).into_scalar::<f32>());
        }
    }
    losses.extend(validations);
    Ok((losses, model))
}

/// Compares the outcome of rank 0 with the reference.
pub fn difference(outcome: &Outcome, (losses, model): &(Vec<f32>, Gpt)) -> Difference {
    let sharded = weights(outcome.model.iter().map(|model| ("model", model)));
    let found = [&outcome.losses[..], &outcome.validations].concat();
    Difference::new(
        (&found, sharded),
        (losses, weights([("model", model)])),
        &model.devices()[0],
    )
}
