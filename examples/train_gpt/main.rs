//! Trains a character-level GPT, an ordinary burn module, fully sharded over ranks that are threads
//! or processes.
//!
//! ```text
//! cargo run --release --example train_gpt -- --mesh 2x2 --check
//! cargo run --release --example train_gpt -- --save runs/gpt --resume    # again and again, on any mesh
//!
//! cargo build --release --features mpi --example train_gpt
//! mpirun -n 4 target/release/examples/train_gpt
//! ```

mod check;
mod checkpoints;
mod cli;
#[path = "../common/cli.rs"]
mod common;
#[path = "../common/data.rs"]
mod data;
mod device;
#[path = "../common/difference.rs"]
mod difference;
#[path = "../common/fingerprint.rs"]
mod fingerprint;
mod model;
#[path = "../common/progress.rs"]
mod progress;
mod report;
mod sample;
mod train;

use std::process::ExitCode;

use burn::prelude::*;
use burn_dtensor::debug::{Overlap, Timeline, chrome_trace, timeline_picture};
use burn_dtensor::prelude::*;

use crate::cli::{Args, Settings};

fn main() -> ExitCode {
    common::main(Args::settings, run)
}

/// Trains, reports and, if requested, checks. Returns false if a check failed.
fn run(settings: &Settings) -> Result<bool> {
    let args = &settings.args;
    // The weights are initialized once, on the CPU, so that they are the same for every device and
    // for `--check`.
    let device = Device::flex();
    device.seed(args.seed);
    let initial = settings
        .model
        .init(&device.clone().autodiff())
        .fork(&device.clone().autodiff());
    let outcomes = launch(
        args.device
            .launch(Launch::from_env(settings.ranks())?, args.nccl)?,
        |world| {
            world.run_on(0, || {
            let params = initial.num_params();
let mesh = report::by(&settings.mesh);
            let text = settings.text.len();
let validation = settings.validation.len();
            println!("{params} parameters, {text} characters of text, {validation} for validation, mesh {mesh}");
        });
            train::train(settings, &initial, world)
        },
    )?;
    // Only the process of rank 0 reports.
    let Some((0, outcome)) = outcomes.first() else {
        return Ok(true);
    };
    let [first, last, validation] = [
        outcome.losses.first(),
        outcome.losses.last(),
        outcome.validations.last(),
    ]
    .map(|loss| loss.expect("there is at least one step"));
    println!(
        "loss {first:.4} -> {last:.4}, validation loss {validation:.4}, in {} steps, {:.0} tokens/s",
        args.steps, outcome.tokens_per_s
    );
    println!("exposed per step: {}", report::Waiting(&outcome.waiting));
    if let (Some(file), Some(timelines)) = (&args.trace, &outcome.timelines) {
        let is_picture = file.extension().is_some_and(|extension| extension == "svg");
        let text = if is_picture {
            timeline_picture(timelines)
        } else {
            chrome_trace(timelines)
        };
        std::fs::write(file, text)
            .map_err(|error| Error::other(format!("{}: {error}", file.display())))?;
        let overlap: Overlap = timelines.iter().map(Timeline::overlap).sum();
        println!(
            "trace of the last step on all ranks: {}; {overlap}",
            file.display()
        );
    }
    println!(
        "fingerprint of all losses: {:016x}\n",
        fingerprint::of(&outcome.losses)
    );

    let collectives = report::Collectives::new(settings, outcome, &device);
    println!(
        "{collectives}\n\n{}\n",
        report::Memory::new(settings, outcome, &device)
    );
    if args.sample > 0
        && let Some(model) = &outcome.model
    {
        let sample = sample::sample(model, settings);
        let (words, known) = sample::known_words(&sample, &settings.text);
        let percent = 100 * known / words.max(1);
        println!(
            "Sample\n{sample}\n\n{percent} % of the sample's {words} words occur in the text\n"
        );
    }
    if !args.check {
        return Ok(true);
    }
    let difference = check::difference(outcome, &check::reference(settings, initial)?);
    println!("{difference}");
    Ok(difference.passes() && collectives.agree())
}
