//! Shows, verifies and converts checkpoints.
//!
//! ```text
//! cargo run --release --example checkpoint -- inspect runs/step-500
//! cargo run --release --example checkpoint -- consolidate runs exported --transpose '*.query.weight'
//! cargo run --release --example checkpoint -- set-back runs 500
//! ```

mod cli;
#[path = "../common/cli.rs"]
#[allow(dead_code, reason = "there is no mesh here")]
mod common;
mod inspect;
mod picture;

use std::path::Path;
use std::process::ExitCode;

use burn_dtensor::checkpoint::{self, Checkpoint, ConsolidateOptions, ReadOptions, ReshardOptions};
use burn_dtensor::prelude::*;
use indicatif::{ProgressBar, ProgressStyle};

use crate::cli::{Command, Consolidate, Reshard, Settings};

fn main() -> ExitCode {
    common::main(cli::Args::settings, |settings: &Settings| {
        run(&settings.command)
    })
}

/// Runs a command. Returns false if a checkpoint is damaged.
fn run(command: &Command) -> Result<bool> {
    match command {
        Command::Inspect(inspect) => inspect::inspect(inspect),
        Command::CheckBlocks { checkpoint } => verify(checkpoint),
        Command::Consolidate(command) => consolidate(command),
        Command::Reshard(command) => reshard(command),
        Command::SetBack { run, step } => set_back(run, *step),
    }
}

fn set_back(run: &Path, step: u64) -> Result<bool> {
    for folder in checkpoint::set_back(run, step)? {
        println!("set aside: {}", folder.display());
    }
    println!("{}: the latest checkpoint is step-{step}", run.display());
    Ok(true)
}

fn verify(checkpoint: &Path) -> Result<bool> {
    let bar = bar();
    let found = checkpoint::verify(checkpoint, &ReadOptions::new(), progress(&bar))?;
    bar.finish_and_clear();
    found.damage.iter().for_each(|damage| println!("{damage}"));
    println!(
        "{}: {} verified, {} damaged",
        checkpoint.display(),
        size(found.bytes),
        found.damage.len()
    );
    Ok(found.is_intact())
}

fn consolidate(command: &Consolidate) -> Result<bool> {
    let Consolidate {
        checkpoint,
        out,
        key,
        max_file_mb,
        transpose,
        rename,
    } = command.clone();
    let options = ConsolidateOptions::new()
        .with_max_file_bytes(max_file_mb.saturating_mul(1_000_000))
        .with_transposed(move |name| transpose.iter().any(|pattern| pattern.matches(name)))
        .with_renamed(move |name| {
            Some(
                rename
                    .iter()
                    .fold(name.to_owned(), |name, (from, to)| name.replace(from, to)),
            )
        });
    let options = if key.is_empty() {
        options
    } else {
        options.with_key(&key)
    };
    let bar = bar();
    let report = checkpoint::consolidate(&checkpoint, &out, &options, progress(&bar))?;
    bar.finish_and_clear();
    for (file, bytes) in &report.files {
        println!("{}: {}", out.join(file).display(), size(*bytes));
    }
    println!("{} tensors, {}", report.tensors, size(report.bytes));
    Ok(true)
}

fn reshard(command: &Reshard) -> Result<bool> {
    let Reshard {
        checkpoint,
        out,
        ranks,
        shard,
        without,
    } = command.clone();
    let is_left_out = move |key: &str| {
        without.iter().any(|left| {
            key.strip_prefix(left.as_str())
                .is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
        })
    };
    let options = ReshardOptions::new()
        .with_keep(move |key| !is_left_out(key))
        .with_shard_dim(move |key, _| {
            shard
                .iter()
                .find(|(pattern, _)| pattern.matches(key))
                .map_or(0, |(_, dim)| *dim)
        });
    let reports = launch(Launch::threads(ranks), |world| {
        let mesh = DeviceMesh::new(world, [ranks], ["shard"])?;
        Checkpoint::open(&checkpoint, &mesh)?.reshard(&out, &options)
    })?;
    println!("{}", reports[0].1);
    Ok(true)
}

fn bar() -> ProgressBar {
    let style = ProgressStyle::with_template(
        "{bar:40} {bytes} of {total_bytes}, {bytes_per_sec}, {eta} left",
    );
    ProgressBar::no_length().with_style(style.expect("the template is well formed"))
}

/// Returns the callback that moves the bar.
fn progress(bar: &ProgressBar) -> impl FnMut(u64, u64) {
    let bar = bar.clone();
    move |done, total| {
        bar.set_length(total);
        bar.set_position(done);
    }
}

/// Formats a number of bytes as `12.3 MB`.
pub fn size(bytes: u64) -> String {
    match bytes {
        0..10_000 => format!("{bytes} bytes"),
        10_000..10_000_000 => format!("{:.1} kB", bytes as f64 / 1e3),
        10_000_000..10_000_000_000 => format!("{:.1} MB", bytes as f64 / 1e6),
        _ => format!("{:.1} GB", bytes as f64 / 1e9),
    }
}
