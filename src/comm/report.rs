//! [`LaunchError`]: error of a failed launch, with the outcome of every rank.

use std::fmt;
use std::path::PathBuf;

use itertools::Itertools;
use serde::{Deserialize, Serialize};

use super::backend::Failure;
use super::transport::remote_error;
use super::{CollectiveId, CommError};
use crate::Error;

/// Error of a failed launch: the first failure, and the outcome of every other rank.
///
/// The `Debug` form is the report, so that a `main` that returns the error prints it. If another
/// process reports the same error, it is one line that says so.
#[derive(Clone)]
pub struct LaunchError {
    /// The rank at fault.
    pub rank: usize,
    /// The first failure.
    pub cause: Error,
    /// Program line where an operator unwound with the failure, such as `src/model.rs:12:9`. `None`
    /// if the program returned the error.
    pub at: Option<String>,
    /// Error with which the rank at fault itself ended, if it differs from the first failure.
    pub own: Option<Error>,
    /// Reports of all other ranks, of all processes.
    pub others: Vec<RankReport>,
    /// Last operations of the rank at fault, oldest first, if its [flight recorder](super::flight)
    /// can be read. With several processes they are read from the rank's file, so that all
    /// processes have the same error.
    pub last: Vec<CollectiveId>,
    /// Folder with the files of the ranks' flight recorders, if they have files. The program
    /// `flight` reads them.
    pub flight: Option<PathBuf>,
    /// True if another process reports the same error: with several processes, process 0 does.
    pub is_reported_by_other_process: bool,
}

/// Outcome of one rank in a failed [`launch`](super::launch).
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct RankReport {
    /// Global rank.
    pub rank: usize,
    /// Activity of the rank at the first failure, such as
    /// ``waiting in all_gather #12 `blocks.3` on ranks [0, 1, 2] for rank 2``.
    pub activity: String,
    /// Error of the rank, if it did not succeed. For a rank of another process, a [`CommError`] is
    /// transferred as a value, and any other error as its texts.
    #[serde(with = "remote_error")]
    pub error: Option<Error>,
    /// Program line where an operator unwound with the error. `None` if the program returned it.
    pub at: Option<String>,
}

impl LaunchError {
    pub(super) fn new(failure: Failure, reports: Vec<RankReport>) -> Self {
        let culprit = failure.error(None);
        let rank = culprit.rank();
        let mut cause = Error::Comm(culprit);
        let mut own = None;
        let mut at = None;
        let mut others = Vec::new();
        for report in reports {
            if report.rank != rank {
                others.push(report);
                continue;
            }
            at = report.at;
            match report.error {
                // The rank's own error is a typed value; the failure that the other ranks know
                // contains only its message.
                Some(error) if matches!(failure, Failure::Failed { .. }) => cause = error,
                error => own = error,
            }
        }
        let text = cause.to_string();
        let own = own.filter(|own| own.to_string() != text);
        Self {
            rank,
            cause,
            at,
            own,
            others,
            last: Vec::new(),
            flight: None,
            is_reported_by_other_process: false,
        }
    }
}

impl LaunchError {
    /// Returns true if `error` only reports the cause, as received from the rank at fault.
    fn is_word_of_cause(&self, error: &Error) -> bool {
        match (error, &self.cause) {
            (Error::Comm(CommError::RankFailed { rank, message, .. }), cause)
                if *rank == self.rank =>
            {
                *message == cause.to_string()
            }
            (Error::Comm(error), Error::Comm(cause)) => {
                error.without_notice() == cause.without_notice()
            }
            _ => false,
        }
    }
}

impl fmt::Display for LaunchError {
    /// Writes an activity or outcome that several ranks share once, with all of these ranks.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "launch failed at rank {}: {}", self.rank, self.cause)?;
        if let Error::Other(cause) = &self.cause {
            let mut source = cause.source();
            while let Some(error) = source {
                write!(f, "\n  caused by: {error}")?;
                source = error.source();
            }
        }
        if let Some(own) = &self.own {
            write!(f, "\n  rank {} itself ended with: {own}", self.rank)?;
        }
        if let Some(at) = &self.at {
            write!(f, "\n  in {at}")?;
        }
        let cause = without_numbers(&self.cause.to_string());
        let end = |report: &RankReport| match &report.error {
            None => "succeeded".into(),
            Some(error) if self.is_word_of_cause(error) => "ended with it".into(),
            Some(error) if without_numbers(&error.to_string()) == cause => {
                "ended with the same error except for numbers".into()
            }
            Some(error) => format!("ended with: {error}"),
        };
        let activity = by_text(
            &self.others,
            |report| format!("was {}", report.activity),
            str::to_owned,
        );
        let ends = by_text(&self.others, end, without_numbers);
        for (ranks, text) in activity.into_iter().chain(ends) {
            write!(f, "\n  {ranks} {text}")?;
        }
        if !self.last.is_empty() {
            write!(
                f,
                "\n  rank {} took part in {}",
                self.rank,
                self.last.iter().join(", ")
            )?;
        }
        if let Some(folder) = &self.flight {
            write!(f, "\n  what each rank did last is in {}", folder.display())?;
        }
        Ok(())
    }
}

/// Groups the ranks whose results of `text` have the same `key`, in the order of the first rank of
/// each group. The text of a group is that of its first rank.
fn by_text(
    reports: &[RankReport],
    text: impl Fn(&RankReport) -> String,
    key: impl Fn(&str) -> String,
) -> Vec<(String, String)> {
    let mut lines: Vec<(Vec<usize>, String, bool)> = Vec::new();
    for report in reports {
        let text = text(report);
        match lines
            .iter_mut()
            .find(|(_, other, _)| key(other) == key(&text))
        {
            Some((ranks, other, differs)) => {
                ranks.push(report.rank);
                *differs |= *other != text;
            }
            None => lines.push((vec![report.rank], text, false)),
        }
    }
    let line = |(ranks, text, differs): (Vec<usize>, String, bool)| match &ranks[..] {
        [rank] => (format!("rank {rank}"), text),
        ranks if differs => (
            format!("each of ranks {ranks:?}, with other numbers,"),
            text,
        ),
        ranks => (format!("each of ranks {ranks:?}"), text),
    };
    lines.into_iter().map(line).collect()
}

/// Replaces each number in `text` by a placeholder, to compare texts of several ranks that differ
/// in ranks or sizes.
fn without_numbers(text: &str) -> String {
    text.split(|character: char| character.is_ascii_digit())
        .filter(|part| !part.is_empty())
        .join("#")
}

impl fmt::Debug for LaunchError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.is_reported_by_other_process {
            true => write!(
                f,
                "launch failed at rank {}. Process 0 prints the report",
                self.rank
            ),
            false => fmt::Display::fmt(self, f),
        }
    }
}

impl std::error::Error for LaunchError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.cause)
    }
}
