//! Trains models of several kinds, each an ordinary burn module with its own plan of distribution.
//! They combine the features of `fully_shard` for large models: activation checkpointing, shards in
//! host memory, gradient accumulation and a moving average of the weights. Further features are
//! adapters, a tied head and replicas (`bert`), shards of equal bytes (`resnet`), experts and Muon
//! (`moe`). `plans.rs` contains all the parallelism.
//!
//! ```text
//! cargo run --release --example zoo -- moe --check
//! cargo run --release --example zoo -- bert --size base --steps 3
//! ```

mod bert;
mod cli;
#[path = "../common/cli.rs"]
mod common;
#[path = "../common/data.rs"]
#[allow(dead_code, reason = "nothing is sampled here")]
mod data;
#[path = "../common/difference.rs"]
mod difference;
mod images;
mod moe;
mod plans;
#[path = "../common/progress.rs"]
#[allow(dead_code, reason = "nothing is saved here")]
mod progress;
mod resnet;
mod task;
mod train;

use std::process::ExitCode;

use burn::prelude::*;
use burn_dtensor::prelude::*;

use crate::bert::BertConfig;
use crate::cli::{Cli, Kind, Settings, Size};
use crate::difference::{Difference, weights};
use crate::images::Images;
use crate::moe::MoeConfig;
use crate::resnet::ResNetConfig;
use crate::task::Task;

fn main() -> ExitCode {
    common::main(Cli::settings, start)
}

/// Creates and runs the model that the command line names.
fn start(settings: &Settings) -> Result<bool> {
    let device = Device::flex();
    let characters = settings.text.vocab();
    device.seed(settings.seed);
    match (settings.model, settings.size) {
        (Kind::Bert, size) => {
            let config = if size == Size::Base {
                BertConfig::base()
            } else {
                BertConfig::tiny(characters)
            };
            run(settings, &settings.text, &config.init(&device).adapted())
        }
        (Kind::Resnet, size) => {
            let config = if size == Size::Base {
                ResNetConfig::base()
            } else {
                ResNetConfig::tiny()
            };
            let images = Images {
                classes: config.classes,
                side: config.side,
            };
            run(settings, &images, &config.init(&device))
        }
        (Kind::Moe, size) => {
            let config = if size == Size::Base {
                MoeConfig::base(characters)
            } else {
                MoeConfig::tiny(characters)
            };
            run(settings, &settings.text, &config.init(&device))
        }
    }
}

/// Trains, reports and, if requested, checks. Returns false if a check failed.
fn run<T: Task>(settings: &Settings, data: &T::Data, initial: &T) -> Result<bool> {
    // Initialized once, because ranks share one random state. `train` initializes parameters that
    // are still lazy.
    let initial = initial.clone().train();
    let params = initial.num_params();
    let outcomes = launch(Launch::from_env(settings.ranks())?, |world| {
        world.run_on(0, || {
            println!("{params} parameters, {} ranks", world.size())
        });
        train::train(settings, data, &initial, world)
    })?;
    // Only the process of rank 0 reports.
    let Some((0, outcome)) = outcomes.first() else {
        return Ok(true);
    };
    let first = outcome.losses[0];
    let last = outcome.losses[settings.steps - 1];
    println!(
        "loss {first:.4} -> {last:.4} in {} steps; rank 0 steps {} parameters",
        settings.steps, outcome.held
    );
    println!("{}", outcome.sent);
    if !settings.check {
        return Ok(true);
    }
    let (losses, models) = train::unsharded(settings, data, &initial)?;
    let names = ["model", "average"];
    let sharded = weights(names.into_iter().zip(outcome.models.iter().flatten()));
    let difference = Difference::new(
        (&outcome.losses, sharded),
        (&losses, weights(names.into_iter().zip(&models))),
        &Device::flex(),
    );
    println!("{difference}");
    Ok(difference.passes())
}
