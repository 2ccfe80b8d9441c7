//! A loss of power while a checkpoint is written behind training, and the training makes other
//! calls.
//!
//! The threads behind training make their first calls, as many as the moment says, then the
//! training makes its calls, and then they make the rest; or the training is interrupted in its
//! turn. All moments are tried.
//!
//! ```text
//! rank 0's thread   create  write  write  sync | ------------------------- | manifest  sync  rename  sync  prune
//! rank 1's thread   create  write ------------ | ------------------ write  sync
//! training          save_async returns         | latest, load, save, export |  finish
//! ```

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use itertools::Itertools;

use super::checker::{EXPORT, Expected, on_one_rank};
use super::power_loss::{Call, record};
use super::states::{RUN, is_saved, manager as new_manager, state};
use crate::checkpoint::fragments::LiveFragments;
use crate::checkpoint::fs::recorder::{Crash, Recorder, Schedule, Skipped};
use crate::checkpoint::save::write;
use crate::checkpoint::save_plan::SavePlan;
use crate::checkpoint::{AsyncCheckpointer, CheckpointError};
use crate::mesh::DeviceMesh;
use crate::prelude::*;

const RANKS: usize = 2;

/// A run in which a step is saved behind training.
#[derive(Debug, Clone, Copy)]
struct Run {
    /// The calls before it.
    done: &'static [Call],
    /// Number of checkpoints that are kept.
    keep: usize,
}

/// Numbers of calls of the threads behind training.
#[derive(Debug, Clone, Copy)]
struct Counts {
    /// Each rank's calls until its file is written.
    files: [usize; RANKS],
    /// Rank 0's calls for the manifest and after it.
    manifest: usize,
}

/// Moment at which the training makes other calls.
#[derive(Debug, Clone, Copy)]
struct Moment {
    /// Calls that the threads of each rank have made.
    made: [usize; RANKS],
    /// Calls of rank 0's training after which the threads make all that they can make without it.
    interrupted: Option<usize>,
}

/// Last call of the training.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Finish,
    /// Saves the next step behind training.
    SaveAsync,
    /// Saves other values under the name of the step behind training.
    SaveTaken,
    /// Drops the checkpointer, as at the end of a program. Another program saves the step again, if
    /// it is not saved.
    Drop,
}

const STARTS: [&[Call]; 2] = [&[Call::Save], &[Call::Save, Call::SaveAlone]];
const ENDS: [End; 4] = [End::Finish, End::SaveAsync, End::SaveTaken, End::Drop];

impl Counts {
    fn all(self) -> [usize; RANKS] {
        [self.files[0] + self.manifest, self.files[1]]
    }

    /// Returns the calls that the threads have made once they can make no more without a call of
    /// the training.
    fn of_stage(self, made: [usize; RANKS]) -> [usize; RANKS] {
        if made[0] > self.files[0] {
            self.all()
        } else {
            self.files
        }
    }

    /// Returns the moments between all calls of the threads, each before the last.
    fn moments(self, is_long: bool) -> Vec<[usize; RANKS]> {
        let [first, second] = self.files;
        let mut moments: Vec<_> = (0..=first)
            .cartesian_product(0..=second)
            .map(|(a, b)| [a, b])
            .collect();
        moments.retain(|[a, b]| is_long || *b == 0 || *a == first);
        moments.extend((1..self.manifest).map(|calls| [first + calls, second]));
        moments
    }
}

impl Run {
    fn before(self) -> Expected {
        Expected::after_all(self.done)
    }

    /// Returns the step that is saved behind training.
    fn step(self) -> u64 {
        self.before().last() + 1
    }

    /// Returns what a crash must leave.
    fn expected(self, end: End, crash: &Crash) -> Expected {
        let before = self.before();
        let has = |mark: &str| crash.marks.iter().any(|other| other == mark);
        let save = if self.keep == 1 {
            Call::SaveAndPrune
        } else {
            Call::Save
        };
        let expected = match (has("saved"), has("saved next")) {
            (false, _) => before.during(save),
            (true, false) if end == End::SaveAsync => before.after(save).during(save),
            (true, false) => before.after(save),
            (true, true) => before.after(save).after(save),
        };
        Expected {
            exported: has("exported").then_some(before.last()),
            ..expected
        }
    }
}

/// The training of one rank.
struct Training<'a> {
    run: Run,
    fs: Recorder,
    schedule: &'a Schedule,
    mesh: &'a DeviceMesh,
    behind: AsyncCheckpointer,
}

impl Training<'_> {
    /// Lets the threads behind training make calls until each rank's have made that many, one rank
    /// after the other.
    fn advance(&mut self, counts: Counts, made: [usize; RANKS]) -> Result<()> {
        let of_files = made[0].min(counts.files[0]);
        for (rank, calls) in [(0, of_files), (1, made[1]), (0, made[0])] {
            self.schedule.allow(rank, calls);
            while self
                .mesh
                .all()?
                .any("advance".into(), self.schedule.made(rank) < calls)?
            {
                // The manifest is begun by a poll that finds that all files are written.
                if calls > counts.files[rank] {
                    assert_eq!(self.behind.poll()?, None);
                }
            }
        }
        Ok(())
    }

    /// Marks that all ranks have come so far.
    fn mark(&self, text: &str) -> Result<()> {
        self.mesh.world().barrier(text)?;
        if self.mesh.rank() == 0 {
            self.fs.mark(text);
        }
        self.mesh.world().barrier(text)
    }

    /// Polls, reads the latest checkpoint, and saves another one elsewhere. Saves into the run are
    /// refused.
    fn call_while_writing(&mut self, counts: Counts, moment: Moment) -> Result<()> {
        if moment.made != counts.files {
            assert_eq!(self.behind.poll()?, None);
        }
        let manager = self.behind.manager();
        let mesh = self.mesh;
        let step = self.run.step();
        assert!(self.behind.is_writing());
        assert!(
            !manager.steps()?.is_empty(),
            "one of two checkpoints is always there"
        );
        let latest = manager
            .latest()?
            .expect("one of two checkpoints is always there");
        let latest_step = latest.step().expect("it has a step");
        assert!(
            self.run
                .before()
                .during(Call::Save)
                .latest
                .contains(&Some(latest_step))
        );
        // Also if it is removed after it was opened.
        if let Err(error) = is_saved(&latest, mesh, RANKS as u64, latest_step) {
            panic!("{moment:?}: {error}");
        }
        for other in [step, step + 1] {
            let expected = CheckpointError::InFlight {
                path: RUN.into(),
                step: other,
                in_flight: step,
            };
            let is_refused =
                |refused| matches!(refused, crate::Error::Checkpoint(error) if error == expected);
            assert!(is_refused(
                manager
                    .save(&state(mesh, other, 1)?)
                    .expect_err("another save is in flight")
            ));
            // A manager and a checkpointer that know nothing of the first.
            let second = new_manager(&self.fs, mesh);
            assert!(is_refused(
                second
                    .save(&state(mesh, other, 1)?)
                    .expect_err("another save is in flight")
            ));
            let mut second = AsyncCheckpointer::new(second)?;
            assert!(is_refused(
                second
                    .save(&state(mesh, other, 1)?)
                    .expect_err("another save is in flight")
            ));
        }
        let export = state(mesh, step - 1, 0)?;
        write(
            &self.fs,
            EXPORT.as_ref(),
            SavePlan::new(&export)?,
            &mut LiveFragments::new(&export),
            None,
        )?;
        Ok(())
    }

    fn end(mut self, end: End) -> Result<()> {
        let mesh = self.mesh;
        let step = self.run.step();
        match end {
            End::Finish => assert!(self.behind.finish()?.is_some()),
            End::SaveAsync => {
                assert!(
                    self.behind
                        .save(&state(mesh, step + 1, 0)?)?
                        .previous
                        .is_some()
                );
                self.mark("saved")?;
                assert!(self.behind.finish()?.is_some());
                return self.mark("saved next");
            }
            End::SaveTaken => {
                let taken = self
                    .behind
                    .save(&state(mesh, step, 1)?)
                    .expect_err("the name is taken");
                assert!(
                    matches!(
                        taken,
                        crate::Error::Checkpoint(CheckpointError::Exists { .. })
                    ),
                    "{taken}"
                );
                assert!(!self.behind.is_writing());
            }
            End::Drop => {
                let manager = self.behind.manager().clone();
                self.behind = AsyncCheckpointer::new(manager.clone())?;
                // The manifest may have been written.
                match manager.save(&state(mesh, step, 0)?) {
                    Err(crate::Error::Checkpoint(CheckpointError::Exists { .. })) => {}
                    saved => drop(saved?),
                }
            }
        }
        self.mark("saved")
    }
}

/// Saves a step behind training, and makes other calls at the moment. Marks `in flight`,
/// `exported`, `saved`, `saved next`. Returns true if the training was interrupted, if it should
/// be.
fn fly(run: Run, start: &Recorder, counts: Counts, moment: Moment, end: End) -> (Recorder, bool) {
    let fs = start.durable_copy();
    let schedule = Schedule::new(RANKS);
    launch(Launch::threads(RANKS), |world| {
        let mesh = DeviceMesh::new(world, [RANKS], ["shard"])?;
        let fs = fs.scheduled(mesh.rank(), &schedule);
        let behind = AsyncCheckpointer::new(new_manager(&fs, &mesh).with_keep(run.keep))?;
        let mut training = Training {
            run,
            fs,
            schedule: &schedule,
            mesh: &mesh,
            behind,
        };
        training.behind.save(&state(&mesh, run.step(), 0)?)?;
        training.advance(counts, moment.made)?;
        if let (Some(after), 0) = (moment.interrupted, mesh.rank()) {
            schedule.interrupt(after, &counts.of_stage(moment.made));
        }
        training.mark("in flight")?;
        training.call_while_writing(counts, moment)?;
        training.mark("exported")?;
        training.advance(counts, counts.files)?;
        schedule.allow_all();
        training.end(end)
    })
    .unwrap_or_else(|error| panic!("{run:?}, {moment:?}, {end:?}: {error}"));
    (fs, !schedule.resume())
}

/// Counts the calls of the threads behind training.
fn count(run: Run, start: &Recorder) -> Counts {
    let fs = start.durable_copy();
    let schedule = Schedule::new(RANKS);
    schedule.allow_all();
    launch(Launch::threads(RANKS), |world| {
        let mesh = DeviceMesh::new(world, [RANKS], ["shard"])?;
        let fs = fs.scheduled(mesh.rank(), &schedule);
        let mut behind = AsyncCheckpointer::new(new_manager(&fs, &mesh).with_keep(run.keep))?;
        behind.save(&state(&mesh, run.step(), 0)?)?;
        behind.finish()
    })
    .unwrap();
    let first = schedule.made_by_threads(0);
    let second = schedule.made_by_threads(1);
    Counts {
        files: [first[0], second[0]],
        manifest: first[1],
    }
}

#[test]
fn calls_while_a_checkpoint_is_written_survive_a_loss_of_power() {
    let is_long = std::env::var_os("LONG_TESTS").is_some();
    let starts = if is_long { &STARTS[..] } else { &STARTS[..1] };
    let mut recorded = Vec::new();
    for (&done, keep) in starts.iter().cartesian_product([usize::MAX, 1]) {
        let run = Run { done, keep };
        let start = record(RANKS, &Recorder::new(), &[], done, &Skipped::Nothing).durable_copy();
        let counts = count(run, &start);
        let moments = counts.moments(is_long);
        for (at, &made) in moments.iter().enumerate() {
            // The crashes before the last moment are those before all moments.
            let marks = if at + 1 == moments.len() { 0 } else { 1 };
            let mut add = |interrupted, end| {
                let moment = Moment { made, interrupted };
                let (fs, was_interrupted) = fly(run, &start, counts, moment, end);
                recorded.push((run, moment, end, fs, marks));
                was_interrupted
            };
            let ends = if is_long {
                &ENDS[..]
            } else {
                &ENDS[at % ENDS.len()..][..1]
            };
            for &end in ends {
                add(None, end);
            }
            let begins_manifest = made == [counts.files[0] + 1, counts.files[1]];
            if is_long || run.keep == 1 && begins_manifest {
                let interruptions = (0..)
                    .take_while(|after| add(Some(*after), End::Finish))
                    .count();
                assert!(
                    interruptions > 30,
                    "the training makes {interruptions} calls"
                );
            }
        }
    }
    let report = on_one_rank(RANKS as u64, |checker| {
        for (run, moment, end, fs, marks) in &recorded {
            let checked =
                checker.check_crashes(fs, *marks, run.step(), |crash| run.expected(*end, crash));
            checked.unwrap_or_else(|fault| panic!("{run:?}, {moment:?}, {end:?}: {fault}"));
        }
        let steps: usize = recorded.iter().map(|(.., fs, _)| fs.steps()).sum();
        format!(
            "{} sequences of {steps} steps: {}",
            recorded.len(),
            checker.report()
        )
    });
    println!("{report}");
}

/// If another rank fails, nothing is written after the call that says so: the next save may use the
/// same folder.
#[test]
fn a_poll_that_fails_has_ended_the_thread_behind_training() {
    let fs = Recorder::new();
    let schedule = Schedule::new(RANKS);
    let run = Run { done: &[], keep: 1 };
    let files = count(run, &fs).files;
    let written = AtomicUsize::new(0);
    let failed = launch(Launch::threads(RANKS), |world| {
        let mesh = DeviceMesh::new(world, [RANKS], ["shard"])?;
        let mut behind =
            AsyncCheckpointer::new(new_manager(&fs.scheduled(mesh.rank(), &schedule), &mesh))?;
        behind.save(&state(&mesh, 1, 0)?)?;
        if mesh.rank() == 1 {
            schedule.allow(1, files[1]);
            return Err(crate::Error::other("no batch left"));
        }
        thread::scope(|scope| {
            scope.spawn(|| {
                // The later it is, the surer is a thread found that still writes.
                thread::sleep(Duration::from_millis(100));
                schedule.allow_all();
            });
            while behind.poll().is_ok() {}
            written.store(schedule.made(0), Ordering::Relaxed);
        });
        Ok(())
    });
    assert_eq!(failed.unwrap_err().rank, 1);
    assert_eq!(written.into_inner(), files[0]);
}
