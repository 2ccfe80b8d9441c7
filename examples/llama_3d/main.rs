//! Trains a Llama-style decoder in 3-D parallel: replicas, fully sharded parameters, and tensor
//! with sequence parallelism. The model contains no communication and also runs on one device;
//! `plan.rs` contains all the parallelism.
//!
//! ```text
//! cargo run --release --example llama_3d -- --mesh 2x2x2 --check
//! cargo run --release --example llama_3d -- --steps 300 --generate 200
//!
//! python examples/llama_3d/make_weights.py llama --dim 1024    # or a Llama of Hugging Face
//! cargo run --release --example llama_3d -- --weights llama --steps 0 --generate 40
//!
//! cargo build --release --features mpi --example llama_3d
//! mpirun -n 2 target/release/examples/llama_3d
//! ```

mod cli;
#[path = "../common/cli.rs"]
mod common;
#[path = "../common/data.rs"]
#[allow(dead_code, reason = "nothing is validated here")]
mod data;
#[path = "../common/fingerprint.rs"]
mod fingerprint;
mod generate;
mod loading;
mod model;
mod plan;
#[path = "../common/progress.rs"]
#[allow(dead_code, reason = "nothing is saved here")]
mod progress;
mod report;
mod train;
mod weights;

use std::process::ExitCode;

use burn::prelude::*;
use burn_dtensor::prelude::*;

use crate::cli::{Cli, Settings};

fn main() -> ExitCode {
    common::main(Cli::settings, run)
}

/// Trains, reports and, if requested, checks. Returns false if a check failed.
fn run(settings: &Settings) -> Result<bool> {
    let device = Device::flex();
    device.seed(settings.seed);
    let initial = settings.model.init(&device);
    // Initialized once, because ranks share one random state. `train` initializes parameters that
    // are still lazy, which those that are loaded stay until then.
    let initial = if settings.weights.is_some() {
        initial
    } else {
        initial.train()
    };
    let params = initial.num_params();
    let dims = settings
        .names()
        .iter()
        .zip(&settings.mesh)
        .map(|(name, size)| format!("{name}={size}"));
    let mesh = dims.collect::<Vec<_>>().join(" ");
    let outcomes = launch(Launch::from_env(settings.ranks())?, |world| {
        world.run_on(0, || {
            println!(
                "{params} parameters, {} characters of text, mesh {mesh}",
                settings.text.len()
            )
        });
        train::train(settings, &initial, world)
    })?;
    // Only the process of rank 0 reports.
    let Some((0, outcome)) = outcomes.first() else {
        return Ok(true);
    };
    if let Some(ranks) = &outcome.loads {
        let memory = settings.read_memory as u64;
        println!(
            "{}\n",
            loading::Report {
                ranks,
                ranks_of_process: outcomes.len(),
                memory
            }
        );
    }
    if let (Some(first), Some(last)) = (outcome.losses.first(), outcome.losses.last()) {
        println!(
            "loss {first:.4} -> {last:.4} in {} steps, {:.0} tokens/s",
            settings.steps, outcome.tokens_per_s
        );
        println!(
            "fingerprint of all losses: {:016x}",
            fingerprint::of(&outcome.losses)
        );
    }
    println!(
        "rank 0 steps {} of the {params} parameters\n",
        outcome.local_params
    );
    let collectives = report::Collectives::new(settings, outcome);
    println!("{collectives}\n");
    let mut passes = true;
    if let Some(model) = &outcome.model {
        let seeded = train::generate(settings, model, &DeviceMesh::single_device(&device))?;
        let agreement = generate::Agreement::new(&outcome.sampled, &seeded);
        println!(
            "{}\n\n{agreement}\n",
            settings
                .text
                .decode(&train::text_of(settings, &outcome.sampled))
        );
        passes = agreement.passes();
    }
    if !settings.check {
        return Ok(passes);
    }
    let difference =
        report::Difference::new(&outcome.losses, &train::unsharded(settings, &initial)?);
    println!("{difference}");
    Ok(passes && difference.passes() && collectives.agree())
}
