//! Trainings that are saved and continue: by burn's own checkpointers, and on any mesh.

use std::fs;

use burn::data::dataloader::DataLoaderBuilder;
use burn::data::dataset::InMemDataset;
use burn::lr_scheduler::cosine::CosineAnnealingLrSchedulerConfig;
use burn::module::ParamGroup;
use burn::optim::{AdamWConfig, MuonConfig};
use burn::train::Learner;
use burn::train::checkpoint::KeepLastNCheckpoints;
use burn_dtensor::checkpoint::CheckpointManager;
use burn_dtensor::optim::sharded;
use burn_dtensor::prelude::*;
use burn_dtensor::train::{last_checkpoint, resume, supervised, with_checkpoints};

use super::support::{
    BATCH, Folder, Net, Row, Rows, loader, logged, metrics, on_ranks, part, rows, train_on, weights,
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
