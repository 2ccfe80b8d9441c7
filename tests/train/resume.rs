//! Trainings that are saved and continue: by burn's own checkpointers, and on any mesh.

use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use std::{env, fs, thread};

use burn::data::dataloader::DataLoaderBuilder;
use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::InMemDataset;
use burn::lr_scheduler::cosine::CosineAnnealingLrSchedulerConfig;
use burn::module::ParamGroup;
use burn::optim::{AdamWConfig, MuonConfig};
use burn::tensor::Device;
use burn::train::checkpoint::KeepLastNCheckpoints;
use burn::train::metric::store::{Aggregate, Direction, Split};
use burn::train::metric::{LossMetric, TopKAccuracyMetric};
use burn::train::{Learner, MetricEarlyStoppingStrategy, StoppingCondition};
use burn_dtensor::checkpoint::CheckpointManager;
use burn_dtensor::optim::sharded;
use burn_dtensor::prelude::*;
use burn_dtensor::train::{
    EpochCheckpoints, last_checkpoint, resume, supervised, with_checkpoints,
};

use super::support::{
    BATCH, Batch, Folder, LR, Net, Row, Rows, loader, logged, metrics, on_ranks, part, rows,
    train_on, weights,
};

/// Invariant 3: bits of the weights, and every metric of the epochs after the checkpoint. Of four
/// ranks, one has an empty shard of a bias.
#[test]
fn a_training_that_resumes_equals_one_that_was_not_interrupted() {
    for ranks in [2, 4] {
        resumes(ranks);
    }
}

fn resumes(ranks: usize) {
    let (train, valid) = (rows(100, 4 * BATCH, 0.2), rows(900, BATCH + 5, 0.2));
    let run = |folder: &Folder, from: Option<usize>, to: usize| {
        let trained = on_ranks(ranks, |mesh| {
            let shuffled = DataLoaderBuilder::new(Rows)
                .batch_size(BATCH / ranks)
                .shuffle(7);
            let train = shuffled.build(InMemDataset::new(part(&train, mesh.rank(), ranks)));
            let valid = loader(part(&valid, mesh.rank(), ranks), BATCH / ranks);
            let model = fully_shard(
                Net::new(&mesh.device().clone().autodiff()),
                mesh,
                FullyShard::new(),
            )?;
            let optim = sharded(AdamWConfig::new())
                .with_muon(ParamGroup::from_predicate("weight"), MuonConfig::new());
            let optim = optim.into_module_optimizer(&model)?;
            let lr = CosineAnnealingLrSchedulerConfig::new(0.05, 20)
                .init()
                .expect("a schedule");
            let training =
                metrics(supervised(mesh, folder, train, valid)?).with_default_checkpointers();
            let training = match from {
                Some(epoch) => training.checkpoint(epoch),
                None => training,
            };
            let result = training
                .num_epochs(to)
                .launch(Learner::new(model, optim, lr));
            Ok(weights(&full_model(&result.model)?))
        });
        trained.unwrap().remove(0)
    };
    let folder = |name: &str| Folder::new(&format!("resume-{name}-{ranks}"));
    let (uninterrupted, halves) = (folder("uninterrupted"), folder("halves"));
    let expected = run(&uninterrupted, None, 4);
    let half = run(&halves, None, 2);
    assert_ne!(half, expected);
    assert_eq!(run(&halves, Some(2), 4), expected);
    for (rank, epoch) in (0..ranks).flat_map(|rank| [(rank, 3), (rank, 4)]) {
        let [resumed, at_once] = [&halves, &uninterrupted]
            .map(|folder| logged(&folder.rank(rank), "train", epoch, "Loss"));
        assert_eq!(resumed, at_once, "rank {rank}, epoch {epoch}");
    }
}

/// A run that saves at the end of each epoch continues on as many ranks to the bit, and on others
/// as the rounding allows: also its schedule, and the weights that it begins with are those that
/// were saved.
#[test]
fn a_training_resumes_on_another_mesh() {
    let (train, valid) = (rows(100, 4 * BATCH, 0.2), rows(900, BATCH, 0.2));
    // Returns the epoch of the checkpoint, and the weights before the training and after it.
    let run = |folder: &Folder, ranks: usize, dropout: f64, to: usize| {
        let trained = on_ranks(ranks, |mesh| {
            let own = |rows: &[Row]| loader(part(rows, mesh.rank(), ranks), BATCH / ranks);
            let model = fully_shard(
                Net::new(&mesh.device().clone().autodiff()).with_dropout(dropout),
                mesh,
                FullyShard::new(),
            )?;
            let optim = sharded(AdamWConfig::new())
                .with_muon(ParamGroup::from_predicate("weight"), MuonConfig::new());
            let optim = optim.into_module_optimizer(&model)?;
            let lr = CosineAnnealingLrSchedulerConfig::new(0.05, 20)
                .init()
                .expect("a schedule");
            let checkpoints =
                CheckpointManager::new(folder.as_ref().join("run"), mesh).with_keep(2);
            let (learner, epoch) = resume(&checkpoints, model, optim, lr)?;
            let before = weights(&full_model(&learner.model())?);
            let training =
                metrics(supervised(mesh, folder, own(&train), own(&valid))?).num_epochs(to);
            let training = with_checkpoints(training, mesh, checkpoints.clone());
            let training = match epoch {
                Some(epoch) => training.checkpoint(epoch),
                None => training,
            };
            let result = training.launch(learner);
            assert_eq!(checkpoints.steps()?, [to as u64 - 1, to as u64]);
            Ok((epoch, before, weights(&full_model(&result.model)?)))
        });
        trained.unwrap().remove(0)
    };
    let uninterrupted = Folder::new("mesh-uninterrupted");
    let (began, _, expected) = run(&uninterrupted, 2, 0.0, 4);
    assert_eq!(began, None);
    for (ranks, bound) in [(2, 0.0), (4, 1e-5), (1, 1e-5), (3, 1e-5)] {
        let folder = Folder::new(&format!("mesh-{ranks}"));
        let (_, _, half) = run(&folder, 2, 0.0, 2);
        let (epoch, before, after) = run(&folder, ranks, 0.0, 4);
        assert_eq!((epoch, &before), (Some(2), &half), "{ranks} ranks");
        let distance = |a: &[f32], b: &[f32]| {
            a.iter()
                .zip(b)
                .map(|(a, b)| (a - b).abs())
                .fold(0.0, f32::max)
        };
        assert!(distance(&after, &half) > 1e-3, "it trains");
        let found = distance(&after, &expected);
        assert!(found <= bound, "{ranks} ranks: {found}");
    }
    // With random numbers, too.
    let (uninterrupted, halves) = (
        Folder::new("mesh-dropout"),
        Folder::new("mesh-dropout-halves"),
    );
    let (_, _, dropped) = run(&uninterrupted, 2, 0.3, 4);
    assert_ne!(dropped, expected);
    run(&halves, 2, 0.3, 2);
    let (_, _, resumed) = run(&halves, 2, 0.3, 4);
    assert_eq!(resumed, dropped);
}

/// A training with dropout whose process is killed, while it trains or while it saves, continues to
/// the bit on the same mesh, and with what the program has saved.
#[test]
fn a_killed_training_continues_to_the_bit() {
    let folder = |name: &str| Folder::new(&format!("killed-{name}"));
    let uninterrupted = folder("uninterrupted");
    let (expected, _) = killable(uninterrupted.as_ref(), Kill::Never);
    for kill in [Kill::InEpoch, Kill::InSave] {
        let killed = folder(&format!("{kill:?}"));
        kill_program(&killed, kill);
        let (found, began) = killable(killed.as_ref(), Kill::Never);
        assert_eq!(began, Some(2), "{kill:?}");
        assert_eq!(found, expected, "{kill:?}");
    }
}

/// Where a training stops and waits to be killed: in its third epoch.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Kill {
    Never,
    InEpoch,
    InSave,
}

const KILLED: &str = "BURN_DTENSOR_TRAIN_KILLED";

/// Runs the training in a process of its own, which is killed where it waits.
fn kill_program(folder: &Folder, kill: Kill) {
    let mut program = Command::new(env::current_exe().unwrap())
        .args(["resume::the_program_that_is_killed", "--exact"])
        .env(KILLED, format!("{kill:?} {}", folder.as_ref().display()))
        .spawn()
        .unwrap();
    while !folder.as_ref().join("waits").exists() {
        assert_eq!(program.try_wait().unwrap(), None, "it ended by itself");
        thread::sleep(Duration::from_millis(10));
    }
    program.kill().unwrap();
    program.wait().unwrap();
    fs::remove_file(folder.as_ref().join("waits")).unwrap();
}

/// Not a test of its own: the process of [`kill_program`].
#[test]
fn the_program_that_is_killed() {
    let Ok(killed) = env::var(KILLED) else { return };
    let (kill, folder) = killed.split_once(' ').unwrap();
    let kill = [Kill::InEpoch, Kill::InSave]
        .into_iter()
        .find(|other| format!("{other:?}") == kill)
        .unwrap();
    killable(Path::new(folder), kill);
    panic!("it was not killed");
}

/// Trains four epochs on two ranks. Returns the weights, and the epoch that it resumed from.
fn killable(folder: &Path, kill: Kill) -> (Vec<f32>, Option<usize>) {
    let (train, valid) = (rows(100, 4 * BATCH, 0.2), rows(900, BATCH, 0.2));
    let path = folder.to_owned();
    let wait = move || {
        fs::write(path.join("waits"), "").unwrap();
        loop {
            thread::park();
        }
    };
    let trained = on_ranks(2, |mesh| {
        let is_last = mesh.rank() == 1;
        let rows = |rows: &[Row]| part(rows, mesh.rank(), 2);
        let waits = kill == Kill::InEpoch && is_last;
        let batcher = Stopping {
            // Of two epochs, and some of the third.
            batches: waits.then(|| Arc::new((2 * 4 + 3).into())),
            wait: wait.clone(),
        };
        let train = DataLoaderBuilder::new(batcher)
            .batch_size(BATCH / 2)
            .build(InMemDataset::new(rows(&train)));
        let valid = loader(rows(&valid), BATCH / 2);
        let device = mesh.device().clone().autodiff();
        let model = Net::new(&device).with_dropout(0.3);
        let model = fully_shard(model, mesh, FullyShard::new())?;
        let optim = sharded(AdamWConfig::new()).into_module_optimizer(&model)?;
        let run = CheckpointManager::new(folder.join("run"), mesh).with_keep(2);
        let (learner, epoch) = resume(&run, model, optim, LR)?;
        if let Some(latest) = run.latest()? {
            assert_eq!(latest.value::<u64>("saved")?, epoch.unwrap() as u64);
        }
        let wait = wait.clone();
        let checkpoints = EpochCheckpoints::new(run).with_state(move |state| {
            let step = state.step().unwrap();
            if kill == Kill::InSave && step == 3 && is_last {
                wait();
            }
            state.with_value("saved", &step)
        });
        let training = metrics(supervised(mesh, folder, train, valid)?).num_epochs(4);
        let training = with_checkpoints(training, mesh, checkpoints);
        let training = match epoch {
            Some(epoch) => training.checkpoint(epoch),
            None => training,
        };
        let result = training.launch(learner);
        Ok((weights(&full_model(&result.model)?), epoch))
    });
    trained.unwrap().remove(0)
}

/// Batcher that waits to be killed once it has made some batches.
#[derive(Clone)]
struct Stopping<F> {
    /// Number of batches that it makes.
    batches: Option<Arc<AtomicUsize>>,
    wait: F,
}

impl<F: Fn() + Clone + Send + Sync> Batcher<Row, Batch> for Stopping<F> {
    fn batch(&self, rows: Vec<Row>, device: &Device) -> Batch {
        if let Some(batches) = &self.batches
            && batches.fetch_sub(1, Ordering::Relaxed) == 0
        {
            (self.wait)();
        }
        Rows.batch(rows, device)
    }
}

#[test]
fn the_best_checkpoint_is_kept_and_its_model_returned() {
    // Of the rows that are trained, so that the loss falls in every epoch.
    let valid = rows(100, BATCH, 0.2);
    // Returns the steps that are kept, and the weights after the training.
    let run = |name: &str, direction: Direction, epochs: usize| {
        let folder = Folder::new(name);
        let trained = on_ranks(2, |mesh| {
            let own = |rows: &[Row]| loader(part(rows, mesh.rank(), 2), BATCH / 2);
            let train = own(&rows(100, 4 * BATCH, 0.2));
            let model = Net::new(&mesh.device().clone().autodiff());
            let model = fully_shard(model, mesh, FullyShard::new())?;
            let optim = sharded(AdamWConfig::new()).into_module_optimizer(&model)?;
            let run = CheckpointManager::new(folder.as_ref().join("run"), mesh).with_keep(1);
            let loss = LossMetric::new();
            let checkpoints = EpochCheckpoints::new(run.clone())
                .with_best(&loss, Aggregate::Mean, direction, Split::Valid)
                .with_best_model();
            let stop = MetricEarlyStoppingStrategy::new(
                &loss,
                Aggregate::Mean,
                direction,
                Split::Valid,
                StoppingCondition::NoImprovementSince { n_epochs: 2 },
            );
            let training = metrics(supervised(mesh, &folder, train, own(&valid))?)
                .num_epochs(epochs)
                .early_stopping(stop);
            let training = with_checkpoints(training, mesh, checkpoints);
            let result = training.launch(Learner::new(model, optim, LR));
            Ok((run.steps()?, weights(&full_model(&result.model)?)))
        });
        trained.unwrap().remove(0)
    };
    let (steps, lowest) = run("best-lowest", Direction::Lowest, 4);
    assert_eq!(steps, [4]);
    let (steps, highest) = run("best-highest", Direction::Highest, 9);
    let last = *steps.last().unwrap();
    assert_eq!(steps, [1, last]);
    assert!((2..9).contains(&last), "{last} epochs");
    // A training of one epoch has the same weights.
    let (_, first) = run("best-first", Direction::Lowest, 1);
    assert_eq!(highest, first);
    assert_ne!(lowest, first);
}

#[test]
fn a_metric_that_is_not_computed_is_an_error_on_every_rank() {
    let folder = Folder::new("no-metric");
    let rows = rows(100, BATCH, 0.2);
    let error = on_ranks(2, |mesh| {
        let own = || loader(part(&rows, mesh.rank(), 2), BATCH / 2);
        let run = CheckpointManager::new(folder.as_ref().join("run"), mesh);
        let metric = TopKAccuracyMetric::new(2);
        let checkpoints = EpochCheckpoints::new(run).with_best(
            &metric,
            Aggregate::Mean,
            Direction::Highest,
            Split::Valid,
        );
        train_on(mesh, &folder, own(), own(), |training| {
            with_checkpoints(training.num_epochs(1), mesh, checkpoints)
        })
        .map(drop)
    })
    .unwrap_err();
    let text = error.to_string();
    assert!(text.contains("no numeric metric `Top-K Accuracy"), "{text}");
    assert!(
        text.contains("each of ranks [0, 1]") || text.contains("same error"),
        "{text}"
    );
}

#[test]
fn without_a_best_checkpoint_the_best_model_is_an_error() {
    let folder = Folder::new("no-best");
    let rows = rows(100, BATCH, 0.2);
    let error = on_ranks(2, |mesh| {
        let own = || loader(part(&rows, mesh.rank(), 2), BATCH / 2);
        let run = CheckpointManager::new(folder.as_ref().join("run"), mesh);
        let checkpoints = EpochCheckpoints::new(run).with_best_model();
        train_on(mesh, &folder, own(), own(), |training| {
            with_checkpoints(training.num_epochs(1), mesh, checkpoints)
        })
        .map(drop)
    });
    let text = error.unwrap_err().to_string();
    assert!(text.contains("no metric says which it is"), "{text}");
}

#[test]
fn checkpoints_of_other_ranks_are_refused_by_every_rank() {
    let folder = Folder::new("other-ranks");
    on_ranks(2, |mesh| {
        let own = || loader(part(&rows(100, BATCH, 0.2), mesh.rank(), 2), BATCH / 2);
        train_on(mesh, &folder, own(), own(), |training| {
            training.num_epochs(1).with_default_checkpointers()
        })
        .map(drop)
    })
    .unwrap();
    for ranks in [1, 3] {
        let texts = on_ranks(ranks, |mesh| {
            Ok(last_checkpoint(mesh, &folder).unwrap_err().to_string())
        })
        .unwrap();
        let expected = format!("are of 2 ranks, this training has {ranks}: ");
        assert!(
            texts
                .iter()
                .all(|text| text.contains(&expected) && text.contains("Resume on 2,")),
            "{texts:?}"
        );
    }
    // A training that ended before its first checkpoint leaves nothing to resume from.
    for rank in [0, 1] {
        let checkpoints = folder.rank(rank).join("checkpoint");
        fs::remove_dir_all(&checkpoints).unwrap();
        fs::create_dir(&checkpoints).unwrap();
    }
    assert_eq!(
        on_ranks(3, |mesh| last_checkpoint(mesh, &folder)).unwrap(),
        [None; 3]
    );
}

#[test]
fn the_last_checkpoint_is_one_that_every_rank_can_read() {
    let folder = Folder::new("last");
    let rows = rows(100, BATCH, 0.2);
    let last = || on_ranks(2, |mesh| last_checkpoint(mesh, &folder)).unwrap();
    assert_eq!(last(), [None, None]);
    on_ranks(2, |mesh| {
        let own = || loader(part(&rows, mesh.rank(), 2), BATCH / 2);
        let keep = KeepLastNCheckpoints::new(3);
        train_on(mesh, &folder, own(), own(), |training| {
            training
                .num_epochs(3)
                .with_default_checkpointers()
                .with_checkpointing_strategy(keep)
        })
        .map(drop)
    })
    .unwrap();
    assert_eq!(last(), [Some(3), Some(3)]);
    // A rank was killed while it wrote one file, and another before it wrote another.
    let file = |rank, name: &str| folder.rank(rank).join("checkpoint").join(name);
    let bytes = fs::read(file(1, "optim-3.bpk")).unwrap();
    fs::write(file(1, "optim-3.bpk"), &bytes[..bytes.len() - 40]).unwrap();
    assert_eq!(last(), [Some(2), Some(2)]);
    fs::remove_file(file(0, "scheduler-2.bpk")).unwrap();
    assert_eq!(last(), [Some(1), Some(1)]);
    // If one is kept, a rank may have removed it before another has saved the next.
    for epoch in [1, 2] {
        fs::remove_file(file(1, &format!("model-{epoch}.bpk"))).unwrap();
    }
    fs::write(file(1, "optim-3.bpk"), &bytes).unwrap();
    fs::remove_file(file(0, "model-3.bpk")).unwrap();
    let texts = on_ranks(2, |mesh| {
        Ok(last_checkpoint(mesh, &folder).unwrap_err().to_string())
    })
    .unwrap();
    assert!(
        texts
            .iter()
            .all(|text| text.contains("the last that each has are [1, 3]")),
        "{texts:?}"
    );
    // Or each rank some files of the one before, or of the next.
    fs::remove_file(file(1, "optim-3.bpk")).unwrap();
    for name in ["model-1.bpk", "optim-1.bpk", "scheduler-1.bpk"] {
        fs::remove_file(file(0, name)).unwrap();
    }
    let texts = on_ranks(2, |mesh| {
        Ok(last_checkpoint(mesh, &folder).unwrap_err().to_string())
    })
    .unwrap();
    assert!(
        texts
            .iter()
            .all(|text| text.contains("the last that each has are [none, none]")),
        "{texts:?}"
    );
    // A training that was killed in its first save begins anew.
    for rank in [0, 1] {
        let checkpoints = folder.rank(rank).join("checkpoint");
        fs::remove_dir_all(&checkpoints).unwrap();
        fs::create_dir(&checkpoints).unwrap();
        fs::write(file(rank, "model-1.bpk"), [0; 8]).unwrap();
    }
    assert_eq!(last(), [None, None]);
}
