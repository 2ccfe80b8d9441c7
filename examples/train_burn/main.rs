//! burn's training guide on several ranks: an image classifier, trained by burn's own `Learner`.
//!
//! ```text
//! cargo run --features train --example train_burn -- --ranks 3
//! cargo run --features train --example train_burn -- --ranks 3 --replicate    # data parallel
//! ```
//!
//! `model.rs` is the model of the guide, and [`train`] its training; `docs/guides/burn-train.md`
//! lists the lines that differ.

#[path = "../common/cli.rs"]
mod common;
mod model;
mod shapes;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use burn::module::Module;
use burn::optim::AdamConfig;
use burn::train::metric::store::{Aggregate, Direction, Split};
use burn::train::metric::{AccuracyMetric, LossMetric};
use burn::train::{Learner, LearnerSummary, MetricEarlyStoppingStrategy, StoppingCondition};
use burn_dtensor::fsdp::full_model_on;
use burn_dtensor::optim::sharded;
use burn_dtensor::prelude::*;
use burn_dtensor::replicate::{DataParallel, replicate};
use burn_dtensor::train::{EpochRenderer, last_checkpoint, loaders, rank_directory, supervised};
use clap::Parser;

use common::{MeshShape, positive, positive_float};
use model::ModelConfig;
use shapes::{ShapeBatcher, ShapeDataset};

/// Train an image classifier with burn's own Learner, data loader, metrics, checkpointers and early
/// stopping, on several ranks that share its parameters. The metrics are those of all rows, so that
/// any number of ranks prints the same table at the end. The images are small shapes that the
/// program draws. Ranks are threads of this process; with `mpirun -n P` (feature `mpi`), each of P
/// processes has an equal number of them.
#[derive(Debug, Parser)]
#[command(name = "train_burn", disable_version_flag = true)]
struct Cli {
    /// Number of ranks [default: the size of --mesh, or 2]
    #[arg(long, value_parser = positive)]
    ranks: Option<usize>,
    /// Mesh of ranks: N shards over N ranks, RxS keeps R replicas of S shards [default: all ranks]
    #[arg(long)]
    mesh: Option<MeshShape<2>>,
    /// Keep the full model on each rank (data parallel) in place of sharding it
    #[arg(long)]
    replicate: bool,
    /// Epochs, if early stopping does not end the training first
    #[arg(long, default_value_t = 20, value_parser = positive)]
    epochs: usize,
    /// Images per step, over all ranks
    #[arg(long, default_value_t = 48, value_parser = positive)]
    batch: usize,
    /// Epochs without a lower validation loss after which all ranks stop
    #[arg(long, default_value_t = 2, value_parser = positive)]
    patience: usize,
    /// Learning rate of Adam
    #[arg(long, default_value_t = 5e-3, value_parser = positive_float)]
    lr: f64,
    /// Seed of the weights and of the order of the images
    #[arg(long, default_value_t = 42)]
    seed: u64,
    /// Folder for logs and checkpoints
    #[arg(long, default_value = "target/train_burn")]
    dir: PathBuf,
    /// Continue from the last checkpoint in the folder, after a run that was killed
    #[arg(long)]
    resume: bool,
}

fn main() -> ExitCode {
    common::main(settings, |settings: &Settings| {
        let ranks = settings.mesh.iter().product();
        launch(Launch::from_env(ranks)?, |world| train(world, settings))?;
        Ok(true)
    })
}

/// The command line, and the sizes of the mesh's dimensions.
struct Settings {
    cli: Cli,
    mesh: Vec<usize>,
}

fn settings(cli: Cli) -> Result<Settings, String> {
    let mesh = cli
        .mesh
        .clone()
        .map_or_else(|| vec![cli.ranks.unwrap_or(2)], |MeshShape(sizes)| sizes);
    let size = mesh.iter().product();
    if cli.ranks.is_some_and(|ranks| ranks != size) {
        return Err(format!(
            "--mesh has {size} ranks, --ranks is another number"
        ));
    }
    if !cli.batch.is_multiple_of(size) {
        return Err(format!(
            "{size} ranks cannot share --batch {} evenly",
            cli.batch
        ));
    }
    Ok(Settings { cli, mesh })
}

/// Trains on one rank.
fn train(world: &World, Settings { cli, mesh }: &Settings) -> Result<()> {
    let mesh = DeviceMesh::new(world, mesh, &["replicate", "shard"][2 - mesh.len()..])?;
    let device = world.device().clone().autodiff();
    let resumed = if cli.resume {
        last_checkpoint(&mesh, &cli.dir)?
    } else {
        None
    };
    if resumed.is_none() {
        std::fs::remove_dir_all(rank_directory(&mesh, &cli.dir)).ok();
        // A run on more ranks has left theirs, from which this one could not resume.
        let remove = || {
            (world.size()..)
                .map(|rank| cli.dir.join(format!("rank-{rank}")))
                .take_while(|folder| std::fs::remove_dir_all(folder).is_ok())
                .count()
        };
        world.run_on(0, remove);
    }
    let train = ShapeDataset::train();
    let valid = ShapeDataset::test();
    let (train, valid) = loaders(&mesh, ShapeBatcher, cli.batch, cli.seed, train, valid)?;
    let config = ModelConfig::new(shapes::CLASSES.len(), 32);
    let model = world.run_seeded(cli.seed, || config.init(&device))?;
    let model = match cli.replicate {
        true => replicate(model, &mesh, DataParallel::new())?,
        false => fully_shard(model, &mesh, FullyShard::new())?,
    };
    let optim = sharded(AdamConfig::new()).into_module_optimizer(&model)?;
    let early_stopping = MetricEarlyStoppingStrategy::new(
        &LossMetric::new(),
        Aggregate::Mean,
        Direction::Lowest,
        Split::Valid,
        StoppingCondition::NoImprovementSince {
            n_epochs: cli.patience,
        },
    );
    let mut training = supervised(&mesh, &cli.dir, train, valid)?
        .metrics((AccuracyMetric::new(), LossMetric::new()))
        .renderer(Box::new(EpochRenderer::new(&mesh)))
        .with_default_checkpointers()
        .early_stopping(early_stopping)
        .num_epochs(cli.epochs)
        .summary();
    if let Some(epoch) = resumed {
        world.run_on(0, || println!("resuming after epoch {epoch}"));
        training = training.checkpoint(epoch);
    }
    let result = training.launch(Learner::new(model, optim, cli.lr));
    if let Some(model) = full_model_on(&result.model, 0)? {
        model.save_file(cli.dir.join("model"))?;
        print_epochs(&rank_directory(&mesh, &cli.dir))?;
    }
    Ok(())
}

/// Prints what burn logged of each epoch.
fn print_epochs(folder: &Path) -> Result<()> {
    let summary = LearnerSummary::new(folder, &["Loss", "Accuracy"]).map_err(Error::other)?;
    println!("epoch  train loss  valid loss  valid accuracy");
    let [train, valid] = [&summary.metrics.train, &summary.metrics.valid];
    for (loss, (valid_loss, accuracy)) in train[0]
        .entries
        .iter()
        .zip(valid[0].entries.iter().zip(&valid[1].entries))
    {
        println!(
            "{:5}  {:10.6}  {:10.6}  {:12.2} %",
            loss.step, loss.value, valid_loss.value, accuracy.value
        );
    }
    Ok(())
}
