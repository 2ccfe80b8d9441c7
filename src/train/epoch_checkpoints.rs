//! [`EpochCheckpoints`]: what a training saves at the end of each epoch.

use std::fmt;

use burn::train::metric::store::{Aggregate, Direction, EventStoreClient, Split};
use burn::train::metric::{Metric, MetricName};

use super::TrainError;
use crate::Result;
use crate::checkpoint::{Best, Checkpoint, CheckpointManager, State};
use crate::comm::agree_on_first;

/// The checkpoints that [`with_checkpoints`](super::with_checkpoints) saves at the end of each
/// epoch: where, what else is in them, and which is the best. A [`CheckpointManager`] becomes one
/// that adds nothing.
///
/// ```
/// # use burn_dtensor::prelude::*;
/// use burn::train::metric::LossMetric;
/// use burn::train::metric::store::{Aggregate, Direction, Split};
/// use burn_dtensor::checkpoint::CheckpointManager;
/// use burn_dtensor::train::EpochCheckpoints;
///
/// # launch(Launch::threads(2), |world| {
/// # let mesh = DeviceMesh::new(world, [2], ["shard"])?;
/// let run = CheckpointManager::new("runs/classifier", &mesh).with_keep(2);
/// let checkpoints = EpochCheckpoints::new(run)
///     .with_best(&LossMetric::new(), Aggregate::Mean, Direction::Lowest, Split::Valid)
///     .with_best_model()
///     .with_state(|state| state.with_value("vocabulary", &32_000));
/// # let _ = checkpoints;
/// # Ok(())
/// # })?;
/// # Ok::<_, burn_dtensor::Error>(())
/// ```
pub struct EpochCheckpoints {
    pub(super) run: CheckpointManager,
    best: Option<BestMetric>,
    returns_best: bool,
    add: Option<Box<AddToState>>,
}

/// Function that adds to the state that is saved.
type AddToState = dyn Fn(State) -> Result<State> + Send + Sync;

#[derive(Debug)]
struct BestMetric {
    name: MetricName,
    aggregate: Aggregate,
    split: Split,
}

impl EpochCheckpoints {
    /// Creates the checkpoints of a run, as its steps. Local: no communication.
    pub fn new(run: CheckpointManager) -> Self {
        Self {
            run,
            best: None,
            returns_best: false,
            add: None,
        }
    }

    /// Also keeps the checkpoint of the epoch with the best value of a metric of the training, as
    /// burn's `MetricCheckpointingStrategy` does. Each checkpoint has the value of the first rank, an
    /// `f64`, under a key such as `metric.Loss.valid.mean`, so that a run that is resumed compares
    /// with the epochs before.
    #[must_use]
    pub fn with_best(
        mut self,
        metric: &impl Metric,
        aggregate: Aggregate,
        direction: Direction,
        split: Split,
    ) -> Self {
        let best = match direction {
            Direction::Lowest => Best::Lowest,
            Direction::Highest => Best::Highest,
        };
        let metric = BestMetric {
            name: metric.name(),
            aggregate,
            split,
        };
        self.run = self.run.with_best(metric.key(), best);
        self.best = Some(metric);
        self
    }

    /// The training returns the model of the best checkpoint in place of the last, also after early
    /// stopping: by [`with_best`](Self::with_best), or by that of the
    /// [manager](CheckpointManager::with_best).
    #[must_use]
    pub fn with_best_model(self) -> Self {
        Self {
            returns_best: true,
            ..self
        }
    }

    /// Adds values and tensors of the program to each checkpoint. `add` is called on every rank, and
    /// may take part in collectives. The keys `model`, `optimizer`, `schedule`, `random` and those
    /// that begin with `metric` are taken. After [`resume`](super::resume), [`CheckpointManager::latest`] has what was added.
    #[must_use]
    pub fn with_state(self, add: impl Fn(State) -> Result<State> + Send + Sync + 'static) -> Self {
        Self {
            add: Some(Box::new(add)),
            ..self
        }
    }

    /// Adds the metric's value of an epoch and what the program adds.
    ///
    /// # Collective
    /// Every rank of the manager's mesh.
    pub(super) fn complete(
        &self,
        state: State,
        epoch: usize,
        store: &EventStoreClient,
    ) -> Result<State> {
        if self.returns_best && self.run.best_by().is_none() {
            return Err(TrainError::NoBest.into());
        }
        let state = match &self.best {
            None => state,
            Some(metric) => {
                // Devices may differ in the last bit.
                let all = self.run.mesh().all()?;
                let value = agree_on_first(&all, "train_metric", || metric.value(epoch, store))?;
                state.with_value(&metric.key(), &value)?
            }
        };
        match &self.add {
            Some(add) => add(state),
            None => Ok(state),
        }
    }

    /// Returns the best checkpoint if the training returns its model.
    ///
    /// # Collective
    /// Every rank of the manager's mesh.
    pub(super) fn returned(&self) -> Result<Option<Checkpoint>> {
        match self.run.best_by().filter(|_| self.returns_best) {
            Some((key, best)) => self.run.best(&key, best),
            None => Ok(None),
        }
    }
}

impl BestMetric {
    /// Key of the value in checkpoints: values of another metric are not compared.
    fn key(&self) -> String {
        let aggregate = match self.aggregate {
            Aggregate::Mean => "mean",
        };
        format!("metric.{}.{}.{aggregate}", self.name, self.split)
    }

    fn value(&self, epoch: usize, store: &EventStoreClient) -> Result<f64, TrainError> {
        store
            .find_metric(&self.name, epoch, self.aggregate, &self.split)
            .ok_or_else(|| TrainError::NoMetric {
                metric: self.name.to_string(),
                split: self.split.to_string(),
                epoch,
            })
    }
}

impl From<CheckpointManager> for EpochCheckpoints {
    fn from(run: CheckpointManager) -> Self {
        Self::new(run)
    }
}

impl fmt::Debug for EpochCheckpoints {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            run,
            best,
            returns_best,
            add,
        } = self;
        f.debug_struct("EpochCheckpoints")
            .field("run", run)
            .field("best", best)
            .field("returns_best", returns_best)
            .field("add", &add.is_some())
            .finish()
    }
}
