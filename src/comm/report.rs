//! [`LaunchError`]: how every rank fared in a launch that failed.

use std::fmt;
use std::path::PathBuf;

use itertools::Itertools;

use super::backend::Failure;
use super::{CollectiveId, CommError};
use crate::Error;

/// A launch failed: the first failure, and how every other rank fared.
#[derive(Debug, Clone)]
pub struct LaunchError {
    /// The rank at fault.
    pub rank: usize,
    /// The first failure.
    pub cause: Error,
    /// Where in the program an operator unwound with it, such as `src/model.rs:12:9`, if it was not returned.
    pub at: Option<String>,
    /// What the rank at fault itself ended with, where that says more than the first failure.
    pub own: Option<Error>,
    /// All other ranks, of all processes.
    pub others: Vec<RankReport>,
    /// What the rank at fault took part in last, oldest first: a few operations, where its [flight recorder](super::flight)
    /// can be read. Of ranks in several processes it is read from its file, so that all have the same error.
    pub last: Vec<CollectiveId>,
    /// The folder of the ranks' flight recorders, if they have files: `LaunchTrace::read` says more.
    pub flight: Option<PathBuf>,
    /// Whether another process has the same error and tells it: where ranks are in several processes, process 0 does.
    pub is_told_elsewhere: bool,
}

/// How one rank fared in a failed [`launch`](super::launch).
#[derive(Debug, Clone)]
pub struct RankReport {
    /// The rank.
    pub rank: usize,
    /// What it was doing at the first failure, such as
    /// ``waiting in all_gather #12 `blocks.3` on ranks [0, 1, 2] for rank 2``.
    pub doing: String,
    /// The error it returned, if it did not succeed; of a rank of another process an error of this crate's collectives,
    /// or the texts of another.
    pub error: Option<Error>,
    /// Where an operator unwound with it, if it was not returned.
    pub at: Option<String>,
}

impl LaunchError {
    pub(super) fn new(failure: Failure, reports: Vec<RankReport>) -> Self {
        let culprit = failure.error(None);
        let rank = culprit.rank();
        let mut cause = Error::Comm(culprit);
        let (mut own, mut at, mut others) = (None, None, Vec::new());
        for report in reports {
            if report.rank != rank {
                others.push(report);
                continue;
            }
            at = report.at;
            match report.error {
                // The rank's own error is more than its message, which is what the others know.
                Some(error) if matches!(failure, Failure::Failed { .. }) => cause = error,
                error => own = error,
            }
        }
        let text = cause.to_string();
        let own = own.filter(|own| own.to_string() != text);
        Self { rank, cause, at, own, others, last: Vec::new(), flight: None, is_told_elsewhere: false }
    }
}

impl LaunchError {
    /// Whether `error` is no more than word of the cause.
    fn is_word_of_cause(&self, error: &Error) -> bool {
        match (error, &self.cause) {
            (Error::Comm(CommError::RankFailed { rank, message, .. }), cause) if *rank == self.rank => {
                *message == cause.to_string()
            }
            (Error::Comm(error), Error::Comm(cause)) => error.without_notice() == cause.without_notice(),
            _ => false,
        }
    }
}

impl fmt::Display for LaunchError {
    /// What several ranks did, or ended with, is said once, with all of them.
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
        let end = |report: &RankReport| match &report.error {
            None => "succeeded".into(),
            Some(error) if self.is_word_of_cause(error) => "ended with it".into(),
            Some(error) => format!("ended with: {error}"),
        };
        let doing = by_text(&self.others, |report| format!("was {}", report.doing));
        for (ranks, text) in doing.into_iter().chain(by_text(&self.others, end)) {
            write!(f, "\n  {ranks} {text}")?;
        }
        if !self.last.is_empty() {
            write!(f, "\n  rank {} took part in {}", self.rank, self.last.iter().join(", "))?;
        }
        if let Some(folder) = &self.flight {
            write!(f, "\n  what each rank did last is in {}", folder.display())?;
        }
        Ok(())
    }
}

/// What `text` says of each rank, with the ranks that it says it of, in the order of the first.
fn by_text(reports: &[RankReport], text: impl Fn(&RankReport) -> String) -> Vec<(String, String)> {
    let mut lines: Vec<(Vec<usize>, String)> = Vec::new();
    for report in reports {
        let text = text(report);
        match lines.iter_mut().find(|(_, other)| *other == text) {
            Some((ranks, _)) => ranks.push(report.rank),
            None => lines.push((vec![report.rank], text)),
        }
    }
    let named = |ranks: Vec<usize>| match &ranks[..] {
        [rank] => format!("rank {rank}"),
        ranks => format!("each of ranks {ranks:?}"),
    };
    lines.into_iter().map(|(ranks, text)| (named(ranks), text)).collect()
}

impl std::error::Error for LaunchError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.cause)
    }
}
