//! A process that is killed while it saves: what it saved before loads, and is what it was.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use burn::tensor::{Distribution, Tensor, TensorData};
use burn_dtensor::Result;
use burn_dtensor::checkpoint::{AsyncCheckpointer, CheckpointManager, State};
use burn_dtensor::comm::{Launch, launch};
use burn_dtensor::dtensor::DTensor;
use burn_dtensor::mesh::DeviceMesh;
use burn_dtensor::placement::Placement::{Replicate, Shard};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::folder::Folder;
use crate::effort::setting;
use crate::launched;
use crate::logged::warnings;

/// Folder of the process that is killed; not set in the process that kills.
const FOLDER: &str = "BURN_DTENSOR_KILLED";
const NAME: &str = "checkpoint::killed::what_was_saved_before_a_process_is_killed_loads";
const SHAPE: [usize; 2] = [301, 67];

/// The tensor of a step.
fn values(step: u64) -> TensorData {
    let value = |at: usize| (at as u64 * 2_654_435_761 + step * 97) as f32;
    TensorData::new((0..SHAPE[0] * SHAPE[1]).map(value).collect(), SHAPE)
}

fn manager(folder: &Path, mesh: &DeviceMesh) -> CheckpointManager {
    CheckpointManager::new(folder, mesh).with_keep(2)
}

fn state(mesh: &DeviceMesh, step: u64) -> Result<State> {
    let full = Tensor::<2>::from_data(values(step), mesh.device());
    let mut state = State::new(mesh).with_step(step).with_value("step", &step)?;
    for (key, placements) in [
        ("rows", [Replicate, Shard(0)]),
        ("columns", [Shard(1), Shard(0)]),
        ("all", [Replicate; 2]),
    ] {
        let tensor = DTensor::distribute_replicated(full.clone(), mesh, &placements)?;
        state = state.with_tensor(key, &tensor)?;
    }
    Ok(state)
}

/// Saves one checkpoint after the other, until the process is killed. Reports each by a file, after
/// the call returned.
fn save_until_killed(folder: &Path) {
    let saved = launch(Launch::threads(4), |world| {
        let mesh = DeviceMesh::new(world, [2, 2], ["a", "b"])?;
        let manager = manager(folder, &mesh);
        let first = manager
            .latest()?
            .map_or(1, |checkpoint| checkpoint.step().unwrap() + 1);
        let mut behind = AsyncCheckpointer::new(manager.clone())?;
        let returned = |step: u64| match world.rank() {
            0 => fs::write(folder.join("returned"), step.to_string()),
            _ => Ok(()),
        };
        for step in first.. {
            if step % 3 == 0 {
                behind.save(&state(&mesh, step)?)?;
                continue;
            }
            behind.finish()?.map_or(Ok(()), |_| returned(step - 1))?;
            manager.save(&state(&mesh, step)?)?;
            returned(step)?;
        }
        Ok(())
    });
    panic!("it was not killed: {:?}", saved.map(drop));
}

/// Loads the latest checkpoint on other ranks, and returns its step.
fn check(folder: &Path) -> Option<u64> {
    let steps = launch(Launch::threads(3), |world| {
        let mesh = DeviceMesh::new(world, [3], ["shard"])?;
        let Some(checkpoint) = manager(folder, &mesh).latest()? else {
            return Ok(None);
        };
        let step = checkpoint.step().expect("it was saved with a step");
        assert_eq!(checkpoint.value::<u64>("step")?, step);
        let empty = Tensor::<2>::zeros(SHAPE, mesh.device());
        for key in ["rows", "columns", "all"] {
            let like = DTensor::distribute_replicated(empty.clone(), &mesh, &[Shard(0)])?;
            assert_eq!(
                checkpoint
                    .load_tensor(key, &like)?
                    .full_tensor()?
                    .into_data(),
                values(step),
                "{key} of {step}"
            );
        }
        Ok(Some(step))
    });
    launched::values(steps.unwrap_or_else(|error| panic!("{error}"))).remove(0)
}

#[test]
fn what_was_saved_before_a_process_is_killed_loads() {
    if let Some(folder) = env::var_os(FOLDER) {
        return save_until_killed(&PathBuf::from(folder));
    }
    let times = setting("KILLED_SAVES", 15);
    let seed = setting("KILLED_SAVES_FROM", 0);
    let mut rng = StdRng::seed_from_u64(seed);
    let folder = env::temp_dir().join(format!("burn-dtensor-killed-{}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    let mut latest = None;
    for time in 0..times {
        let mut program = Command::new(env::current_exe().unwrap());
        program
            .args([NAME, "--exact", "--nocapture"])
            .env(FOLDER, &folder)
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        let mut program = program.spawn().unwrap();
        // It has saved at least once when it is killed; at what moment is left to chance.
        let returned = || {
            fs::read_to_string(folder.join("returned"))
                .ok()
                .and_then(|step| step.parse::<u64>().ok())
        };
        while returned() <= latest {
            assert!(
                program.try_wait().unwrap().is_none(),
                "it ends only when it is killed"
            );
            thread::sleep(Duration::from_millis(1));
        }
        thread::sleep(Duration::from_micros(rng.random_range(0..20_000)));
        program.kill().unwrap();
        program.wait().unwrap();
        let returned = returned();
        let found = check(&folder);
        assert!(
            found >= returned,
            "killed {time} times: {found:?} is loaded, but {returned:?} was saved (seed {seed})"
        );
        latest = found;
    }
    println!(
        "killed {times} times, {} checkpoints",
        latest.unwrap_or_default()
    );
    fs::remove_dir_all(folder).unwrap();
}

/// What is written behind training is what the state was, not what it is by then.
#[test]
fn what_is_saved_behind_training_is_the_state_of_the_call() {
    let folder = env::temp_dir().join(format!("burn-dtensor-behind-{}", std::process::id()));
    let reports = launch(Launch::threads(4), |world| {
        let mesh = DeviceMesh::new(world, [2, 2], ["a", "b"])?;
        let mut behind = AsyncCheckpointer::new(manager(&folder, &mesh))?;
        let first = behind.save(&state(&mesh, 1)?)?;
        assert_eq!(first.previous, None);
        let mut bytes = vec![first.bytes];
        for step in 2..5 {
            // The tensors of the state before were dropped, and their memory is used by others.
            let _noise = Tensor::<2>::random(SHAPE, Distribution::Default, mesh.device());
            let report = behind.save(&state(&mesh, step)?)?;
            assert!(report.previous.is_some());
            bytes.push(report.bytes);
        }
        // Without waiting, too, it is complete some time.
        let done = loop {
            if let Some(done) = behind.poll()? {
                break done;
            }
        };
        assert!(
            done.path.ends_with("step-4") && behind.poll()?.is_none() && behind.finish()?.is_none()
        );
        Ok(bytes.into_iter().sum::<u64>())
    });
    // Each of the tensors is written once.
    let full = 3 * 4 * (SHAPE[0] * SHAPE[1] * 4) as u64;
    assert_eq!(
        reports
            .unwrap()
            .into_iter()
            .map(|(_, bytes)| bytes)
            .sum::<u64>(),
        full
    );
    assert_eq!(check(&folder), Some(4));
    fs::remove_dir_all(folder).unwrap();
}

/// A failure behind training is returned by the next call, on all ranks; the call after it saves.
#[test]
fn a_failure_behind_training_is_the_next_calls_error() {
    let folder = env::temp_dir().join(format!("burn-dtensor-failing-{}", std::process::id()));
    launch(Launch::threads(3), |world| {
        let mesh = DeviceMesh::new(world, [3], ["shard"])?;
        let full = Tensor::<2>::from_data(values(1), mesh.device());
        let tensor = DTensor::distribute_replicated(full, &mesh, &[Shard(0)])?;
        let state = |step| {
            State::new(&mesh)
                .with_step(step)
                .with_tensor("tensor", &tensor)
        };
        let mut behind = AsyncCheckpointer::new(manager(&folder, &mesh))?;
        behind.save(&state(1)?)?;
        // As a person may who removes what is taken for debris.
        if mesh.rank() == 0 {
            let entries = fs::read_dir(&folder)?.map(|entry| entry.unwrap().path());
            let is_saving = |path: &PathBuf| path.to_str().unwrap().contains("step-1.saving-");
            let saving = entries.into_iter().find(is_saving);
            fs::remove_dir_all(saving.expect("the checkpoint is not complete"))?;
        }
        let refused = behind.save(&state(2)?).unwrap_err().to_string();
        assert!(refused.contains("another program removed"), "{refused}");
        behind.save(&state(2)?)?;
        behind.finish()?;
        assert_eq!(behind.manager().steps()?, [2]);
        Ok(())
    })
    .unwrap();
    fs::remove_dir_all(folder).unwrap();
}

/// The checkpoint is lost on every rank, even if all files are written.
#[test]
fn a_checkpointer_that_is_dropped_before_its_checkpoint_is_complete_warns() {
    let folder = Folder::new("dropped");
    let warned = warnings("the checkpoint of step 7000", || {
        let end = launch(Launch::threads(4), |world| {
            let mesh = DeviceMesh::new(world, [2, 2], ["a", "b"])?;
            let mut behind = AsyncCheckpointer::new(manager(&folder, &mesh))?;
            behind.save(&state(&mesh, 70_001)?)?;
            behind.finish()?;
            behind.save(&state(&mesh, 70_002)?)?;
            drop(behind);
            assert_eq!(manager(&folder, &mesh).steps()?, [70_001]);
            Ok(())
        });
        end.unwrap();
    });
    let expected = "the checkpoint of step 70002 may not be complete: call \
                    `AsyncCheckpointer::finish` at the end of the training";
    assert_eq!(warned, [expected; 4]);
}
