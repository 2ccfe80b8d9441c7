//! [`Crashes`]: the file systems that a loss of power may leave.

use std::collections::HashSet;
use std::sync::Arc;
use std::vec;

use itertools::Itertools;

use super::disk::{Change, Disk};
use super::{Recorder, Recording, Step};

/// Pending changes of which every combination is tried.
const EXHAUSTIVE: usize = 8;

/// The log up to a step: what is durable, and what is pending in the order of the log.
pub(super) struct Replay {
    pub durable: Disk,
    pub pending: Vec<(Change, String)>,
}

impl Replay {
    pub fn new(start: Disk) -> Self {
        Self {
            durable: start,
            pending: Vec::new(),
        }
    }

    pub fn step(&mut self, step: &Step, description: &str) {
        match step {
            Step::Change(change) => self.pending.push((change.clone(), description.into())),
            Step::Sync(inode) => {
                self.pending
                    .extract_if(.., |(change, _)| change.is_synced_with(*inode))
                    .for_each(|(change, _)| self.durable.apply(&change));
            }
            Step::Mark(_) => {}
        }
    }
}

/// A pending change's fate in a crash.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Fate {
    Lost,
    Done,
    /// A number of bytes is done, and the rest is zeros or beyond the file's end.
    Torn(usize, bool),
}

/// Returns the fates of pending changes that are tried.
fn combinations(pending: &[(Change, String)]) -> Vec<Vec<Fate>> {
    let count = pending.len();
    let fates = |is_done: &dyn Fn(usize) -> bool| -> Vec<Fate> {
        (0..count)
            .map(|at| if is_done(at) { Fate::Done } else { Fate::Lost })
            .collect()
    };
    let mut all = if count <= EXHAUSTIVE {
        (0..1_usize << count)
            .map(|done| fates(&|at| done >> at & 1 == 1))
            .collect()
    } else {
        let mut some: Vec<Vec<Fate>> = (0..count)
            .flat_map(|one| {
                [
                    fates(&|at| at == one),
                    fates(&|at| at != one),
                    fates(&|at| at < one),
                ]
            })
            .collect();
        some.push(fates(&|_| true));
        some
    };
    for (torn, (change, _)) in pending.iter().enumerate() {
        let Change::Write { bytes, .. } = change else {
            continue;
        };
        let half = bytes.len() / 2;
        let most = bytes.len() - 1;
        for fate in [
            Fate::Torn(half, false),
            Fate::Torn(most, false),
            Fate::Torn(0, true),
            Fate::Torn(half, true),
        ] {
            for mut others in [fates(&|_| false), fates(&|_| true), fates(&|at| at < torn)] {
                others[torn] = fate;
                all.push(others);
            }
        }
    }
    all
}

/// A loss of power.
pub(crate) struct Crash {
    /// The last step before the crash, and the fates of the changes that were pending, in words.
    pub description: String,
    /// The marks before the crash.
    pub marks: Vec<String>,
    /// The file system that is left, all of it durable. It records in its turn.
    pub left: Recorder,
}

/// An iterator over crashes, made by [`Recorder::crashes`].
pub(crate) struct Crashes {
    log: Arc<[(Step, String)]>,
    /// Index of the entry of the log that comes next.
    next: usize,
    replay: Replay,
    marks: Vec<String>,
    combinations: vec::IntoIter<Vec<Fate>>,
    /// Digests of the states that were given since the last mark.
    seen: HashSet<u64>,
    tried: usize,
}

impl Crashes {
    pub(super) fn new(recording: &Recording) -> Self {
        let replay = Replay::new(recording.start.clone());
        Self {
            log: recording.log.clone().into(),
            next: 0,
            combinations: combinations(&replay.pending).into_iter(),
            replay,
            marks: Vec::new(),
            seen: HashSet::new(),
            tried: 0,
        }
    }

    /// Skips the crashes before that many marks.
    #[must_use]
    pub(crate) fn after_marks(mut self, marks: usize) -> Self {
        while self.marks.len() < marks && self.advance().is_some() {}
        self.combinations = combinations(&self.replay.pending).into_iter();
        self
    }

    /// Returns the number of combinations so far, of which some leave the same file system.
    pub(crate) fn tried(&self) -> usize {
        self.tried
    }

    /// Goes to the next entry of the log. Returns `None` at its end.
    fn advance(&mut self) -> Option<()> {
        let (step, description) = self.log.get(self.next)?;
        self.next += 1;
        self.replay.step(step, description);
        if let Step::Mark(text) = step {
            self.marks.push(text.clone());
            self.seen.clear();
        }
        Some(())
    }

    fn state(&self, fates: &[Fate]) -> Disk {
        let mut disk = self.replay.durable.clone();
        for ((change, _), fate) in self.replay.pending.iter().zip(fates) {
            match *fate {
                Fate::Lost => {}
                Fate::Done => disk.apply(change),
                Fate::Torn(done, zeros) => disk.apply(&change.torn(done, zeros)),
            }
        }
        disk
    }

    fn crash(&self, disk: Disk, fates: &[Fate]) -> Crash {
        let steps = self.log[..self.next]
            .iter()
            .filter(|(step, _)| !matches!(step, Step::Mark(_)));
        let (step, last) = steps.fold((0, "the beginning"), |(count, _), (_, description)| {
            (count + 1, description)
        });
        let pending = self
            .replay
            .pending
            .iter()
            .zip(fates)
            .map(|((_, description), fate)| match fate {
                Fate::Lost => format!("lost: {description}"),
                Fate::Done => format!("done: {description}"),
                Fate::Torn(bytes, false) => format!("done to byte {bytes}: {description}"),
                Fate::Torn(bytes, true) => {
                    format!("done to byte {bytes}, then zeros: {description}")
                }
            });
        let description = format!("after step {step}, {last}: [{}]", pending.format("; "));
        Crash {
            description,
            marks: self.marks.clone(),
            left: Recorder::of(disk),
        }
    }
}

impl Iterator for Crashes {
    type Item = Crash;

    fn next(&mut self) -> Option<Crash> {
        loop {
            let Some(fates) = self.combinations.next() else {
                self.advance()?;
                self.combinations = combinations(&self.replay.pending).into_iter();
                continue;
            };
            self.tried += 1;
            let disk = self.state(&fates);
            if self.seen.insert(disk.digest(0)) {
                return Some(self.crash(disk, &fates));
            }
        }
    }
}
