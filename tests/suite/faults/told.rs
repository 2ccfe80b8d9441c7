//! What the ranks that are not at fault are told, by errors and by flight files.

use std::path::Path;
use std::time::{Duration, Instant};
use std::{fmt, fs};

use burn_dtensor::comm::{CommError, Launch, LaunchError, World, launch};
use burn_dtensor::{Error, Result};
use burn_dtensor_flight::{Fault, FaultKind, LaunchTrace};

use super::folder::Folder;

/// What the other ranks are told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Told {
    Panicked,
    Failed,
    Left,
    Mismatch,
    /// Each waits for the other.
    Deadlock,
}

impl Told {
    /// What an error says, of a rank at fault.
    fn by_error(error: &CommError, culprit: usize) -> Option<Self> {
        match error {
            CommError::RankPanicked { rank, message, .. } => {
                (*rank == culprit && message == "boom").then_some(Self::Panicked)
            }
            CommError::RankFailed { rank, message, .. } => {
                (*rank == culprit && message == "no such file").then_some(Self::Failed)
            }
            CommError::RankReturned { rank, .. } => (*rank == culprit).then_some(Self::Left),
            CommError::Mismatch { rank, other, .. } => {
                [*rank, *other].contains(&culprit).then_some(Self::Mismatch)
            }
            CommError::Deadlock { waits } => waits
                .iter()
                .any(|(rank, ..)| *rank == culprit)
                .then_some(Self::Deadlock),
            _ => None,
        }
    }

    /// What flight files say, of a rank at fault. Of two that differ, or wait for each other, they
    /// may name the other first.
    fn by_files(fault: &Fault, culprit: usize) -> Option<Self> {
        let is_named = fault.rank == culprit;
        let is_of_it = is_named || fault.text.contains(&format!("rank {culprit} "));
        match fault.why {
            FaultKind::Panicked => {
                (is_named && fault.text.contains("boom")).then_some(Self::Panicked)
            }
            FaultKind::Failed => {
                (is_named && fault.text.contains("no such file")).then_some(Self::Failed)
            }
            FaultKind::Left => is_named.then_some(Self::Left),
            FaultKind::Disagrees => is_of_it.then_some(Self::Mismatch),
            FaultKind::Deadlock => is_of_it.then_some(Self::Deadlock),
            _ => None,
        }
    }
}

/// Cells that ran.
#[derive(Debug, Default)]
pub struct Cells {
    pub count: usize,
    /// From start to end.
    slowest: Duration,
    /// In which the files name the culprit, and not the rank that differs from it.
    pub alone: usize,
}

impl fmt::Display for Cells {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            count,
            slowest,
            alone,
        } = self;
        write!(
            f,
            "{count} cells, the slowest from start to end {slowest:?}; in {alone} the files name the culprit alone"
        )
    }
}

impl Cells {
    /// Runs a program on so many ranks, the last of which is at fault: every other is told
    /// something `expected`, and so is whoever reads the files.
    pub fn run(
        &mut self,
        (config, folder, ranks): (Launch, &Folder, usize),
        expected: &[Told],
        cell: &str,
        program: impl Fn(&World) -> Result<()> + Sync,
    ) {
        let files = folder.path().join(self.count.to_string());
        let config = config
            .with_deadline(Duration::from_secs(3600))
            .with_flight_recorder(&files);
        let start = Instant::now();
        let error = launch(config, program);
        let took = start.elapsed();
        let error = error
            .err()
            .unwrap_or_else(|| panic!("{cell} on {ranks}: every rank succeeded"));
        check(&error, ranks, expected, cell);
        // Of several processes one looks at the files.
        if !error.is_reported_by_other_process {
            let fault = check_files(&files, ranks - 1, expected, &format!("{cell} on {ranks}"));
            self.alone += usize::from(fault.rank + 1 == ranks);
            fs::remove_dir_all(&files).unwrap();
        }
        (self.count, self.slowest) = (self.count + 1, self.slowest.max(took));
    }
}

/// Whether every rank but the culprit was told `expected`, and names it.
fn check(error: &LaunchError, ranks: usize, expected: &[Told], cell: &str) {
    let culprit = ranks - 1;
    let of_others = error.others.iter().filter(|report| report.rank != culprit);
    let errors: Vec<_> = of_others
        .map(|report| match &report.error {
            Some(Error::Comm(error)) => error.clone(),
            other => panic!(
                "{cell} on {ranks}: rank {} ended with {other:?}: {error}",
                report.rank
            ),
        })
        .collect();
    // The first failure is told of the rank that found it, if that is not the culprit.
    assert!(
        errors.len() + 2 >= ranks && ranks > errors.len(),
        "{cell} on {ranks}: {error}"
    );
    let cause = match &error.cause {
        Error::Comm(cause) => Some(Told::by_error(cause, culprit)),
        // The culprit's own.
        _ => None,
    };
    for told in errors
        .iter()
        .map(|error| Told::by_error(error, culprit))
        .chain(cause)
    {
        let is_expected = told.is_some_and(|told| expected.contains(&told));
        assert!(
            is_expected,
            "{cell} on {ranks}: {told:?} of {expected:?}: {error}"
        );
    }
}

/// Whom the files alone name, which is the culprit, for a reason that is `expected`.
fn check_files(files: &Path, culprit: usize, expected: &[Told], cell: &str) -> Fault {
    let launches = LaunchTrace::read(files).unwrap();
    let [flights] = &launches[..] else {
        panic!("{cell}: {launches:?}")
    };
    let fault = flights
        .fault()
        .unwrap_or_else(|| panic!("{cell}: nobody is at fault: {flights}"));
    let told = Told::by_files(&fault, culprit);
    let is_expected = told.is_some_and(|told| expected.contains(&told));
    assert!(
        is_expected,
        "{cell}: the files tell {told:?} of {expected:?}: {}",
        flights.text(9)
    );
    fault
}
