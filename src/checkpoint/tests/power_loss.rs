//! A loss of power, after any step of any sequence of calls, leaves checkpoints that load.

use std::collections::BTreeSet;
use std::io::ErrorKind;

use itertools::Itertools;

use super::checker::{Expected, folder, on_one_rank};
use super::states::{manager, state};
use crate::checkpoint::fragments::LiveFragments;
use crate::checkpoint::fs::FileSystem;
use crate::checkpoint::fs::recorder::{Crash, Fault, Recorder, Skipped};
use crate::checkpoint::save::write;
use crate::checkpoint::save_plan::SavePlan;
use crate::checkpoint::{AsyncCheckpointer, CheckpointError};
use crate::mesh::DeviceMesh;
use crate::prelude::*;

/// One call of a training program.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Call {
    /// Saves the next step.
    Save,
    /// Saves the next step as a checkpoint that is of no run.
    SaveAlone,
    /// As `Save`, behind training. It has returned when the next call begins.
    SaveAsync,
    /// Saves other values under the name of the last step, which is an error.
    SaveTaken,
    /// Saves the next step and removes the others.
    SaveAndPrune,
    /// Removes all steps but the last.
    Prune,
    /// Sets the run back to the first step.
    SetBack,
}

/// The calls that a program may begin with.
const SAVES: [Call; 4] = [
    Call::Save,
    Call::SaveAlone,
    Call::SaveAsync,
    Call::SaveAndPrune,
];
const CALLS: [Call; 7] = [
    Call::Save,
    Call::SaveAlone,
    Call::SaveAsync,
    Call::SaveTaken,
    Call::SaveAndPrune,
    Call::Prune,
    Call::SetBack,
];

impl Expected {
    /// Returns what is expected once a call has returned.
    pub fn after(&self, call: Call) -> Self {
        let next = self.last() + 1;
        let last = self.last();
        let and_next = || self.saved.iter().copied().chain([next]).collect();
        let only = |step| Self::new(vec![step], [Some(step)]);
        match call {
            Call::Save | Call::SaveAlone | Call::SaveAsync => Self::new(and_next(), [Some(next)]),
            Call::SaveTaken => self.clone(),
            Call::SaveAndPrune => only(next),
            Call::Prune => only(last),
            Call::SetBack => only(self.saved[0]),
        }
    }

    /// Returns what is expected while a call runs: steps that it removes may be gone, and the latest
    /// may be the one before the call, after it, or between if the run is set back.
    pub fn during(&self, call: Call) -> Self {
        let after = self.after(call);
        let saved = self
            .saved
            .iter()
            .copied()
            .filter(|step| after.saved.contains(step))
            .collect();
        let mut latest = &self.latest | &after.latest;
        if call == Call::SetBack {
            latest.extend(self.saved.iter().copied().map(Some));
        }
        Self {
            saved,
            latest,
            ..after
        }
    }

    pub fn after_all(calls: &[Call]) -> Self {
        calls
            .iter()
            .fold(Self::empty(), |expected, call| expected.after(*call))
    }
}

/// Makes a call on every rank, which must return as it should.
fn perform(
    call: Call,
    expected: &Expected,
    behind: &mut AsyncCheckpointer,
    fs: &Recorder,
    mesh: &DeviceMesh,
) -> Result<()> {
    let next = expected.last() + 1;
    let last = expected.last();
    let run = behind.manager().clone();
    match call {
        Call::Save => drop(run.save(&state(mesh, next, 0)?)?),
        Call::SaveAlone => {
            let state = state(mesh, next, 0)?;
            write(
                fs,
                &folder(next),
                SavePlan::new(&state)?,
                &mut LiveFragments::new(&state),
                None,
            )?;
        }
        Call::SaveAsync => drop(behind.save(&state(mesh, next, 0)?)?),
        Call::SaveTaken => {
            let taken = run
                .save(&state(mesh, last, 1)?)
                .expect_err("the name is taken");
            let exists = CheckpointError::Exists { path: folder(last) };
            assert!(matches!(taken, crate::Error::Checkpoint(error) if error == exists));
        }
        Call::SaveAndPrune => drop(run.with_keep(1).save(&state(mesh, next, 0)?)?),
        Call::Prune => {
            if mesh.rank() == 0 {
                assert_eq!(run.with_keep(1).tidy(fs, last), []);
            }
        }
        Call::SetBack => {
            let aside = run.set_back(expected.saved[0])?;
            assert_eq!(aside.len(), expected.saved.len() - 1);
        }
    }
    Ok(())
}

/// Runs calls on ranks, from a file system where some are done. Marks the return of each.
pub(super) fn record(
    ranks: usize,
    start: &Recorder,
    done: &[Call],
    calls: &[Call],
    skipped: &Skipped,
) -> Recorder {
    let fs = start.durable_copy();
    fs.skip(skipped.clone());
    launch(Launch::threads(ranks), |world| {
        let mesh = DeviceMesh::new(world, [ranks], ["shard"])?;
        let mut behind = AsyncCheckpointer::new(manager(&fs, &mesh))?;
        let mut expected = Expected::after_all(done);
        for call in calls {
            perform(*call, &expected, &mut behind, &fs, &mesh)?;
            expected = expected.after(*call);
            assert_eq!(behind.finish()?.is_some(), *call == Call::SaveAsync);
            if mesh.rank() == 0 {
                fs.mark(format!("{call:?}"));
            }
        }
        Ok(())
    })
    .unwrap();
    fs
}

/// Every sequence of up to two calls and a third of those of three; all of them if `LONG_TESTS` is
/// set.
#[test]
fn any_three_calls_survive_a_loss_of_power() {
    let empty = Recorder::new();
    let one = record(2, &empty, &[], &[Call::Save], &Skipped::Nothing).durable_copy();
    let thirds = if std::env::var_os("LONG_TESTS").is_some() {
        1
    } else {
        3
    };
    let sequences = (1..=3).flat_map(|count| {
        let all = (0..count).map(|_| CALLS).multi_cartesian_product();
        all.step_by(if count == 3 { thirds } else { 1 })
    });
    let mut recorded: Vec<(Vec<Call>, usize, Recorder)> = sequences
        .map(|calls| {
            let fs = record(2, &one, &[Call::Save], &calls, &Skipped::Nothing);
            ([vec![Call::Save], calls].concat(), 1, fs)
        })
        .collect();
    for first in SAVES {
        recorded.push((
            vec![first],
            0,
            record(2, &empty, &[], &[first], &Skipped::Nothing),
        ));
    }
    let report = on_one_rank(2, |checker| {
        for (calls, done, fs) in &recorded {
            // Shorter sequences have the crashes before.
            let (last, before) = calls.split_last().expect("there is a call");
            let (before, marks) = (Expected::after_all(before), before.len() - done);
            let checked = checker.check_crashes(fs, marks, before.last() + 1, |crash| {
                if crash.marks.len() > marks {
                    before.after(*last)
                } else {
                    before.during(*last)
                }
            });
            checked.unwrap_or_else(|fault| panic!("{calls:?}: {fault}"));
        }
        let steps: usize = recorded.iter().map(|(.., fs)| fs.steps()).sum();
        format!(
            "{} sequences of {steps} steps: {}",
            recorded.len(),
            checker.report()
        )
    });
    println!("{report}");
}

/// Every sync and every rename, taken out once, is found: without the sync, or with a folder that
/// is worked on in its place. So the order of a save has nothing in it that is not needed.
#[test]
fn every_sync_and_every_rename_is_needed() {
    let empty = Recorder::new();
    let two = &[Call::Save, Call::Save][..];
    let plain = record(2, &empty, &[], two, &Skipped::Nothing).durable_copy();
    // As a run of an earlier version leaves it.
    let with_latest = plain.durable_copy();
    write_latest(&with_latest, 2);
    // As a person leaves it who wants to go back.
    let to_go_back = plain.durable_copy();
    write_latest(&to_go_back, 1);
    let starts = [
        (&[][..], empty, &SAVES[..]),
        (two, plain, &CALLS[..]),
        (two, with_latest.durable_copy(), &CALLS[..]),
        (two, to_go_back.durable_copy(), &[Call::SetBack][..]),
    ];
    let mut recorded = Vec::new();
    for (at, (done, start, calls)) in starts.iter().enumerate() {
        for &call in *calls {
            let complete = record(2, start, done, &[call], &Skipped::Nothing);
            let syncs = complete.syncs().into_iter().map(Skipped::Sync);
            for skipped in syncs.chain(complete.renames().into_iter().map(Skipped::Rename)) {
                let fs = record(2, start, done, &[call], &skipped);
                recorded.push((at, *done, call, skipped, fs));
            }
        }
    }
    let (found, missed) = on_one_rank(2, |checker| {
        let mut found = BTreeSet::new();
        let mut missed = BTreeSet::new();
        for (start, done, call, skipped, fs) in &recorded {
            let before = Expected::after_all(done);
            let checked = checker.check_crashes(fs, 0, before.last() + 1, |crash| {
                let expected = match crash.marks.is_empty() {
                    true => before.during(*call),
                    false => before.after(*call),
                };
                if *start < 3 {
                    return expected;
                }
                // Until the run is set back, the step that a person named is not the newest.
                Expected {
                    latest: [Some(1)].into(),
                    may_differ: crash.marks.is_empty(),
                    ..expected
                }
            });
            let site = (*call, skipped.clone());
            match checked {
                Ok(()) => missed.insert(site),
                Err(_) => found.insert(site),
            };
        }
        (found, missed)
    });
    println!(
        "{} syncs and renames, each left out: {} found",
        recorded.len(),
        found.len()
    );
    // From one start or another: what changes nothing is not missed.
    let missed: Vec<_> = missed.difference(&found).collect();
    assert_eq!(missed, Vec::<&(Call, Skipped)>::new());
}

/// Writes the file of earlier versions that names the latest checkpoint.
fn write_latest(fs: &Recorder, step: u64) {
    let mut file = fs.create(&folder(step).with_file_name("latest")).unwrap();
    file.write_all(format!("step-{step}").as_bytes()).unwrap();
}

/// A process is killed at any call; another saves the same step again, and then the next; then
/// power is lost.
#[test]
fn a_killed_process_and_then_a_loss_of_power() {
    let start = record(1, &Recorder::new(), &[], &[Call::Save], &Skipped::Nothing);
    let mut recorded = Vec::new();
    for (start, first) in [(Recorder::new(), 1), (start.durable_copy(), 2)] {
        for call in 0.. {
            let fs = start.durable_copy();
            let is_killed = launch(Launch::threads(1), |world| {
                let mesh = DeviceMesh::new(world, [1], ["shard"])?;
                let run = manager(&fs, &mesh).with_keep(1);
                fs.fail(Fault {
                    call,
                    kind: ErrorKind::Other,
                    lasting: true,
                });
                let killed = run.save(&state(&mesh, first, 0)?);
                fs.heal();
                if killed.is_ok() {
                    return Ok(false);
                }
                fs.mark("killed");
                for step in [first, first + 1] {
                    match run.save(&state(&mesh, step, 0)?) {
                        Err(crate::Error::Checkpoint(CheckpointError::Exists { .. })) => {
                            fs.mark("taken")
                        }
                        saved => fs.mark(format!("saved {}", saved.map(|_| step)?)),
                    }
                }
                Ok(true)
            });
            if !is_killed.unwrap()[0].1 {
                break;
            }
            recorded.push((first, call, fs));
        }
    }
    let report = on_one_rank(1, |checker| {
        for (first, call, fs) in &recorded {
            let expected = |crash: &Crash| {
                // The save that was killed may have pruned what was saved before, once its own
                // checkpoint was complete.
                let before = if *first == 1 { None } else { Some(1) };
                let mut expected = Expected::new(Vec::new(), [before, Some(*first)]);
                for mark in &crash.marks {
                    if let Some(step) = mark
                        .strip_prefix("saved ")
                        .map(|step| step.parse().expect("it is a step"))
                    {
                        expected = Expected::new(vec![step], [Some(step)]);
                    }
                }
                // After `killed`, the first step is saved, then the next.
                let running = first + crash.marks.len() as u64 - 1;
                if running <= first + 1 {
                    expected.saved.clear();
                    expected.latest.insert(Some(running));
                }
                expected
            };
            let checked = checker.check_crashes(fs, 1, 3, expected);
            checked.unwrap_or_else(|fault| {
                panic!("killed at call {call} of a save of step {first}: {fault}")
            });
        }
        format!("killed at {} calls: {}", recorded.len(), checker.report())
    });
    println!("{report}");
}
