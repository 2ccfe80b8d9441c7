//! A loss of power, after any step of any sequence of calls, leaves checkpoints that load.

use std::collections::BTreeSet;
use std::io::ErrorKind;

use itertools::Itertools;

use super::checker::{Expected, folder, on_one_rank};
use super::states::{manager, state};
use crate::checkpoint::fragments::LiveFragments;
use crate::checkpoint::fs::recorder::{Crash, Fault, Recorder, SyncCall};
use crate::checkpoint::save::write;
use crate::checkpoint::save_plan::SavePlan;
use crate::checkpoint::{AsyncCheckpointer, CheckpointError, CheckpointManager};
use crate::mesh::DeviceMesh;
use crate::prelude::*;

/// One call of a training program.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Call {
    /// Saves the next step and moves `latest` to it.
    Save,
    /// Saves the next step, and moves `latest` in no way.
    SaveAlone,
    /// As `Save`, behind training. It has returned when the next call begins.
    SaveAsync,
    /// Saves other values under the name of the last step, which is an error.
    SaveTaken,
    /// Saves the next step, moves `latest` to it and removes the others.
    SaveAndPrune,
    /// Moves `latest` to the last step and removes the others.
    Prune,
    /// Moves `latest` to the first step.
    MoveLatest,
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
    Call::MoveLatest,
];

impl Expected {
    /// Returns what is expected once a call has returned.
    pub fn after(&self, call: Call) -> Self {
        let next = self.last() + 1;
        let last = self.last();
        let and_next = || self.saved.iter().copied().chain([next]).collect();
        let only = |step| Self::new(vec![step], [Some(step)]);
        match call {
            Call::Save | Call::SaveAsync => Self::new(and_next(), [Some(next)]),
            Call::SaveAlone => Self {
                saved: and_next(),
                ..self.clone()
            },
            Call::SaveTaken => self.clone(),
            Call::SaveAndPrune => only(next),
            Call::Prune => only(last),
            Call::MoveLatest => Self::new(self.saved.clone(), [self.saved.first().copied()]),
        }
    }

    /// Returns what is expected while a call runs: steps that it removes may be gone, and `latest`
    /// may have moved.
    pub fn during(&self, call: Call) -> Self {
        let after = self.after(call);
        let saved = self
            .saved
            .iter()
            .copied()
            .filter(|step| after.saved.contains(step))
            .collect();
        Self {
            saved,
            latest: &self.latest | &after.latest,
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
    let on_first_rank = |run: CheckpointManager, step| match mesh.rank() {
        0 => run
            .commit(fs, step)
            .map(|not_removed| assert_eq!(not_removed, [])),
        _ => Ok(()),
    };
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
        Call::Prune => on_first_rank(run.with_keep(1), last)?,
        Call::MoveLatest => on_first_rank(run, expected.saved[0])?,
    }
    Ok(())
}

/// Runs calls on ranks, from a file system where some are done. Marks the return of each.
pub(super) fn record(
    ranks: usize,
    start: &Recorder,
    done: &[Call],
    calls: &[Call],
    skipped: Option<&SyncCall>,
) -> Recorder {
    let fs = start.durable_copy();
    if let Some(sync) = skipped {
        fs.skip(sync.clone());
    }
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
    let one = record(2, &empty, &[], &[Call::Save], None).durable_copy();
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
            let fs = record(2, &one, &[Call::Save], &calls, None);
            ([vec![Call::Save], calls].concat(), 1, fs)
        })
        .collect();
    for first in SAVES {
        recorded.push((vec![first], 0, record(2, &empty, &[], &[first], None)));
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

#[test]
fn every_sync_is_needed() {
    let empty = Recorder::new();
    // Two starts, since a sync that changes nothing is not missed: `latest` names the last step, or
    // the one before.
    let starts = [
        &[][..],
        &[Call::Save, Call::Save],
        &[Call::Save, Call::SaveAlone],
    ];
    let starts = starts.map(|done| (done, record(2, &empty, &[], done, None).durable_copy()));
    let mut recorded = Vec::new();
    for ((done, start), call) in starts.iter().cartesian_product(CALLS) {
        let is_possible = !done.is_empty() || SAVES.contains(&call);
        let syncs = if is_possible {
            record(2, start, done, &[call], None).syncs()
        } else {
            Vec::new()
        };
        recorded.extend(syncs.into_iter().map(|sync| {
            let fs = record(2, start, done, &[call], Some(&sync));
            (*done, call, sync, fs)
        }));
    }
    let (found, missed) = on_one_rank(2, |checker| {
        let mut found = BTreeSet::new();
        let mut missed = BTreeSet::new();
        for (done, call, sync, fs) in &recorded {
            let before = Expected::after_all(done);
            let checked = checker.check_crashes(fs, 0, before.last() + 1, |crash| {
                if crash.marks.is_empty() {
                    before.during(*call)
                } else {
                    before.after(*call)
                }
            });
            let site = (done.is_empty(), *call, sync.clone());
            if checked.is_err() {
                found.insert(site)
            } else {
                missed.insert(site)
            };
        }
        (found, missed)
    });
    let missed = missed.difference(&found).collect_vec();
    println!(
        "{} syncs, each left out: {} found",
        recorded.len(),
        recorded.len() - missed.len()
    );
    // The run folder's entry is synced by every save, since the process that created it may have
    // been killed before.
    let expected = SAVES.map(|call| {
        (
            false,
            call,
            SyncCall {
                path: "/".into(),
                index: 0,
            },
        )
    });
    assert_eq!(missed, expected.iter().collect_vec());
}

/// A process is killed at any call; another saves the same step again, and then an earlier one;
/// then power is lost.
#[test]
fn a_killed_process_and_then_a_loss_of_power() {
    let start = record(1, &Recorder::new(), &[], &[Call::Save], None).durable_copy();
    let mut recorded = Vec::new();
    for (start, first) in [(Recorder::new(), 1), (start, 2)] {
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
                for step in (1..=first).rev() {
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
                // The save that was killed may have pruned what was saved before, once `latest` had
                // moved.
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
                let running = first + 1 - crash.marks.len() as u64;
                if running > 0 {
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
