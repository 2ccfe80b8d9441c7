//! Checkpoints of a training that load on any mesh: [`save`], and [`resume`].
//!
//! burn's checkpointers get records, each on a thread of its own, and only burn's
//! `LearningCheckpointer` can read a learner's optimizer and schedule. So one with checkpointers
//! that only pass records on reads them, and the rank itself saves:
//!
//! ```text
//! rank                         burn's threads
//! LearningCheckpointer ──────> model │ optimizer │ schedule
//!                      <────── records
//! states of the parameters by path, CheckpointManager::save, with the other ranks
//! ```

use std::sync::mpsc::{self, Receiver, Sender};

use burn::lr_scheduler::LrSchedulerRecord;
use burn::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;
use burn::optim::{ModuleOptimizer, OptimizerRecord};
use burn::store::ModuleRecord;
use burn::tensor::Bytes;
use burn::train::checkpoint::{
    AsyncCheckpointer, Checkpoint, Checkpointer, CheckpointerError, CheckpointingAction,
    CheckpointingStrategy,
};
use burn::train::metric::store::EventStoreClient;
use burn::train::{Learner, LearnerModel, LearningCheckpointer};

use super::epoch_checkpoints::EpochCheckpoints;
use crate::checkpoint::{CheckpointError, CheckpointManager, LoadOptions, SaveReport, State};
use crate::comm::agree_on_success;
use crate::dtensor::ops::random::{RngState, rng_state, set_rng_state};
use crate::optim::{load_optimizer_state, recorded_state};
use crate::{Error, Result};

const MODEL: &str = "model";
const OPTIMIZER: &str = "optimizer";
const SCHEDULE: &str = "schedule";
const RANDOM: &str = "random";

/// Returns burn's `Learner` of a model that is already distributed, its optimizer and its schedule,
/// with the values of the latest checkpoint of `run`, and the epoch at whose end it was saved;
/// `None` if there is no checkpoint. Pass the epoch to burn's `SupervisedTraining::checkpoint`,
/// without which the training begins with the first epoch.
///
/// The rank's [random numbers](crate::dtensor::ops::random) continue as they were at the end of that
/// epoch, which [`nn::dropout`](crate::nn::dropout) draws: on as many ranks each its own, on others
/// those of the first rank. Draw nothing between this call and the launch.
///
/// # Collective
/// Every rank of the manager's mesh.
///
/// # Errors
/// On all ranks, those of [`CheckpointManager::latest`],
/// [`Checkpoint::load_model`](crate::checkpoint::Checkpoint::load_model),
/// [`Checkpoint::load_optimizer`](crate::checkpoint::Checkpoint::load_optimizer) and
/// [`load_optimizer_state`].
pub fn resume<M: LearnerModel>(
    run: &CheckpointManager,
    model: M,
    optim: ModuleOptimizer,
    schedule: impl Into<ModuleLrScheduler>,
) -> Result<(Learner<M>, Option<usize>)> {
    let Some(checkpoint) = run.latest()? else {
        return Ok((Learner::new(model, optim, schedule), None));
    };
    let (model, _) = checkpoint.load_model(MODEL, model, &LoadOptions::new())?;
    let (state, _) = checkpoint.load_optimizer(OPTIMIZER, &model, &LoadOptions::new())?;
    let optim = load_optimizer_state(optim, &model, state)?;
    let record = Bytes::from_bytes_vec(checkpoint.value(SCHEDULE)?);
    let record = LrSchedulerRecord::from_bytes(record).map_err(Error::other)?;
    match checkpoint.rank_values::<RngState>(RANDOM) {
        Ok(states) => {
            let own = run.mesh().all()?.group().rank();
            let same_ranks = states.len() == run.mesh().size();
            set_rng_state(states[if same_ranks { own } else { 0 }]);
        }
        // Earlier versions did not save it.
        Err(Error::Checkpoint(CheckpointError::NoValue { .. })) => {}
        Err(error) => return Err(error),
    }
    let epoch = checkpoint.step().map(|epoch| epoch as usize);
    Ok((
        Learner::new(model, optim, schedule.into().load_record(record)),
        epoch,
    ))
}

/// Saves the learner at the end of an epoch.
///
/// # Collective
/// Every rank of the manager's mesh.
pub(super) fn save<M: LearnerModel>(
    checkpoints: &EpochCheckpoints,
    learner: &Learner<M>,
    epoch: usize,
    store: &EventStoreClient,
) -> Result<SaveReport> {
    let run = &checkpoints.run;
    let model = learner.model();
    let (to_optimizer, optimizer) = mpsc::channel();
    let (to_schedule, schedule) = mpsc::channel();
    let optimizer = recorded_state(&model, || {
        let (unread, _) = mpsc::channel();
        let mut reader = LearningCheckpointer::new(
            AsyncCheckpointer::new(PassOn::<ModuleRecord>(unread)),
            AsyncCheckpointer::new(PassOn::<OptimizerRecord>(to_optimizer)),
            AsyncCheckpointer::new(PassOn::<LrSchedulerRecord>(to_schedule)),
            Box::new(SaveNow),
        );
        reader.checkpoint(learner, epoch, store);
        // Its threads pass on what they have.
        drop(reader);
        record(&optimizer).into_bytes()
    })?;
    let schedule = record(&schedule).into_bytes().map_err(Error::other)?;
    let state = State::new(run.mesh())
        .with_step(epoch as u64)
        .with_model(MODEL, &model)?
        .with_optimizer(OPTIMIZER, &optimizer)?
        .with_value(SCHEDULE, &schedule.to_vec())?;
    let state = agree_on_success(
        &run.mesh().all()?,
        "train_checkpoint",
        checkpoints.complete(state, epoch, store),
        CheckpointError::of,
    )?;
    // After what the program has drawn.
    run.save(&state.with_rank_value(RANDOM, &rng_state())?)
}

/// Returns the model that the training returns: that of the best checkpoint, or the last one.
///
/// # Collective
/// Every rank of the manager's mesh.
pub(super) fn returned<M: LearnerModel>(checkpoints: &EpochCheckpoints, last: M) -> Result<M> {
    match checkpoints.returned()? {
        Some(checkpoint) => Ok(checkpoint.load_model(MODEL, last, &LoadOptions::new())?.0),
        None => Ok(last),
    }
}

fn record<R>(records: &Receiver<R>) -> R {
    records
        .recv()
        .expect("burn's checkpointer saves a record of each part")
}

/// Checkpointer that passes records on.
struct PassOn<R>(Sender<R>);

impl<R: Checkpoint> Checkpointer<R> for PassOn<R> {
    fn save(&self, _: usize, record: R) -> Result<(), CheckpointerError> {
        // The model's is not received.
        drop(self.0.send(record));
        Ok(())
    }

    fn delete(&self, _: usize) -> Result<(), CheckpointerError> {
        Ok(())
    }

    fn restore(&self, epoch: usize) -> Result<R, CheckpointerError> {
        Err(CheckpointerError::Unknown(format!(
            "the record of epoch {epoch} was not kept"
        )))
    }
}

/// Strategy that saves whenever it is asked.
struct SaveNow;

impl CheckpointingStrategy for SaveNow {
    fn checkpointing(&mut self, _: usize, _: &EventStoreClient) -> Vec<CheckpointingAction> {
        vec![CheckpointingAction::Save]
    }
}
