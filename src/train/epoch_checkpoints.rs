//! [`EpochCheckpoints`]: what a training saves at the end of each epoch.

use std::fmt;

use burn::train::metric::store::{Aggregate, Direction, EventStoreClient, Split};
use burn::train::metric::{Metric, MetricName};

use super::TrainError;
use crate::Result;
use crate::checkpoint::{Best, CheckpointManager, State};

/// Key of the metric's value in checkpoints.
pub(super) const METRIC: &str = "metric";

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
    best: Best,
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
    /// burn's `MetricCheckpointingStrategy` does. Each checkpoint has the value as `metric`, an
    /// `f64`, so that a run that is resumed compares with the epochs before.
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
        self.run = self.run.with_best(METRIC, best);
        self.best = Some(BestMetric {
            name: metric.name(),
            aggregate,
            split,
            best,
        });
        self
    }

    /// The training returns the model of the [best](Self::with_best) checkpoint in place of the
    /// last, also after early stopping.
    #[must_use]
    pub fn with_best_model(self) -> Self {
        Self {
            returns_best: true,
            ..self
        }
    }

    /// Adds values and tensors of the program to each checkpoint. `add` is called on every rank, and
    /// may take part in collectives. The keys `model`, `optimizer`, `schedule`, `random` and `metric`
    /// are taken. After [`resume`](super::resume), [`CheckpointManager::latest`] has what was added.
    #[must_use]
    pub fn with_state(self, add: impl Fn(State) -> Result<State> + Send + Sync + 'static) -> Self {
        Self {
            add: Some(Box::new(add)),
            ..self
        }
    }

    /// Returns the best checkpoints' direction if the training returns the best model.
    pub(super) fn returned(&self) -> Option<Best> {
        let best = self.best.as_ref().filter(|_| self.returns_best);
        best.map(|metric| metric.best)
    }

    /// Adds the metric's value of an epoch and what the program adds.
    pub(super) fn complete(
        &self,
        state: State,
        epoch: usize,
        store: &EventStoreClient,
    ) -> Result<State> {
        let state = match &self.best {
            Some(metric) => state.with_value(METRIC, &metric.value(epoch, store)?)?,
            None => state,
        };
        match &self.add {
            Some(add) => add(state),
            None => Ok(state),
        }
    }
}

impl BestMetric {
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
