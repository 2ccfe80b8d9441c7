//! A save that fails is an error on every rank, and leaves the checkpoint before it.

use std::borrow::Cow;
use std::io::ErrorKind;
use std::path::Path;

use super::states::{RUN, is_saved, manager, state};
use crate::checkpoint::CheckpointError;
use crate::checkpoint::fragments::{FragmentBytes, LiveFragments};
use crate::checkpoint::fs::recorder::{Fault, Recorder};
use crate::checkpoint::fs::{FileSystem, MANIFEST, remove_dir_all, write_atomically};
use crate::checkpoint::open_save::OpenSave;
use crate::checkpoint::region::Region;
use crate::checkpoint::save::write;
use crate::checkpoint::save_plan::{SavePlan, rank_of_file};
use crate::mesh::DeviceMesh;
use crate::prelude::*;

/// Errors of the removal of old checkpoints, or the error of a save.
type Outcome = Result<Vec<CheckpointError>, CheckpointError>;

/// A save that has removed all that is not kept.
const SAVED: Outcome = Ok(Vec::new());

/// Returns the outcomes of both ranks of saving a step, keeping one.
fn save(of_ranks: [&Recorder; 2], step: u64) -> [Outcome; 2] {
    save_keeping(of_ranks, step, 1)
}

/// Returns the outcomes of both ranks of saving a step, keeping everything.
fn save_all(of_ranks: [&Recorder; 2], step: u64) -> [Outcome; 2] {
    save_keeping(of_ranks, step, usize::MAX)
}

fn save_keeping(of_ranks: [&Recorder; 2], step: u64, keep: usize) -> [Outcome; 2] {
    let saved = launch(Launch::threads(2), |world| {
        let mesh = DeviceMesh::new(world, [2], ["shard"])?;
        match manager(of_ranks[mesh.rank()], &mesh)
            .with_keep(keep)
            .save(&state(&mesh, step, 0)?)
        {
            Ok(report) => Ok(Ok(report.not_removed)),
            Err(crate::Error::Checkpoint(error)) => Ok(Err(error)),
            Err(error) => Err(error),
        }
    });
    let outcomes: Vec<_> = saved
        .unwrap()
        .into_iter()
        .map(|(_, outcome)| outcome)
        .collect();
    outcomes.try_into().expect("there are two ranks")
}

/// Loads the latest checkpoint, which must be as it was saved, and returns its step.
fn latest(fs: &Recorder) -> u64 {
    let loaded = launch(Launch::threads(2), |world| {
        let mesh = DeviceMesh::new(world, [2], ["shard"])?;
        let latest = manager(fs, &mesh).latest()?.expect("there is a checkpoint");
        let step = latest.step().expect("it has a step");
        is_saved(&latest, &mesh, 2, step).unwrap();
        Ok(step)
    });
    loaded.unwrap()[0].1
}

/// Returns the names in the run's folder.
fn names(fs: &Recorder) -> Vec<String> {
    fs.list(Path::new(RUN))
        .unwrap()
        .into_iter()
        .map(|entry| entry.name)
        .collect()
}

/// The disk is full, read-only, broken or gone from any call on, or for one call, on one rank or
/// the other. If that is while an old checkpoint is removed, the new one is saved, and the next
/// save removes the rest of the old one.
#[test]
fn an_error_at_any_call_is_returned_by_every_rank_and_the_last_checkpoint_remains() {
    let start = Recorder::new();
    assert_eq!(save([&start; 2], 1), [SAVED; 2]);
    let mut failed = 0;
    let mut saved = 0;
    let mut not_removed = 0;
    for kind in [
        ErrorKind::StorageFull,
        ErrorKind::ReadOnlyFilesystem,
        ErrorKind::Other,
        ErrorKind::NotFound,
    ] {
        for lasting in [false, true] {
            for call in 0.. {
                let fs = start.durable_copy();
                fs.fail(Fault {
                    call,
                    kind,
                    lasting,
                });
                let [first, second] = save([&fs; 2], 2);
                assert_eq!(first, second, "{kind} at call {call}");
                let is_over = fs.calls() <= call;
                fs.heal();
                match &first {
                    Ok(errors) => {
                        saved += 1;
                        not_removed += usize::from(!errors.is_empty());
                        let is_named = |error: &CheckpointError| matches!(error, CheckpointError::Io { rank: 0, path, .. } if path.starts_with(RUN));
                        assert!(
                            errors.iter().all(is_named),
                            "{kind} at call {call}: {errors:?}"
                        );
                        // A run's folder that is not found has no old checkpoints.
                        let is_clean =
                            names(&fs) == ["latest", "step-2"] || kind == ErrorKind::NotFound;
                        assert!(is_clean || !errors.is_empty(), "{kind} at call {call}");
                    }
                    Err(CheckpointError::Io { .. }) => failed += 1,
                    // A file that is not found is how another folder is recognized.
                    Err(CheckpointError::NotShared { .. } | CheckpointError::Replaced { .. })
                        if kind == ErrorKind::NotFound =>
                    {
                        failed += 1;
                    }
                    Err(error) => panic!("{kind} at call {call}: {error}"),
                }
                let steps = [latest(&fs), latest(&fs.lose_pending())];
                let is_right = |step: u64| {
                    if first.is_ok() {
                        step == 2
                    } else {
                        [1, 2].contains(&step)
                    }
                };
                assert!(
                    steps.into_iter().all(is_right),
                    "{kind} at call {call}: {steps:?}"
                );
                assert_eq!(save([&fs; 2], 3), [SAVED; 2], "{kind} at call {call}");
                assert_eq!(latest(&fs.lose_pending()), 3);
                assert!(
                    first.is_err() || names(&fs) == ["latest", "step-3"],
                    "{kind} at call {call}: {:?}",
                    names(&fs)
                );
                if is_over {
                    break;
                }
            }
        }
    }
    assert!(
        not_removed > 20,
        "{not_removed} saves did not remove the old checkpoint"
    );
    println!(
        "{failed} errors were returned, {saved} saves succeeded, {not_removed} of them without removing the last"
    );
}

#[test]
fn two_folders_of_one_name_are_found_before_a_byte_is_written() {
    let of_ranks = [Recorder::new(), Recorder::new()];
    let path = Path::new(RUN).join("step-1");
    let expected: Outcome = Err(CheckpointError::NotShared {
        path: path.clone(),
        rank: 1,
        of: 0,
    });
    assert_eq!(
        save([&of_ranks[0], &of_ranks[1]], 1),
        [expected.clone(), expected]
    );
    for fs in &of_ranks {
        assert_eq!(fs.list(&path).unwrap_err().kind(), ErrorKind::NotFound);
    }
    assert_eq!(of_ranks[1].steps(), 0, "rank 1 has changed nothing");
}

/// A checkpoint that was complete when the program was killed, before `latest` named it, is the
/// latest: a training that resumed before it would come to the same step again, and could not save
/// it.
#[test]
fn what_was_complete_before_latest_moved_is_the_latest() {
    let fs = Recorder::new();
    for step in [1, 2, 3] {
        assert_eq!(save_all([&fs; 2], step), [SAVED; 2]);
    }
    let name = |step: u64| {
        write_atomically(
            &fs,
            Path::new("/run/latest"),
            format!("step-{step}").as_bytes(),
        )
        .unwrap()
    };
    name(2);
    assert_eq!(latest(&fs), 3);
    name(1);
    assert_eq!(latest(&fs), 2);
    // The run is set back to 1, and saves another 2, which 3 does not follow. It differs in what
    // was the latest before it.
    remove_dir_all(&fs, Path::new("/run/step-2")).unwrap();
    assert_eq!(latest(&fs), 1);
    fs.remove_file(Path::new("/run/latest")).unwrap();
    assert_eq!(save_all([&fs; 2], 2), [SAVED; 2]);
    assert_eq!(latest(&fs), 2);
    write_atomically(&fs, Path::new("/run/latest"), b"step-2\n").unwrap();
    assert_eq!(latest(&fs), 2);
    // Of a run that is set back, what it saved after that step is removed first.
    assert_eq!(save_keeping([&fs; 2], 4, 3), [SAVED; 2]);
    name(1);
    assert_eq!(save_keeping([&fs; 2], 5, 3), [SAVED; 2]);
    let steps = || {
        fs.list(Path::new("/run"))
            .unwrap()
            .into_iter()
            .filter(|entry| entry.is_dir)
            .map(|entry| entry.name)
    };
    assert_eq!(steps().collect::<Vec<_>>(), ["step-3", "step-4", "step-5"]);
    remove_dir_all(&fs, Path::new("/run/step-3")).unwrap();
    assert_eq!(save_keeping([&fs; 2], 3, 3), [SAVED; 2]);
    assert_eq!(steps().collect::<Vec<_>>(), ["step-3", "step-4", "step-5"]);
    assert_eq!(save_keeping([&fs; 2], 2, 2), [SAVED; 2]);
    assert_eq!(steps().collect::<Vec<_>>(), ["step-2", "step-5"]);
    assert_eq!(latest(&fs), 2);
    assert_eq!(save_keeping([&fs; 2], 3, 2), [SAVED; 2]);
    assert_eq!(steps().collect::<Vec<_>>(), ["step-2", "step-3"]);
}

/// A manifest that could not be read again is not written.
#[test]
fn a_manifest_above_the_limit_is_an_error_of_every_rank_and_leaves_nothing() {
    let fs = Recorder::new();
    let errors = launch(Launch::threads(2), |world| {
        let mesh = DeviceMesh::new(world, [2], ["shard"])?;
        let state = state(&mesh, 1, 0)?;
        let mut plan = SavePlan::new(&state)?;
        plan.limit = 300;
        match write(
            &fs,
            Path::new("/run/step-1"),
            plan,
            &mut LiveFragments::new(&state),
            None,
        ) {
            Err(crate::Error::Checkpoint(CheckpointError::ManifestSize { bytes, limit: 300 })) => {
                Ok(bytes)
            }
            other => panic!("{other:?}"),
        }
    });
    let bytes: Vec<_> = errors
        .unwrap()
        .into_iter()
        .map(|(_, bytes)| bytes)
        .collect();
    assert!(bytes[0] == bytes[1] && bytes[0] > 300, "{bytes:?}");
    assert_eq!(names(&fs), [""; 0]);
    assert_eq!(save([&fs; 2], 1), [SAVED; 2]);
}

/// Another program that saves under the same name takes the files for debris.
#[test]
fn two_programs_that_save_under_one_name_do_not_mix_their_files() {
    let fs = Recorder::new();
    /// Runs another save before the first bytes.
    struct Interrupted<'a>(LiveFragments<'a>, Option<Box<dyn FnOnce() + 'a>>);
    impl FragmentBytes for Interrupted<'_> {
        fn bytes(&mut self, key: &str, region: &Region) -> Cow<'_, [u8]> {
            self.1.take().into_iter().for_each(|other| other());
            self.0.bytes(key, region)
        }
    }
    let saved = launch(Launch::threads(1), |world| {
        let mesh = DeviceMesh::new(world, [1], ["shard"])?;
        let [state, others] = [0, 1].map(|variant| state(&mesh, 1, variant));
        let state = state?;
        let others = others?;
        let path = Path::new("/run/step-1");
        let other = || {
            let plan = SavePlan::new(&others).unwrap();
            write(&fs, path, plan, &mut LiveFragments::new(&others), None).unwrap();
        };
        let mut bytes = Interrupted(LiveFragments::new(&state), Some(Box::new(other)));
        let error = write(&fs, path, SavePlan::new(&state)?, &mut bytes, None)
            .map(drop)
            .unwrap_err();
        Ok(error.to_string())
    });
    let error = &saved.unwrap()[0].1;
    assert!(
        error.contains("another program saved into /run/step-1 at the same time"),
        "{error}"
    );
    // The other program's checkpoint is complete, and its own.
    assert_eq!(saved_alone(&fs), (1, 1));
}

/// Returns a value of the checkpoint that one rank saved as step 1.
fn saved_alone(fs: &Recorder) -> (u64, u64) {
    let value = launch(Launch::threads(1), |world| {
        let mesh = DeviceMesh::new(world, [1], ["shard"])?;
        manager(fs, &mesh).open(1)?.value("epoch")
    });
    value.unwrap()[0].1
}

/// As when a program hangs, and another takes its place.
#[test]
fn a_save_that_fails_late_leaves_what_another_has_saved_under_its_name() {
    for fails_by in ["a file that is there", "a write"] {
        let fs = Recorder::new();
        launch(Launch::threads(1), |world| {
            let mesh = DeviceMesh::new(world, [1], ["shard"])?;
            let [state, others] = [0, 1].map(|variant| state(&mesh, 1, variant));
            let state = state?;
            let others = others?;
            let path = Path::new("/run/step-1");
            let save = OpenSave::begin(&fs, path, SavePlan::new(&state)?)?;
            write(
                &fs,
                path,
                SavePlan::new(&others)?,
                &mut LiveFragments::new(&others),
                None,
            )?;
            let written = match fails_by {
                "a write" => Err(CheckpointError::io(
                    0,
                    "write",
                    path,
                    &ErrorKind::StorageFull.into(),
                )),
                _ => save.write_fragments(&fs, &mut LiveFragments::new(&state)),
            };
            assert!(save.gather(&fs, written).is_err(), "{fails_by}");
            Ok(())
        })
        .unwrap();
        assert_eq!(saved_alone(&fs), (1, 1), "{fails_by}");
    }
}

/// To another program that removes old checkpoints, whichever call the save has come to.
#[test]
fn a_save_is_not_taken_for_the_rest_of_a_removal() {
    let start = Recorder::new();
    assert_eq!(save([&start; 2], 1), [SAVED; 2]);
    let folder = Path::new(RUN).join("step-2");
    let files = |fs: &Recorder| fs.list(&folder).unwrap_or_default();
    let mut with_files = 0;
    for call in 0.. {
        let fs = start.durable_copy();
        fs.fail(Fault {
            call,
            kind: ErrorKind::Other,
            lasting: true,
        });
        let _ = save([&fs; 2], 2);
        fs.heal();
        let before = files(&fs);
        if before.iter().any(|file| file.name == MANIFEST) {
            break;
        }
        let removed = launch(Launch::threads(1), |world| {
            let mesh = DeviceMesh::new(world, [1], ["shard"])?;
            Ok(manager(&fs, &mesh).with_keep(1).commit(&fs, 1)?)
        });
        assert_eq!(removed.unwrap()[0].1, []);
        if before.iter().any(|file| rank_of_file(&file.name).is_some()) {
            assert_eq!(files(&fs), before, "call {call}");
            with_files += 1;
        }
    }
    assert!(with_files > 5, "{with_files}");
}
