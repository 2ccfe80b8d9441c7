//! A save that fails is an error on every rank, and leaves the checkpoint before it.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::states::{RUN, is_saved, manager, state};
use crate::checkpoint::claim::{ABANDONED_AFTER, Claim};
use crate::checkpoint::fragments::LiveFragments;
use crate::checkpoint::fs::recorder::{Fault, Recorder};
use crate::checkpoint::fs::{FileSystem, write_atomically};
use crate::checkpoint::open_save::OpenSave;
use crate::checkpoint::run_folder::saving;
use crate::checkpoint::save::write;
use crate::checkpoint::save_plan::SavePlan;
use crate::checkpoint::{Best, CheckpointError, State};
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
                        // What is not found counts as removed.
                        let is_clean = names(&fs) == ["step-2"] || kind == ErrorKind::NotFound;
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
                    names(&fs) == ["step-3"],
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
fn an_old_checkpoint_of_which_nothing_can_be_removed_stays_one() {
    let start = Recorder::new();
    assert_eq!(save([&start; 2], 1), [SAVED; 2]);
    let (mut stayed, mut in_part) = (0, 0);
    for call in 0.. {
        let fs = start.durable_copy();
        fs.fail(Fault {
            call,
            kind: ErrorKind::PermissionDenied,
            lasting: false,
        });
        let [first, _] = save([&fs; 2], 2);
        let is_over = fs.calls() <= call;
        fs.heal();
        for error in first.unwrap_or_default() {
            let CheckpointError::Io { path, reason, .. } = error else {
                panic!("{error}")
            };
            let named = names(&fs).into_iter().map(|name| Path::new(RUN).join(name));
            let Some(named) = named.into_iter().find(|named| path.starts_with(named)) else {
                assert_eq!(path, Path::new(RUN), "the error names what is there");
                continue;
            };
            match named.ends_with("step-1") {
                // A file in it could not be removed: it had the name of a removal, and has its own again.
                true if reason.contains("manifest.json") => {
                    stayed += usize::from(is_complete(&fs, 1))
                }
                true => {}
                false => in_part += 1,
            }
        }
        if is_over {
            break;
        }
    }
    assert!(
        stayed > 0 && in_part > 1,
        "{stayed} stayed, {in_part} in part"
    );
}

/// Returns true if the checkpoint of a step loads as it was saved.
fn is_complete(fs: &Recorder, step: u64) -> bool {
    let loaded = launch(Launch::threads(2), |world| {
        let mesh = DeviceMesh::new(world, [2], ["shard"])?;
        let saved = manager(fs, &mesh).open(step)?;
        Ok(is_saved(&saved, &mesh, 2, step).is_ok())
    });
    loaded.is_ok_and(|ranks| ranks[0].1)
}

/// Saves a step with the value `loss` and keeps the last and the best. Returns the outcome.
fn save_with_loss(fs: &Recorder, step: u64, loss: f64) -> Outcome {
    save_with(fs, step, |state| state.with_value("loss", &loss))
}

fn save_with(fs: &Recorder, step: u64, add: impl Fn(State) -> Result<State> + Sync) -> Outcome {
    let saved = launch(Launch::threads(2), |world| {
        let mesh = DeviceMesh::new(world, [2], ["shard"])?;
        let run = manager(fs, &mesh).with_keep(1);
        let run = run.with_best("loss", Best::Lowest);
        let state = State::new(&mesh).with_step(step);
        match run.save(&add(state)?) {
            Ok(report) => Ok(Ok(report.not_removed)),
            Err(crate::Error::Checkpoint(error)) => Ok(Err(error)),
            Err(error) => Err(error),
        }
    });
    saved.unwrap().swap_remove(0).1
}

/// Returns the step of the best checkpoint.
fn best(fs: &Recorder, best: Best) -> Option<u64> {
    let steps = launch(Launch::threads(2), |world| {
        let mesh = DeviceMesh::new(world, [2], ["shard"])?;
        let found = manager(fs, &mesh).best("loss", best)?;
        Ok(found.map(|found| found.step().expect("it has a step")))
    });
    steps.unwrap().swap_remove(1).1
}

#[test]
fn the_best_checkpoint_is_kept_whatever_cannot_be_read() {
    let fs = Recorder::new();
    assert_eq!(best(&fs, Best::Lowest), None);
    for (step, loss, kept) in [
        (1, f64::NAN, &["step-1"][..]),
        (2, f64::INFINITY, &["step-2"]),
        (3, 0.5, &["step-3"]),
        (4, 0.5, &["step-3", "step-4"]),
        (5, -0.5, &["step-5"]),
        (6, f64::NAN, &["step-5", "step-6"]),
    ] {
        assert_eq!(save_with_loss(&fs, step, loss), SAVED);
        assert_eq!(names(&fs), kept, "step {step}");
    }
    assert_eq!(best(&fs, Best::Lowest), Some(5));
    assert_eq!(best(&fs, Best::Highest), Some(5));
    // Without a value that can be compared, the best could not be kept.
    assert!(matches!(
        save_with(&fs, 7, Ok),
        Err(CheckpointError::NoValue { .. })
    ));
    let integer = save_with(&fs, 7, |state| state.with_value("loss", &1_u64));
    assert!(matches!(integer, Err(CheckpointError::Value { .. })));
    assert_eq!(names(&fs), ["step-5", "step-6"]);
    for call in 0.. {
        let fs = fs.durable_copy();
        fs.fail(Fault {
            call,
            kind: ErrorKind::Other,
            lasting: false,
        });
        let outcome = save_with_loss(&fs, 7, 0.1);
        let is_over = fs.calls() <= call;
        fs.heal();
        assert_eq!(best(&fs, Best::Lowest), Some(5), "{outcome:?}");
        if is_over {
            break;
        }
    }
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
    assert_eq!(names(&of_ranks[0]), [""; 0]);
    assert_eq!(of_ranks[1].steps(), 0, "rank 1 has changed nothing");
}

/// Returns the error of the latest checkpoint.
fn latest_error(fs: &Recorder) -> CheckpointError {
    let errors = launch(Launch::threads(2), |world| {
        let mesh = DeviceMesh::new(world, [2], ["shard"])?;
        match manager(fs, &mesh).latest() {
            Err(crate::Error::Checkpoint(error)) => Ok(error),
            other => panic!("{other:?}"),
        }
    });
    errors.unwrap().swap_remove(1).1
}

/// Sets the run back, and returns the names of what was set aside.
fn set_back(fs: &Recorder, step: u64) -> Result<Vec<String>, CheckpointError> {
    let outcomes = launch(Launch::threads(2), |world| {
        let mesh = DeviceMesh::new(world, [2], ["shard"])?;
        match manager(fs, &mesh).set_back(step) {
            Ok(aside) => Ok(Ok(aside)),
            Err(crate::Error::Checkpoint(error)) => Ok(Err(error)),
            Err(error) => Err(error),
        }
    });
    let mut outcomes = outcomes.unwrap();
    assert_eq!(outcomes[0].1, outcomes[1].1);
    let aside = outcomes.swap_remove(0).1?.into_iter();
    let name = |path: PathBuf| path.strip_prefix(RUN).unwrap().display().to_string();
    Ok(aside.map(name).collect())
}

/// Writes a file `latest`, as earlier versions do and people who want to go back.
fn name_latest(fs: &Recorder, content: &str) {
    write_atomically(fs, &Path::new(RUN).join("latest"), content.as_bytes()).unwrap();
}

#[test]
fn a_file_latest_that_does_not_name_the_newest_checkpoint_is_an_error_that_says_how_to_go_back() {
    let fs = Recorder::new();
    for step in [10, 20, 30] {
        assert_eq!(save_all([&fs; 2], step), [SAVED; 2]);
    }
    assert_eq!(latest(&fs), 30);
    // Of an earlier version.
    name_latest(&fs, "step-30\n");
    assert_eq!(latest(&fs), 30);
    for content in ["step-10", "step-40", "", "\0\0\0", &"step-30 ".repeat(20)] {
        name_latest(&fs, content);
        let error = latest_error(&fs);
        let is_expected = matches!(
            &error,
            CheckpointError::LatestFile { newest: Some(30), path, .. } if *path == Path::new("/run/latest")
        );
        assert!(is_expected, "{content}: {error}");
        assert!(error.to_string().contains("set_back"), "{error}");
        // Nor is anything saved.
        let [first, second] = save_all([&fs; 2], 40);
        assert_eq!((&first, &second), (&Err(error.clone()), &Err(error)));
    }
    assert_eq!(
        set_back(&fs, 15),
        Err(CheckpointError::Incomplete {
            path: "/run/step-15".into()
        })
    );
    name_latest(&fs, "step-10");
    assert_eq!(
        set_back(&fs, 10),
        Ok(vec!["step-30.set-aside".into(), "step-20.set-aside".into()])
    );
    assert_eq!(latest(&fs), 10);
    assert_eq!(
        names(&fs),
        ["step-10", "step-20.set-aside", "step-30.set-aside"]
    );
    // Of a run of an earlier version, the next save removes it.
    name_latest(&fs, "step-10");
    assert_eq!(save_keeping([&fs; 2], 20, 1), [SAVED; 2]);
    assert_eq!(latest(&fs), 20);
    assert_eq!(
        names(&fs),
        ["step-20", "step-20.set-aside", "step-30.set-aside"],
        "nothing removes what was set aside"
    );
    // The step that `latest` names is not there.
    name_latest(&fs, "step-10");
    assert_eq!(set_back(&fs, 20), Ok(vec![]));
    assert_eq!(latest(&fs), 20);
}

#[test]
fn a_step_below_the_newest_is_saved_only_after_the_run_was_set_back() {
    let fs = Recorder::new();
    for step in [10, 20, 30] {
        assert_eq!(save_all([&fs; 2], step), [SAVED; 2]);
    }
    let later: Outcome = Err(CheckpointError::LaterStep {
        path: RUN.into(),
        step: 12,
        later: 30,
    });
    let [first, second] = save_all([&fs; 2], 12);
    assert!(first.as_ref().unwrap_err().to_string().contains("set_back"));
    assert_eq!([first, second], [later.clone(), later]);
    assert_eq!(names(&fs), ["step-10", "step-20", "step-30"]);
    assert_eq!(set_back(&fs, 10).unwrap().len(), 2);
    assert_eq!(save_all([&fs; 2], 12), [SAVED; 2]);
    // A second time, under another name.
    assert_eq!(save_all([&fs; 2], 20), [SAVED; 2]);
    assert_eq!(set_back(&fs, 12), Ok(vec!["step-20.set-aside-2".into()]));
    assert_eq!(latest(&fs), 12);
}

#[test]
fn what_killed_saves_of_an_earlier_version_left_is_removed_by_later_saves() {
    let fs = Recorder::new();
    assert_eq!(save_all([&fs; 2], 5), [SAVED; 2]);
    let leave = |step: u64, files: &[&str]| {
        let folder = Path::new(RUN).join(format!("step-{step}"));
        fs.create_dir(&folder).unwrap();
        for file in files {
            fs.create(&folder.join(file)).unwrap();
        }
    };
    leave(3, &[]);
    leave(6, &["rank-00000.safetensors"]);
    leave(7, &["probe-0123456789abcdef", "rank-00000.safetensors"]);
    leave(8, &["manifest.json.tmp", "probe-0123456789abcdef"]);
    leave(9, &["rank-00001.safetensors", "notes.txt"]);
    leave(11, &["probe-0123456789abcdef"]);
    // Of a person, who has given it a name like those of removals.
    fs.create_dir(&Path::new(RUN).join("step-4.removing-lr-decay"))
        .unwrap();
    leave(2, &["rank-0.safetensors"]);
    let left = [
        "step-10",
        "step-11",
        "step-2",
        "step-4.removing-lr-decay",
        "step-5",
        "step-9",
    ];
    assert_eq!(latest(&fs), 5);
    assert_eq!(save_all([&fs; 2], 10), [SAVED; 2]);
    assert_eq!(
        names(&fs),
        left,
        "files of others remain, and what another version may be saving"
    );
    // Its own name is free.
    assert_eq!(save_all([&fs; 2], 11), [SAVED; 2]);
    assert_eq!(names(&fs), left);
    assert_eq!(latest(&fs), 11);
}

/// A save of another host may still be written: no one here knows.
#[test]
fn a_save_of_another_host_is_reported_and_removed_a_day_later() {
    let fs = Recorder::new();
    let claim = Claim::of_another_host(Duration::ZERO);
    let young = saving(&Path::new(RUN).join("step-1"), claim);
    let later = saving(&Path::new(RUN).join("step-9"), claim);
    let old = Claim::of_another_host(ABANDONED_AFTER * 2);
    let old = saving(&Path::new(RUN).join("step-1"), old);
    for folder in [&young, &later, &old] {
        fs.create_dir_all(folder).unwrap();
    }
    let reported: Outcome = Ok(vec![CheckpointError::MaybeLive {
        path: young.clone(),
        process: claim.process(),
        hours: 24,
    }]);
    let expected = [reported.clone(), reported];
    assert_eq!(save_all([&fs; 2], 2), expected);
    let mut left = names(&fs);
    left.retain(|name| name != "step-2");
    let name = |path: &Path| path.file_name().unwrap().to_str().unwrap().to_owned();
    assert_eq!(left, [name(&young), name(&later)]);
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
    for fails_by in ["a name that is taken", "a write"] {
        let fs = Recorder::new();
        launch(Launch::threads(1), |world| {
            let mesh = DeviceMesh::new(world, [1], ["shard"])?;
            let [state, others] = [0, 1].map(|variant| state(&mesh, 1, variant));
            let state = state?;
            let others = others?;
            let path = Path::new("/run/step-1");
            let save = OpenSave::begin(&fs, path, SavePlan::new(&state)?, None)?;
            write(
                &fs,
                path,
                SavePlan::new(&others)?,
                &mut LiveFragments::new(&others),
                None,
            )?;
            if fails_by == "a write" {
                let error = ErrorKind::StorageFull.into();
                let failed = Err(CheckpointError::io(0, "write", path, &error));
                assert!(save.gather(&fs, failed).is_err());
            } else {
                let written = save.write_fragments(&fs, &mut LiveFragments::new(&state));
                let written = save.gather(&fs, written)?;
                let error = save.commit(&fs, written, None).unwrap_err();
                assert_eq!(error, CheckpointError::Exists { path: path.into() });
            }
            Ok(())
        })
        .unwrap();
        assert_eq!(names(&fs), ["step-1"], "{fails_by}");
        assert_eq!(saved_alone(&fs), (1, 1), "{fails_by}");
    }
}
