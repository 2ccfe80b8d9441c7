//! Checkpoints of a training: what is saved, and how a run resumes from it, on the same mesh or
//! another.

use std::time::Instant;

use burn::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;
use burn_dtensor::checkpoint::{CheckpointManager, LoadOptions, State};
use burn_dtensor::optim::ShardedOptimizer;
use burn_dtensor::prelude::*;

use crate::cli::Settings;
use crate::model::Gpt;

/// State of a training between two steps. The batch of a step depends on the seed and the number of
/// the step, which therefore is the position in the data and the state of the random numbers, too.
pub struct Training {
    pub model: Gpt,
    pub optim: ShardedOptimizer,
    pub schedule: ModuleLrScheduler,
    pub scaler: Option<GradScaler>,
    /// Loss of each step so far.
    pub losses: Vec<f32>,
    pub validations: Vec<f32>,
}

/// The folder of `--save`.
pub struct Checkpoints<'a> {
    run: CheckpointManager,
    mesh: &'a DeviceMesh,
    settings: &'a Settings,
}

impl<'a> Checkpoints<'a> {
    /// Opens the folder, if there is to be one.
    ///
    /// # Errors
    /// Without `--resume`, the folder must not contain checkpoints.
    ///
    /// # Collective
    /// Every rank calls it.
    pub fn open(settings: &'a Settings, mesh: &'a DeviceMesh) -> Result<Option<Self>> {
        let Some(folder) = &settings.args.save else {
            return Ok(None);
        };
        let run = CheckpointManager::new(folder, mesh);
        let run = settings
            .args
            .keep
            .map_or(run.clone(), |keep| run.with_keep(keep));
        if !settings.args.resume && !run.steps()?.is_empty() {
            let folder = folder.display();
            return Err(Error::other(format!(
                "{folder} contains checkpoints. Add --resume, or --save to another folder"
            )));
        }
        Ok(Some(Self {
            run,
            mesh,
            settings,
        }))
    }

    /// Returns true if a checkpoint is saved after step `step`, counted from 0.
    pub fn is_saved_after(&self, step: usize) -> bool {
        (step + 1).is_multiple_of(self.settings.args.every) || step + 1 == self.settings.args.steps
    }

    /// Saves the state after `steps` steps. Returns what was saved, as text.
    ///
    /// # Collective
    /// Every rank calls it.
    pub fn save(&self, steps: usize, training: &Training) -> Result<String> {
        let start = Instant::now();
        let Training {
            model,
            optim,
            scaler,
            losses,
            validations,
            ..
        } = training;
        let state = State::new(self.mesh)
            .with_step(steps as u64)
            .with_model("model", model)?
            .with_optimizer("optimizer", &optim.state(model)?)?
            .with_value("scaler", scaler)?
            .with_value("losses", losses)?
            .with_value("validations", validations)?
            .with_value("settings", &self.described())?;
        let report = self.run.save(&state)?;
        Ok(format!(
            "saved {report}, in {:.3} s",
            start.elapsed().as_secs_f64()
        ))
    }

    /// Loads the latest checkpoint, whatever the mesh that saved it, into a training that has not
    /// begun; if there is none, returns it as it is. Also returns the number of steps that were
    /// made, and what was loaded, as text.
    ///
    /// # Collective
    /// Every rank calls it.
    pub fn resume(&self, training: Training) -> Result<(Training, usize, String)> {
        let start = Instant::now();
        let Some(checkpoint) = self.run.latest()? else {
            return Ok((
                training,
                0,
                format!("nothing to resume from in {}", self.run.path().display()),
            ));
        };
        let (model, _) = checkpoint.load_model("model", training.model, &LoadOptions::new())?;
        let (optim, _) = checkpoint.load_optimizer("optimizer", &model, &LoadOptions::new())?;
        let optim = training.optim.load_state(&model, optim)?;
        let losses: Vec<f32> = checkpoint.value("losses")?;
        // The rate depends on the step alone: with other --steps, it is that of the new schedule.
        let mut schedule = training.schedule;
        losses.iter().for_each(|_| drop(schedule.step()));
        let scaler: Option<GradScaler> = checkpoint.value("scaler")?;
        let training = Training {
            model,
            optim,
            schedule,
            scaler: training.scaler.map(|new| scaler.unwrap_or(new)),
            losses,
            validations: checkpoint.value("validations")?,
        };
        let steps = training.losses.len();
        let path = checkpoint.path().display();
        if steps >= self.settings.args.steps {
            let wanted = self.settings.args.steps;
            return Err(Error::other(format!(
                "{path} has {steps} steps, and --steps is {wanted}: none is left to make"
            )));
        }
        let saved = checkpoint.value::<String>("settings")?;
        let now = self.described();
        let other = if saved == now {
            String::new()
        } else {
            format!("\nit was saved with {saved}\nbut this is   {now}")
        };
        if self.settings.args.check && !other.is_empty() {
            let reason = "--check compares with a run that was not interrupted, which needs the settings of the checkpoint";
            return Err(Error::other(format!("{reason}{other}")));
        }
        let bytes = checkpoint.read_stats().read;
        let seconds = start.elapsed().as_secs_f64();
        Ok((
            training,
            steps,
            format!("resumed from {path}: {bytes} bytes read by rank 0, in {seconds:.3} s{other}"),
        ))
    }

    /// Describes what decides about losses and weights, apart from rounding.
    fn described(&self) -> String {
        let Settings {
            args, model, text, ..
        } = self.settings;
        format!(
            "--steps {} --validate-every {} --lr {} --clip {:?} --seed {} --param-dtype {:?} --reduce-dtype {:?}, {} rows, \
             {} batches, {} characters of text, {model:?}",
            args.steps,
            args.validate_every,
            args.lr,
            args.clip,
            args.seed,
            args.param_dtype,
            args.reduce_dtype,
            self.settings.ranks() * args.batch,
            args.accumulate,
            text.len()
        )
    }
}
