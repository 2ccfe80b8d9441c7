//! burn's training loop, `Learner` and `SupervisedTraining`, on the ranks of a mesh.
//!
//! A program written for burn's `Learner` runs on every rank of a [`launch`](crate::comm::launch).
//! [`supervised`] takes the place of `SupervisedTraining::new`. Metrics then cover the rows of all
//! ranks, and all ranks step, stop and save together.
//!
//! Write a loop instead if a step needs several models or optimizers, or if its outputs are large:
//! every step gathers the outputs on every rank, for the metrics.
//!
//! [`with_checkpoints`] saves at the end of each epoch, and [`resume`] continues on any mesh:
//!
//! ```
//! # use burn::data::dataloader::batcher::Batcher;
//! # use burn::data::dataset::InMemDataset;
//! # use burn::nn::{Linear, LinearConfig, loss::{MseLoss, Reduction}};
//! # use burn::tensor::{Device, Tensor, TensorData};
//! # use burn::train::{InferenceStep, RegressionOutput, TrainOutput, TrainStep};
//! use burn::module::Module;
//! use burn::optim::AdamWConfig;
//! use burn::train::metric::LossMetric;
//! use burn_dtensor::checkpoint::CheckpointManager;
//! use burn_dtensor::optim::sharded;
//! use burn_dtensor::prelude::*;
//! use burn_dtensor::train::{loaders, resume, supervised, with_checkpoints};
//!
//! # #[derive(Module, Debug)]
//! # struct Net {
//! #     layer: Linear,
//! # }
//! # impl Net {
//! #     fn regress(&self, (x, y): Batch) -> RegressionOutput {
//! #         let output = unit(self, x, |net, x| net.layer.forward(x));
//! #         let loss = MseLoss::new().forward(output.clone(), y.clone(), Reduction::Mean);
//! #         RegressionOutput::new(loss, output, y)
//! #     }
//! # }
//! # type Batch = (Tensor<2>, Tensor<2>);
//! # impl TrainStep for Net {
//! #     type Input = Batch;
//! #     type Output = RegressionOutput;
//! #     fn step(&self, batch: Batch) -> TrainOutput<RegressionOutput> {
//! #         let output = self.regress(batch);
//! #         TrainOutput::new(self, output.loss.backward(), output)
//! #     }
//! # }
//! # impl InferenceStep for Net {
//! #     type Input = Batch;
//! #     type Output = RegressionOutput;
//! #     fn step(&self, batch: Batch) -> RegressionOutput {
//! #         self.regress(batch)
//! #     }
//! # }
//! # #[derive(Clone)]
//! # struct Squares;
//! # impl Batcher<f32, Batch> for Squares {
//! #     fn batch(&self, items: Vec<f32>, device: &Device) -> Batch {
//! #         let len = items.len();
//! #         let x: Tensor<2> = Tensor::from_data(TensorData::new(items, [len, 1]), device);
//! #         (x.clone(), x.square())
//! #     }
//! # }
//! # let artifacts = std::env::temp_dir().join(format!("burn-dtensor-train-{}", std::process::id()));
//! # let rows = |count: usize| InMemDataset::new((0..count).map(|row| row as f32 / 10.0).collect());
//! launch(Launch::threads(4), |world| {
//!     let mesh = DeviceMesh::new(world, [4], ["shard"])?;
//!     let device = world.device().clone().autodiff();
//!     let model = fully_shard(Net { layer: LinearConfig::new(1, 1).init(&device) }, &mesh, FullyShard::new())?;
//!     let optim = sharded(AdamWConfig::new()).into_module_optimizer(&model)?;
//!     let (train, valid) = loaders(&mesh, Squares, 8, 42, rows(30), rows(13))?; // this rank's rows
//!     let checkpoints = CheckpointManager::new(artifacts.join("run"), &mesh).with_keep(2);
//!     let (learner, epoch) = resume(&checkpoints, model, optim, 1e-3)?; // calls burn's `Learner::new`
//!     let training = supervised(&mesh, &artifacts, train, valid)?.metrics((LossMetric::new(),)).num_epochs(2).summary();
//!     let mut training = with_checkpoints(training, &mesh, checkpoints);
//!     if let Some(epoch) = epoch {
//!         training = training.checkpoint(epoch);
//!     }
//!     let result = training.launch(learner);
//!     let _full = full_model(&result.model)?;
//!     Ok(())
//! })?;
//! # std::fs::remove_dir_all(&artifacts)?;
//! # Ok::<_, burn_dtensor::Error>(())
//! ```
//!
//! # What changes
//! | burn on one device | on the ranks of a mesh |
//! |---|---|
//! | `SupervisedTraining::new(directory, train, valid)` | [`supervised(&mesh, directory, train, valid)?`](supervised), which also sets burn's training strategy |
//! | `DataLoaderBuilder` | [`loaders`], or two [`DistributedLoader`](crate::data::DistributedLoader)s: each rank reads its own rows, and the batch size of `loaders` counts the rows of all ranks |
//! | `Learner::new(model, ..)` | the same, after [`fully_shard`](crate::fsdp::fully_shard) or [`replicate`](crate::replicate::replicate()) on the model |
//! | the model's forward in `TrainStep::step` | the same, inside [`unit`](fn@crate::fsdp::unit) |
//! | any output of a step | an output that implements [`GatherOutput`]: `ClassificationOutput`, `MultiLabelClassificationOutput`, `RegressionOutput`, `SequenceOutput`, or your own |
//! | `AdamWConfig::new().init()` | the same, for an optimizer that works element by element; or [`sharded`](crate::optim::sharded) and [`into_module_optimizer`](crate::optim::ShardedOptimizer::into_module_optimizer) |
//! | a directory for the training | a directory for each rank inside it: [`rank_directory`] |
//! | `result.model.save_file(..)` | the same, on [`full_model`](crate::fsdp::full_model) or [`full_model_on`](crate::fsdp::full_model_on) |
//! | `training.checkpoint(epoch)` to resume | the same, with the epoch of [`last_checkpoint`]; to resume on another mesh, [`with_checkpoints`] and [`resume`] |
//!
//! Everything else is burn's own: metrics, checkpointers, early stopping, learning rate schedules,
//! `grads_accumulation` and the renderer. Only the first rank draws, prints the summary and
//! installs burn's logger. [`EpochRenderer`] prints one line for each epoch.
//!
//! If the loss is a mean over rows, each row of a batch has the same weight, even if ranks have
//! different numbers of them. A rank whose batches have ended computes on its first row, which does
//! not count, until the others have ended too. The [guide](crate::book::burn_train) has a complete
//! program and the limits.
//!
//! # Who decides
//!
//! | decision | taken by |
//! |---|---|
//! | metrics | every rank, from the outputs of all ranks' rows ([`GatherOutput`]), so all ranks log the same values |
//! | checkpoints to keep | with burn's checkpointers, every rank, from these metrics; with [`EpochCheckpoints`], by the first rank's value of the metric. Each rank writes its shards |
//! | early stopping | the first rank, from these metrics |
//! | stop by an `Interrupter` of any rank | all ranks, after the same step |
//! | failure of a rank's data, metrics or checkpoint | all ranks, with [`TrainError::Failed`] |
//! | end of an epoch | all ranks, when no rank has a further batch |
//!
//! # Invariants
//! 1. A metric of an epoch has the same value on all ranks, and the value that one device computes
//!    from the global batches, up to rounding. Each row counts once. Metrics of time and hardware
//!    are an exception: each rank measures its own.
//! 2. All ranks take each step, stop, save and fail together. No decision is taken from one rank's
//!    rows alone.
//! 3. A training that resumes from a checkpoint on the same mesh continues as if it had not been
//!    interrupted, bit for bit on the CPU, also in the order in which burn's loaders shuffle.
//!    Exceptions: early stopping counts from the beginning, because burn does not save it. Random
//!    numbers continue only with [`with_checkpoints`] and [`nn::dropout`](crate::nn::dropout),
//!    because burn's checkpointers do not save them, and burn's own `Dropout` draws from a state
//!    that cannot be saved. An optimizer that burn's `init` builds panics on a rank with an empty
//!    shard when it resumes; one of [`sharded`](crate::optim::sharded) does not.

mod checkpoint;
mod epoch_checkpoints;
mod epoch_renderer;
mod error;
mod gather;
mod global_shapes;
mod loaders;
mod mesh_checkpoints;
mod strategy;
mod supervised;
mod training_ranks;

pub use checkpoint::last_checkpoint;
pub use epoch_checkpoints::EpochCheckpoints;
pub use epoch_renderer::EpochRenderer;
pub use error::TrainError;
pub use gather::{GatherOutput, GlobalBatch};
pub use loaders::{Loaders, loaders};
pub use mesh_checkpoints::resume;
pub use supervised::{rank_directory, supervised, with_checkpoints};
