//! Metrics and decisions from all rows, on every rank.

use std::path::Path;
use std::sync::Arc;

use burn::data::dataloader::{DataLoader, DataLoaderIterator, Progress};
use burn::data::dataset::{DatasetError, InMemDataset};
use burn::module::Module;
use burn::optim::{AdamWConfig, SgdConfig};
use burn::tensor::Device;
use burn::train::metric::CharErrorRate;
use burn::train::metric::store::EventStoreClient;
use burn::train::{
    EarlyStoppingStrategy, InferenceStep, Learner, SequenceOutput, SupervisedTraining, TrainOutput,
    TrainStep,
};
use burn_dtensor::data::DistributedLoader;
use burn_dtensor::optim::sharded;
use burn_dtensor::prelude::*;
use burn_dtensor::train::{loaders, supervised};
use itertools::Itertools;

use super::support::{
    BATCH, Batch, Folder, LR, Net, Row, Rows, early_stopping, epochs, loader, logged, metrics,
    on_ranks, part, rows, train_alone, train_on, weights,
};

const METRICS: [&str; 3] = ["Loss", "Accuracy", "Precision_@_TopK(1)_[Macro]"];

/// Three epochs on a mesh, and by burn alone on all rows: the trained weights, and each line of
/// this rank's logs.
fn trains_as_one_device(mesh: &DeviceMesh, folder: &Folder) -> Result<()> {
    // The last batch has 7 rows. Of two ranks each has some; of three, one has none.
    let train = rows(100, 3 * BATCH + 7, 0.2);
    let valid = rows(900, 2 * BATCH + 7, 0.2);
    let set = |training: SupervisedTraining<Net>| training.num_epochs(3);
    let alone = Folder::new(&format!("metrics-alone-{}-{}", mesh.size(), mesh.rank()));
    let expected = weights(&train_alone(&alone, train.clone(), valid.clone(), set).model);

    let sampler = |rows: &[Row]| -> Result<_> {
        Ok(
            DistributedSampler::new(rows.len(), mesh.data_shard("shard")?)
                .with_global_batch_size(BATCH),
        )
    };
    let [of_train, of_valid] =
        [sampler(&train)?, sampler(&valid)?].map(|of| of.with_last_batch(LastBatch::Pad));
    let train = DistributedLoader::without_padding(InMemDataset::new(train), of_train, Rows)?;
    let valid = DistributedLoader::without_padding(InMemDataset::new(valid), of_valid, Rows)?;
    let result = train_on(mesh, folder, Arc::new(train), Arc::new(valid), set)?;
    let trained = weights(&full_model(&result.model)?);

    let is_close = |a: &[f64], b: &[f64]| {
        a.len() == b.len() && a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-5)
    };
    let numbers = |weights: Vec<f32>| -> Vec<f64> { weights.into_iter().map(f64::from).collect() };
    let (trained, expected) = (numbers(trained), numbers(expected));
    assert!(is_close(&trained, &expected), "{trained:?} vs {expected:?}");
    let lines = ["train", "valid"]
        .into_iter()
        .flat_map(|split| (1..=3).map(move |epoch| (split, epoch)));
    for ((split, epoch), metric) in lines.flat_map(|line| METRICS.map(|metric| (line, metric))) {
        let of = |folder: &Path| logged(folder, split, epoch, metric);
        let (own, all) = (of(&folder.rank(mesh.rank())), of(alone.as_ref()));
        assert!(all.len() > 1, "burn logs {metric}");
        assert!(
            is_close(&own, &all),
            "{split} {metric} of epoch {epoch} on {}: {own:?} vs {all:?}",
            mesh.rank()
        );
    }
    Ok(())
}

/// Invariant 1.
#[test]
fn every_metric_equals_that_of_one_device_on_all_rows() {
    for ranks in 1..=3 {
        let folder = Folder::new(&format!("metrics-{ranks}"));
        on_ranks(ranks, |mesh| trains_as_one_device(mesh, &folder)).unwrap();
    }
}

/// Invariant 1.
#[cfg(feature = "mpi")]
#[test]
fn every_metric_of_two_processes_equals_that_of_one_device_on_all_rows() {
    let test = burn_dtensor::testing::MeshTest::new([2], ["shard"]).with_processes(2);
    test.run(|mesh| trains_as_one_device(mesh, &Folder::new("metrics-processes")));
}

/// Ranks along `tp` have the same rows, which count once. With SGD, since the steps of AdamW hardly
/// depend on a factor of all gradients.
#[test]
fn a_mesh_with_tensor_parallel_ranks_trains_as_one_device() {
    // Of the last batch, the ranks along `dp` have 6 rows and 1.
    let train = rows(100, 3 * BATCH + 7, 0.2);
    let valid = rows(900, BATCH, 0.2);
    let trained = |training: SupervisedTraining<Net>, model: Net| {
        let learner = Learner::new(model, SgdConfig::new().init(), LR);
        metrics(training).num_epochs(3).launch(learner).model
    };
    let folder = Folder::new("tp-alone");
    let [all_train, all_valid] = [&train, &valid].map(|rows| loader(rows.clone(), BATCH));
    let expected = weights(&trained(
        SupervisedTraining::new(&folder, all_train, all_valid),
        Net::new(&Device::flex().autodiff()),
    ));

    let folder = Folder::new("tp");
    let of_ranks = launch(Launch::threads(4), |world| {
        let mesh = DeviceMesh::new(world, [2, 2], ["dp", "tp"])?;
        let dp = mesh.slice("dp")?;
        let data_rank = mesh.data_shard("dp")?.index;
        let own = |rows: &[Row]| loader(part(rows, data_rank, 2), BATCH / 2);
        let plan = Plan::new()
            .with_style("up", Style::colwise())
            .with_style("down", Style::rowwise());
        let model = Net::new(&mesh.device().clone().autodiff());
        let model = parallelize(model, &mesh.slice("tp")?, plan)?;
        let model = fully_shard(model, &dp, FullyShard::new())?;
        let training = supervised(&dp, &folder, own(&train), own(&valid))?;
        Ok(weights(&full_model(&trained(training, model))?))
    });
    for (rank, found) in of_ranks.unwrap() {
        let differences = found.iter().zip(&expected).map(|(a, b)| (a - b).abs());
        assert!(
            differences.fold(0.0, f32::max) < 1e-5,
            "rank {rank}: {found:?} vs {expected:?}"
        );
    }
}

/// Each row is a sequence of one token, for which the least likely class is predicted.
#[derive(Module, Debug)]
struct Tagger {
    net: Net,
}

impl Tagger {
    fn tag(&self, batch: Batch) -> SequenceOutput {
        let output = InferenceStep::step(&self.net, batch);
        SequenceOutput {
            loss: output.loss,
            predictions: Some(output.output.clone().argmin(1)),
            logits: output.output.unsqueeze_dim(1),
            targets: output.targets.unsqueeze_dim(1),
        }
    }
}

impl TrainStep for Tagger {
    type Input = Batch;
    type Output = SequenceOutput;

    fn step(&self, batch: Batch) -> TrainOutput<SequenceOutput> {
        let output = self.tag(batch);
        TrainOutput::new(self, output.loss.backward(), output)
    }
}

impl InferenceStep for Tagger {
    type Input = Batch;
    type Output = SequenceOutput;

    fn step(&self, batch: Batch) -> SequenceOutput {
        self.tag(batch)
    }
}

/// Invariant 1, for predictions that do not follow from the logits.
#[test]
fn error_rates_are_those_of_the_tokens_that_all_ranks_predict() {
    let rows = rows(100, 2 * BATCH, 0.2);
    let tagger = |device: &Device| Tagger {
        net: Net::new(&device.clone().autodiff()),
    };
    let train = |training: SupervisedTraining<Tagger>, model: Tagger| {
        let training = training.metrics((CharErrorRate::new(),));
        let training = training.with_application_logger(None).num_epochs(1);
        training.launch(Learner::new(model, SgdConfig::new().init(), LR));
    };
    let alone = Folder::new("tokens-alone");
    let all = || loader(rows.clone(), BATCH);
    train(
        SupervisedTraining::new(&alone, all(), all()),
        tagger(&Device::flex()),
    );
    let folder = Folder::new("tokens");
    on_ranks(2, |mesh| {
        let own = || loader(part(&rows, mesh.rank(), 2), BATCH / 2);
        let model = fully_shard(tagger(mesh.device()), mesh, FullyShard::new())?;
        train(supervised(mesh, &folder, own(), own())?, model);
        Ok(())
    })
    .unwrap();
    for split in ["train", "valid"] {
        let rates = |folder: &Path| logged(folder, split, 1, "CER");
        let expected = rates(alone.as_ref());
        assert_eq!(expected.len(), 3, "two batches and the epoch");
        assert_eq!(
            [0, 1].map(|rank| rates(&folder.rank(rank))),
            [expected.clone(), expected],
            "{split}"
        );
    }
}

/// Invariant 1. In the last batch only rank 0 has rows, and rank 1 computes the first of its own
/// again, which is not counted.
#[test]
fn a_row_whose_loss_is_no_number_counts_in_its_own_batch_only() {
    let train = rows(100, BATCH, 0.2);
    let mut valid = rows(900, BATCH + BATCH / 2, 0.2);
    valid[BATCH / 2].features = [f32::NAN; 4];
    let set = |training: SupervisedTraining<Net>| training.num_epochs(1);
    let alone = Folder::new("nan-alone");
    train_alone(&alone, train.clone(), valid.clone(), set);
    let folder = Folder::new("nan");
    on_ranks(2, |mesh| {
        let own = |rows: &[Row]| loader(part(rows, mesh.rank(), 2), BATCH / 2);
        train_on(mesh, &folder, own(&train), own(&valid), set).map(drop)
    })
    .unwrap();
    let losses = |folder: &Path| logged(folder, "valid", 1, "Loss");
    let expected = losses(alone.as_ref());
    assert!(expected[0].is_nan(), "{expected:?}");
    for rank in [0, 1] {
        let found = losses(&folder.rank(rank));
        assert!(
            found[0].is_nan() && (found[1] - expected[1]).abs() < 1e-5,
            "{found:?} vs {expected:?} on {rank}"
        );
    }
}

/// Invariant 2.
#[test]
fn early_stopping_of_all_ranks_is_that_of_all_rows() {
    let train = rows(100, 4 * BATCH, 0.3);
    // The rows of one rank are labeled as those of training, the other's at random.
    let mut valid = rows(5000, 4 * BATCH, 0.0);
    let wrong = rows(5000, 4 * BATCH, 0.6);
    for at in (0..valid.len()).filter(|at| at % BATCH >= BATCH / 2) {
        valid[at] = wrong[at].clone();
    }
    let alone = |name: &str, valid: Vec<Row>| {
        let folder = Folder::new(name);
        train_alone(&folder, train.clone(), valid, |training| {
            training.num_epochs(30).early_stopping(early_stopping())
        });
        epochs(folder.as_ref())
    };
    let all = alone("stop-all", valid.clone());
    let own = [0, 1].map(|rank| alone(&format!("stop-own-{rank}"), part(&valid, rank, 2)));
    assert!(
        own[0] != own[1] && all < 30,
        "each rank alone would stop elsewhere: {own:?}, all rows after {all}"
    );

    let folder = Folder::new("stop");
    on_ranks(2, |mesh| {
        let own = |rows: &[Row]| loader(part(rows, mesh.rank(), 2), BATCH / 2);
        train_on(mesh, &folder, own(&train), own(&valid), |training| {
            training.num_epochs(30).early_stopping(early_stopping())
        })
        .map(drop)
    })
    .unwrap();
    assert_eq!([0, 1].map(|rank| epochs(&folder.rank(rank))), [all, all]);
}

/// Early stopping after an epoch that is given.
#[derive(Clone)]
struct StopAfter(usize);

impl EarlyStoppingStrategy for StopAfter {
    fn should_stop(&mut self, epoch: usize, _: &EventStoreClient) -> bool {
        epoch >= self.0
    }
}

/// Invariant 2, for a strategy that depends on something else than metrics of rows, such as the
/// time.
#[test]
fn the_first_rank_decides_on_early_stopping() {
    let folder = Folder::new("stop-first");
    on_ranks(2, |mesh| {
        let own = || loader(part(&rows(100, BATCH, 0.2), mesh.rank(), 2), BATCH / 2);
        let own_epoch = [3, 1][mesh.rank()];
        let set = |training: SupervisedTraining<Net>| {
            training.num_epochs(5).early_stopping(StopAfter(own_epoch))
        };
        train_on(mesh, &folder, own(), own(), set).map(drop)
    })
    .unwrap();
    assert_eq!([0, 1].map(|rank| epochs(&folder.rank(rank))), [3, 3]);
}

/// A validation set of fewer rows than a batch, one for each rank at least.
#[test]
fn a_small_validation_set_has_rows_for_every_rank() {
    let (train, valid) = (rows(100, 2 * BATCH, 0.2), rows(900, 7, 0.2));
    let losses = [1, 2, 3].map(|ranks| {
        let folder = Folder::new(&format!("small-{ranks}"));
        let trained = on_ranks(ranks, |mesh| {
            let datasets = [&train, &valid].map(|rows| InMemDataset::new(rows.clone()));
            let [train, valid] = datasets;
            let (train, valid) = loaders(mesh, Rows, BATCH, 3, train, valid)?;
            let device = mesh.device().clone().autodiff();
            let model = fully_shard(Net::new(&device), mesh, FullyShard::new())?;
            let optim = sharded(AdamWConfig::new()).into_module_optimizer(&model)?;
            metrics(supervised(mesh, &folder, train, valid)?)
                .num_epochs(1)
                .launch(Learner::new(model, optim, LR));
            Ok(())
        });
        trained.unwrap();
        logged(&folder.rank(0), "valid", 1, "Loss")
    });
    for loss in &losses[1..] {
        assert_eq!(
            (loss.len(), losses[0].len()),
            (2, 2),
            "a batch and the epoch"
        );
        for (found, expected) in loss.iter().zip(&losses[0]) {
            assert!((found - expected).abs() < 1e-5, "{loss:?} {losses:?}");
        }
    }
}

/// The first feature of each row, by batch, of one pass over a loader.
fn first_features(loader: &dyn DataLoader<Batch>) -> Vec<Vec<f32>> {
    let first = |batch: Batch| batch.features.narrow(1, 0, 1).into_data().iter().collect();
    loader.iter().map(|batch| first(batch.unwrap())).collect()
}

/// The rows of each global batch, in order, and of the validation set.
#[test]
fn loaders_have_the_same_batches_on_any_number_of_ranks() {
    let (train, valid) = (rows(100, 3 * BATCH + 5, 0.2), rows(900, BATCH + 2, 0.2));
    let batches = |ranks: usize| {
        let of_ranks = on_ranks(ranks, |mesh| {
            let datasets = [&train, &valid].map(|rows| InMemDataset::new(rows.clone()));
            let [train, valid] = datasets;
            let (train, valid) = loaders(mesh, Rows, BATCH, 3, train, valid)?;
            Ok([first_features(&*train), first_features(&*valid)])
        });
        let of_ranks = of_ranks.unwrap();
        [0, 1].map(|split| {
            let batch = |at| {
                of_ranks
                    .iter()
                    .flat_map(move |of_rank| of_rank[split].get(at).cloned().unwrap_or_default())
            };
            (0..of_ranks[0][split].len())
                .map(|at| batch(at).collect())
                .collect::<Vec<Vec<f32>>>()
        })
    };
    let [train_batches, valid_batches] = batches(1);
    assert_eq!(
        train_batches.iter().map(Vec::len).collect::<Vec<_>>(),
        [BATCH, BATCH, BATCH, 5]
    );
    let in_order: Vec<f32> = valid.iter().map(|row| row.features[0]).collect();
    assert_eq!(valid_batches.concat(), in_order);
    for ranks in [2, 3] {
        assert_eq!(
            batches(ranks),
            [train_batches.clone(), valid_batches.clone()],
            "{ranks} ranks"
        );
    }
}

#[test]
fn training_rows_come_in_another_order_for_each_epoch_and_seed() {
    let rows = rows(100, 3 * BATCH, 0.2);
    let two_epochs = |seed: u64| {
        let of_ranks = on_ranks(1, |mesh| {
            let [train, valid] = [0, 1].map(|_| InMemDataset::new(rows.clone()));
            let (train, _) = loaders(mesh, Rows, BATCH, seed, train, valid)?;
            Ok([0, 1].map(|_| first_features(&*train).concat()))
        });
        of_ranks.unwrap().remove(0)
    };
    assert_eq!(two_epochs(3), two_epochs(3), "a seed has one order");

    let in_order: Vec<f32> = rows.iter().map(|row| row.features[0]).collect();
    let mut orders = [two_epochs(3), two_epochs(4)].concat();
    orders.push(in_order);
    for (order, other) in orders.iter().tuple_combinations() {
        assert_ne!(order, other);
    }
    for rows in &mut orders {
        rows.sort_by(f32::total_cmp);
    }
    assert!(orders.iter().all_equal(), "each row once: {orders:?}");
}

/// Loaders that begin inside an epoch, also with its last batch, of which a rank has no row.
#[test]
fn a_training_that_begins_inside_an_epoch_takes_the_rows_after_it() {
    let train = rows(100, 2 * BATCH + 7, 0.2);
    let valid = rows(900, BATCH, 0.2);
    let set = |training: SupervisedTraining<Net>| training.num_epochs(1);
    for (ranks, skipped) in [(2, 1), (2, 2), (3, 1), (3, 2)] {
        let alone = Folder::new(&format!("inside-alone-{ranks}-{skipped}"));
        let rest = train[skipped * BATCH..].to_vec();
        let expected = weights(&train_alone(&alone, rest, valid.clone(), set).model);
        let folder = Folder::new(&format!("inside-{ranks}-{skipped}"));
        let trained = on_ranks(ranks, |mesh| {
            let sampler = DistributedSampler::new(train.len(), mesh.data_shard("shard")?)
                .with_global_batch_size(BATCH)
                .with_last_batch(LastBatch::Pad);
            let dataset = InMemDataset::new(train.clone());
            let own = DistributedLoader::without_padding(dataset, sampler, Rows)?;
            let valid = loader(part(&valid, mesh.rank(), ranks), BATCH / ranks);
            let own = Arc::new(own.with_start(0, skipped));
            let result = train_on(mesh, &folder, own, valid, set)?;
            Ok(weights(&full_model(&result.model)?))
        });
        for trained in trained.unwrap() {
            let far = trained.iter().zip(&expected).map(|(a, b)| (a - b).abs());
            let far = far.fold(0.0, f32::max);
            assert!(
                far < 1e-5,
                "{ranks} ranks, without {skipped} batches: {far}"
            );
        }
    }
}

/// A loader that counts no items.
struct Uncounted(Arc<dyn DataLoader<Batch>>);

struct UncountedBatches<'a>(Box<dyn DataLoaderIterator<Batch> + 'a>);

impl DataLoader<Batch> for Uncounted {
    fn iter<'a>(&'a self) -> Box<dyn DataLoaderIterator<Batch> + 'a> {
        Box::new(UncountedBatches(self.0.iter()))
    }

    fn num_items(&self) -> usize {
        self.0.num_items()
    }

    fn to_device(&self, device: &Device) -> Arc<dyn DataLoader<Batch>> {
        Arc::new(Self(self.0.to_device(device)))
    }

    fn slice(&self, start: usize, end: usize) -> Arc<dyn DataLoader<Batch>> {
        Arc::new(Self(self.0.slice(start, end)))
    }
}

impl Iterator for UncountedBatches<'_> {
    type Item = std::result::Result<Batch, DatasetError>;

    fn next(&mut self) -> Option<Self::Item> {
        self.0.next()
    }
}

impl DataLoaderIterator<Batch> for UncountedBatches<'_> {
    fn progress(&self) -> Progress {
        Progress::new(0, 0, None)
    }
}

/// The second rank has one batch, the first two.
#[test]
fn ranks_with_a_batch_have_equal_weights_if_items_are_not_counted() {
    let train = rows(100, BATCH + BATCH / 2, 0.2);
    let valid = rows(900, BATCH, 0.2);
    let set = |training: SupervisedTraining<Net>| training.num_epochs(2);
    let alone = Folder::new("uncounted-alone");
    let expected = weights(&train_alone(&alone, train.clone(), valid.clone(), set).model);
    let folder = Folder::new("uncounted");
    let trained = on_ranks(2, |mesh| {
        let own = |rows: &[Row]| loader(part(rows, mesh.rank(), 2), BATCH / 2);
        let uncounted = Arc::new(Uncounted(own(&train)));
        let result = train_on(mesh, &folder, uncounted, own(&valid), set)?;
        Ok(weights(&full_model(&result.model)?))
    });
    for trained in trained.unwrap() {
        let far = trained.iter().zip(&expected).map(|(a, b)| (a - b).abs());
        assert!(far.fold(0.0, f32::max) < 1e-5, "{trained:?} {expected:?}");
    }
}
