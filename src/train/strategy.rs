//! [`OnMesh`]: burn's training loop, in which all ranks of a mesh take every step and every decision together.
//!
//! ```text
//!            rank 0                     rank 1
//! fetch      batch │ end │ stop │ error batch │ ..          one exchange: all step, stop or fail
//! step       forward, backward, optimizer                   collectives of the model
//! gather     output of rank 0 ──┬────── output of rank 1    outputs of all ranks, on all ranks
//! metrics    of the global batch        the same            burn's metrics, loggers and stores
//! epoch      checkpoint, early stopping                     from the same metrics; the first rank decides
//! ```

use std::cell::RefCell;

use burn::data::dataloader::DataLoader;
use burn::optim::GradientsAccumulator;
use burn::tensor::DType;
use burn::train::{
    EventProcessorTraining, InferenceStep, ItemLazy, Learner, LearnerEvent, LearnerModel,
    LearningResult, SupervisedLearningStrategy, SupervisedTrainingEventProcessor, TrainLoader,
    TrainStep, TrainingComponents, TrainingItem, ValidLoader,
};

use super::TrainError;
use super::epoch_checkpoints::EpochCheckpoints;
use super::gather::{GatherOutput, GlobalBatch};
use super::global_shapes::with_global_shapes;
use super::mesh_checkpoints;
use super::training_ranks::{SplitBatch, SplitBatches, TrainingRanks};
use crate::comm::Communicator;
use crate::error::OrUnwind;
use crate::fsdp::FsdpModule;
use crate::mesh::DeviceMesh;
use crate::param::{ModelScan, ParamError};
use crate::{Error, Result};

/// burn's training loop on the ranks of a mesh.
pub(super) struct OnMesh {
    pub(super) mesh: DeviceMesh,
    /// The checkpoints that are saved at the end of each epoch.
    pub(super) checkpoints: Option<EpochCheckpoints>,
}

/// Result of [`SupervisedLearningStrategy::fit`].
type Fitted<M> = (M, SupervisedTrainingEventProcessor<M>);

impl<M: LearnerModel> SupervisedLearningStrategy<M> for OnMesh
where
    <M as TrainStep>::Output: GatherOutput,
    <M as InferenceStep>::Output: GatherOutput,
{
    fn train(
        &self,
        learner: Learner<M>,
        train: TrainLoader<M>,
        valid: ValidLoader<M>,
        mut components: TrainingComponents<M>,
    ) -> LearningResult<M> {
        let is_first = TrainingRanks::new(&self.mesh, &components.interrupter)
            .or_unwind()
            .is_first();
        components.summary = components.summary.filter(|_| is_first);
        let fit = WithSummary {
            on_mesh: self,
            model: RefCell::new(None),
        };
        let mut result = fit.train(learner, train, valid, components);
        if let Some(model) = fit.model.take() {
            result.model = model.valid();
        }
        result
    }

    fn fit(
        &self,
        components: TrainingComponents<M>,
        learner: Learner<M>,
        train: TrainLoader<M>,
        valid: ValidLoader<M>,
        starting_epoch: usize,
    ) -> Fitted<M> {
        let ranks = TrainingRanks::new(&self.mesh, &components.interrupter).or_unwind();
        let rows = self.mesh.all().or_unwind();
        let checkpoints = self.checkpoints.as_ref();
        Fit {
            mesh: &self.mesh,
            checkpoints,
            ranks,
            rows,
            components,
            learner,
            units: None,
        }
        .run(train, valid, starting_epoch)
        .or_unwind()
    }
}

/// [`OnMesh`] with the model's global sizes in burn's summary, which prints the model that `fit`
/// returns.
struct WithSummary<'a, M> {
    on_mesh: &'a OnMesh,
    /// The trained model.
    model: RefCell<Option<M>>,
}

impl<M: LearnerModel> SupervisedLearningStrategy<M> for WithSummary<'_, M>
where
    <M as TrainStep>::Output: GatherOutput,
    <M as InferenceStep>::Output: GatherOutput,
{
    fn fit(
        &self,
        components: TrainingComponents<M>,
        learner: Learner<M>,
        train: TrainLoader<M>,
        valid: ValidLoader<M>,
        starting_epoch: usize,
    ) -> Fitted<M> {
        let is_printed = components.summary.is_some();
        let (model, processor) =
            self.on_mesh
                .fit(components, learner, train, valid, starting_epoch);
        if !is_printed {
            return (model, processor);
        }
        let printed = with_global_shapes(&model);
        self.model.replace(Some(model));
        (printed, processor)
    }
}

/// One training.
struct Fit<'a, M: LearnerModel> {
    mesh: &'a DeviceMesh,
    checkpoints: Option<&'a EpochCheckpoints>,
    ranks: TrainingRanks,
    /// Ranks that have distinct rows.
    rows: Communicator,
    components: TrainingComponents<M>,
    learner: Learner<M>,
    /// The model's units; `None` for a model that is not distributed.
    units: Option<FsdpModule>,
}

impl<M: LearnerModel> Fit<'_, M>
where
    <M as TrainStep>::Output: GatherOutput,
    <M as InferenceStep>::Output: GatherOutput,
{
    fn run(
        mut self,
        train: TrainLoader<M>,
        valid: ValidLoader<M>,
        starting_epoch: usize,
    ) -> Result<Fitted<M>> {
        let model = self.learner.model();
        // Tensor parallelism alone leaves the ranks of this mesh with models of their own.
        let params = ModelScan::of(&model).params;
        let mut meshes = params
            .iter()
            .filter_map(|param| Some(param.distributed.as_ref()?.spec(DType::F32).mesh().clone()));
        let covers = |of: DeviceMesh| {
            self.mesh
                .ranks()
                .iter()
                .all(|rank| of.ranks().contains(rank))
        };
        if self.mesh.size() > 1 && !meshes.any(covers) {
            let (mesh, ranks) = (self.mesh.to_string(), self.mesh.size());
            return Err(TrainError::NotDistributed { mesh, ranks }.into());
        }
        let device = model
            .devices()
            .into_iter()
            .find(|device| device.is_autodiff())
            .ok_or(TrainError::NoAutodiff)?;
        let train = train.to_device(&device);
        let valid = valid.to_device(&device.inner());
        let train_items = self.ranks.items("train", train.num_items())?;
        let valid_items = self.ranks.items("valid", valid.num_items())?;
        self.units = match FsdpModule::of(&model) {
            Ok(units) => Some(units),
            // One rank trains a model that is not distributed.
            Err(Error::Param(ParamError::NotSharded)) => None,
            Err(error) => return Err(error),
        };
        let has_experts = self.units.as_ref().is_some_and(FsdpModule::has_experts);
        if has_experts && !train_items.is_even {
            return Err(TrainError::UnevenExperts.into());
        }
        // Once in each run: burn's loaders draw a random number for each slice.
        let first_train_row = (!train_items.is_even).then(|| train.slice(0, 1));
        let first_valid_row = (valid_items.total > 0).then(|| valid.slice(0, 1));
        // A loader draws each epoch's order when it begins it: a training that resumes draws those
        // it has seen.
        for _ in 1..starting_epoch {
            drop((train.iter(), valid.iter()));
        }
        for epoch in starting_epoch..=self.components.num_epochs {
            self.train_epoch(
                &*train,
                first_train_row.as_deref(),
                epoch,
                train_items.total,
            )?;
            if self.ranks.is_stopped()? {
                break;
            }
            self.valid_epoch(
                &*valid,
                first_valid_row.as_deref(),
                epoch,
                valid_items.total,
            )?;
            self.send_train(LearnerEvent::EndEpoch(epoch));
            if self.is_finished(epoch)? {
                break;
            }
        }
        // Waits for the last checkpoint, and for the metrics.
        drop(self.components.checkpointer.take());
        self.flush();
        self.ranks.is_stopped()?;
        let model = match self.checkpoints {
            Some(checkpoints) => mesh_checkpoints::returned(checkpoints, self.learner.model())?,
            None => self.learner.model(),
        };
        Ok((model, self.components.event_processor))
    }

    /// Trains an epoch, on the batches of all ranks together. A rank whose batches have ended computes on its `first_row` with weight 0, as long
    /// as other ranks have batches.
    fn train_epoch(
        &mut self,
        loader: &dyn DataLoader<<M as TrainStep>::Input>,
        first_row: Option<&dyn DataLoader<<M as TrainStep>::Input>>,
        epoch: usize,
        total_items: usize,
    ) -> Result<()> {
        self.send_train(LearnerEvent::StartSplit {
            epoch_number: epoch,
            total_items,
        });
        let mut batches = SplitBatches::new(loader, first_row);
        let mut weight = 1.0;
        let mut accumulator = GradientsAccumulator::new();
        let mut iteration = 0;
        let mut accumulated = 0;
        let mut round = batches.fetch(&self.ranks)?;
        while round.any() && !round.stopped {
            if first_row.is_none() {
                round.check_even(epoch, iteration)?;
            }
            let SplitBatch { batch, is_counted } = self.or_no_rows("train", batches.take())?;
            if weight != round.weight {
                weight = round.weight;
                self.weigh(weight)?;
            }
            let next = batches.fetch(&self.ranks)?;
            iteration += 1;
            let output = self.learner.train_step(batch);
            let grads = match self.components.grad_accumulation {
                None => Some(output.grads),
                Some(accumulation) => {
                    accumulator.accumulate(&self.learner.model(), output.grads);
                    accumulated += 1;
                    let is_full = accumulated >= accumulation || !(next.any() || next.stopped);
                    is_full.then(|| {
                        accumulated = 0;
                        accumulator.grads()
                    })
                }
            };
            if let Some(grads) = grads {
                self.learner.lr_step();
                self.learner.optimizer_step(grads);
            }
            let output = self.gathered(output.item, is_counted)?;
            let progress = round.progress(total_items);
            let item = TrainingItem::new(
                output,
                progress,
                Some(iteration),
                Some(self.learner.lr_current()),
            );
            self.send_train(LearnerEvent::ProcessedItem(item));
            round = next;
        }
        if weight != 1.0 {
            self.weigh(1.0)?;
        }
        self.send_train(LearnerEvent::EndSplit(epoch));
        Ok(())
    }

    /// Sets the weight of this rank's gradients.
    fn weigh(&self, weight: f64) -> Result<()> {
        self.units
            .as_ref()
            .map_or(Ok(()), |units| units.set_gradient_weight(weight))
    }

    /// Validates an epoch. A rank whose batches have ended computes on its `first_row`, which is
    /// not counted, as long as other ranks have batches.
    fn valid_epoch(
        &mut self,
        loader: &dyn DataLoader<<M as InferenceStep>::Input>,
        first_row: Option<&dyn DataLoader<<M as InferenceStep>::Input>>,
        epoch: usize,
        total_items: usize,
    ) -> Result<()> {
        self.send_valid(LearnerEvent::StartSplit {
            epoch_number: epoch,
            total_items,
        });
        let model = self.learner.model().valid();
        let mut batches = SplitBatches::new(loader, first_row);
        let mut iteration = 0;
        let mut round = batches.fetch(&self.ranks)?;
        while round.any() && !round.stopped {
            let SplitBatch { batch, is_counted } = self.or_no_rows("valid", batches.take())?;
            let next = batches.fetch(&self.ranks)?;
            iteration += 1;
            let output = self.gathered(InferenceStep::step(&model, batch), is_counted)?;
            let item =
                TrainingItem::new(output, round.progress(total_items), Some(iteration), None);
            self.send_valid(LearnerEvent::ProcessedItem(item));
            round = next;
        }
        self.send_valid(LearnerEvent::EndSplit(epoch));
        Ok(())
    }

    /// Ends an epoch with a checkpoint and early stopping. Returns true if the training is
    /// finished.
    fn is_finished(&mut self, epoch: usize) -> Result<bool> {
        if self.components.checkpointer.is_some()
            || self.components.early_stopping.is_some()
            || self.checkpoints.is_some()
        {
            self.flush();
        }
        if self.ranks.is_stopped()? {
            return Ok(true);
        }
        let store = &self.components.event_store;
        if let Some(checkpointer) = &mut self.components.checkpointer {
            checkpointer.checkpoint(&self.learner, epoch, store);
        }
        if let Some(checkpoints) = self.checkpoints {
            mesh_checkpoints::save(checkpoints, &self.learner, epoch, store)?;
        }
        match &mut self.components.early_stopping {
            Some(early_stopping) => self.ranks.decide(early_stopping.should_stop(epoch, store)),
            None => Ok(false),
        }
    }

    /// Returns the rank's batch, or an error if it has none and its loader had no row to repeat.
    fn or_no_rows<I>(&self, split: &str, batch: Option<SplitBatch<I>>) -> Result<SplitBatch<I>> {
        let no_rows = || TrainError::NoRows {
            split: split.into(),
            empty: vec![self.mesh.rank()],
        };
        batch.ok_or_else(|| no_rows().into())
    }

    /// Returns the output of a step for the rows of all ranks.
    fn gathered<T: GatherOutput + ItemLazy>(&self, output: T, is_counted: bool) -> Result<T> {
        // Without autodiff, as burn's metrics take it.
        let output = output.sync().map_err(Error::other)?;
        let batch = GlobalBatch::exchange(&self.rows, output.rows(), is_counted)?;
        output.gather(&batch)
    }

    fn send_train(&mut self, event: LearnerEvent<<M as TrainStep>::Output>) {
        let result = self.components.event_processor.process_train(event);
        self.components.interrupter.fail_on_error(result);
    }

    fn send_valid(&mut self, event: LearnerEvent<<M as InferenceStep>::Output>) {
        let result = self.components.event_processor.process_valid(event);
        self.components.interrupter.fail_on_error(result);
    }

    fn flush(&mut self) {
        let result = self.components.event_processor.flush();
        self.components.interrupter.fail_on_error(result);
    }
}
