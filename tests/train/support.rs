//! A model, its data, and trainings of it: by burn alone, and on a mesh.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use burn::data::dataloader::batcher::Batcher;
use burn::data::dataloader::{DataLoader, DataLoaderBuilder};
use burn::data::dataset::InMemDataset;
use burn::lr_scheduler::constant::ConstantLr;
use burn::module::{Module, Param};
use burn::nn::Linear;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::optim::AdamWConfig;
use burn::tensor::{Device, Int, Tensor, TensorData};
use burn::train::metric::store::{Aggregate, Direction, Split};
use burn::train::metric::{
    AccuracyMetric, ClassReduction, LossMetric, NumericEntry, PrecisionMetric,
};
use burn::train::{
    ClassificationOutput, InferenceStep, Learner, LearningResult, MetricEarlyStoppingStrategy,
    StoppingCondition, SupervisedTraining, TrainOutput, TrainStep,
};
use burn_dtensor::nn;
use burn_dtensor::optim::sharded;
use burn_dtensor::prelude::*;
use burn_dtensor::train::supervised;

/// Rows of a global batch.
pub const BATCH: usize = 12;
pub const LR: f64 = 0.05;

#[derive(Module, Debug)]
pub struct Net {
    up: Linear,
    down: Linear,
    /// Probability with which an activation is dropped in training.
    dropout: f64,
}

/// Four features and one of three classes.
#[derive(Debug, Clone)]
pub struct Row {
    pub features: [f32; 4],
    pub class: i64,
}

#[derive(Debug, Clone)]
pub struct Batch {
    pub features: Tensor<2>,
    pub classes: Tensor<1, Int>,
}

#[derive(Clone)]
pub struct Rows;

impl Batcher<Row, Batch> for Rows {
    fn batch(&self, rows: Vec<Row>, device: &Device) -> Batch {
        let features: Vec<f32> = rows.iter().flat_map(|row| row.features).collect();
        let classes: Vec<i64> = rows.iter().map(|row| row.class).collect();
        Batch {
            features: Tensor::from_data(TensorData::new(features, [rows.len(), 4]), device),
            classes: Tensor::from_data(TensorData::new(classes, [rows.len()]), device),
        }
    }
}

impl Net {
    /// The same values on every rank and in every run.
    pub fn new(device: &Device) -> Self {
        let linear = |seed, [rows, columns]: [usize; 2]| Linear {
            weight: Param::from_data(
                TensorData::new(noise(seed, rows * columns), [rows, columns]),
                device,
            ),
            bias: Some(Param::from_data(
                TensorData::new(noise(seed + 1, columns), [columns]),
                device,
            )),
        };
        Self {
            up: linear(1, [4, 7]),
            down: linear(3, [7, 3]),
            dropout: 0.0,
        }
    }

    /// Drops activations in training.
    pub fn with_dropout(self, dropout: f64) -> Self {
        Self { dropout, ..self }
    }

    fn classify(&self, batch: Batch) -> ClassificationOutput {
        let output = unit(self, batch.features, |net, x| {
            let hidden = nn::dropout(net.up.forward(x).tanh(), self.dropout);
            net.down.forward(hidden)
        });
        let loss = CrossEntropyLossConfig::new()
            .init(&output.device())
            .forward(output.clone(), batch.classes.clone());
        ClassificationOutput::new(loss, output, batch.classes)
    }
}

impl TrainStep for Net {
    type Input = Batch;
    type Output = ClassificationOutput;

    fn step(&self, batch: Batch) -> TrainOutput<ClassificationOutput> {
        let output = self.classify(batch);
        TrainOutput::new(self, output.loss.backward(), output)
    }
}

impl InferenceStep for Net {
    type Input = Batch;
    type Output = ClassificationOutput;

    fn step(&self, batch: Batch) -> ClassificationOutput {
        self.classify(batch)
    }
}

/// `count` numbers between -1 and 1.
pub fn noise(seed: u64, count: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    (0..count).map(|_| next()).collect()
}

/// `count` rows. The class is the largest of the first three features, but is another one in a
/// fraction of the rows.
pub fn rows(seed: u64, count: usize, mislabeled: f32) -> Vec<Row> {
    let row = |at: usize| {
        let drawn = noise(seed + at as u64, 6);
        let features = [drawn[0], drawn[1], drawn[2], drawn[3]];
        let largest = (0..3)
            .max_by(|&a, &b| features[a].total_cmp(&features[b]))
            .expect("three features");
        let class = if drawn[5].abs() < mislabeled {
            (largest + 1) % 3
        } else {
            largest
        };
        Row {
            features,
            class: class as i64,
        }
    };
    (0..count).map(row).collect()
}

/// The rows of one of `ranks` ranks: its part of each global batch.
pub fn part(rows: &[Row], rank: usize, ranks: usize) -> Vec<Row> {
    rows.chunks(BATCH)
        .flat_map(|batch| batch.chunks(BATCH / ranks).nth(rank).unwrap_or_default())
        .cloned()
        .collect()
}

pub fn loader(rows: Vec<Row>, batch_size: usize) -> Arc<dyn DataLoader<Batch>> {
    DataLoaderBuilder::new(Rows)
        .batch_size(batch_size)
        .build(InMemDataset::new(rows))
}

/// An empty folder for one run of a test.
pub struct Folder(PathBuf);

impl Folder {
    pub fn new(name: &str) -> Self {
        let path =
            std::env::temp_dir().join(format!("burn-dtensor-train-{}-{name}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        Self(path)
    }

    pub fn rank(&self, rank: usize) -> PathBuf {
        self.0.join(format!("rank-{rank}"))
    }
}

impl AsRef<Path> for Folder {
    fn as_ref(&self) -> &Path {
        &self.0
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Adds the metrics of all tests, and leaves the process's log alone.
pub fn metrics(training: SupervisedTraining<Net>) -> SupervisedTraining<Net> {
    let precision = PrecisionMetric::multiclass(1, ClassReduction::Macro);
    training
        .metrics((LossMetric::new(), AccuracyMetric::new(), precision))
        .with_application_logger(None)
}

/// Stops one epoch after the validation loss was lowest.
pub fn early_stopping() -> MetricEarlyStoppingStrategy {
    let condition = StoppingCondition::NoImprovementSince { n_epochs: 1 };
    MetricEarlyStoppingStrategy::new(
        &LossMetric::new(),
        Aggregate::Mean,
        Direction::Lowest,
        Split::Valid,
        condition,
    )
}

/// A training by burn alone.
pub fn train_alone(
    folder: &Folder,
    train: Vec<Row>,
    valid: Vec<Row>,
    set: impl FnOnce(SupervisedTraining<Net>) -> SupervisedTraining<Net>,
) -> LearningResult<Net> {
    let training = SupervisedTraining::new(folder, loader(train, BATCH), loader(valid, BATCH));
    let model = Net::new(&Device::flex().autodiff());
    set(metrics(training)).launch(Learner::new(
        model,
        AdamWConfig::new().init(),
        ConstantLr::new(LR),
    ))
}

/// A training on the ranks of a mesh, with this rank's rows.
pub fn train_on(
    mesh: &DeviceMesh,
    folder: &Folder,
    train: Arc<dyn DataLoader<Batch>>,
    valid: Arc<dyn DataLoader<Batch>>,
    set: impl FnOnce(SupervisedTraining<Net>) -> SupervisedTraining<Net>,
) -> Result<LearningResult<Net>> {
    let model = fully_shard(
        Net::new(&mesh.device().clone().autodiff()),
        mesh,
        FullyShard::new(),
    )?;
    let optim = sharded(AdamWConfig::new()).into_module_optimizer(&model)?;
    let training = metrics(supervised(mesh, folder, train, valid)?);
    Ok(set(training).launch(Learner::new(model, optim, ConstantLr::new(LR))))
}

/// Runs `program` on `ranks` threads with a mesh of them, and returns what the ranks return.
pub fn on_ranks<T: Send>(
    ranks: usize,
    program: impl Fn(&DeviceMesh) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    let results = launch(Launch::threads(ranks), |world| {
        program(&DeviceMesh::new(world, [ranks], ["shard"])?)
    })?;
    Ok(results.into_iter().map(|(_, result)| result).collect())
}

/// The lines that burn logged of a metric: of every batch, then of the epoch. Empty for an epoch
/// that was not trained.
pub fn logged(folder: &Path, split: &str, epoch: usize, metric: &str) -> Vec<f64> {
    let file = folder
        .join(split)
        .join(format!("epoch-{epoch}"))
        .join(format!("{metric}.log"));
    let text = std::fs::read_to_string(file).unwrap_or_default();
    text.lines()
        .map(|line| {
            NumericEntry::deserialize(line)
                .expect("a number that burn logged")
                .current()
        })
        .collect()
}

/// The number of epochs that were trained.
pub fn epochs(folder: &Path) -> usize {
    (1..)
        .take_while(|&epoch| !logged(folder, "train", epoch, "Loss").is_empty())
        .count()
}

/// The full model's weights.
pub fn weights(net: &Net) -> Vec<f32> {
    let layers = [&net.up, &net.down];
    let tensors = layers.into_iter().flat_map(|layer| {
        let bias = layer.bias.as_ref().expect("it has one").val().into_data();
        [layer.weight.val().into_data(), bias]
    });
    tensors
        .flat_map(|data| data.try_to_vec::<f32>().expect("f32"))
        .collect()
}
