//! [`LaunchError`]: how every rank fared in a launch that failed.

use std::fmt;
use std::panic::Location;

use super::end::End;
use super::local::{Failure, LocalWorld};
use crate::Error;

/// A launch failed: the first failure, and how every other rank fared.
#[derive(Debug, Clone)]
pub struct LaunchError {
    /// The rank at fault.
    pub rank: usize,
    /// The first failure.
    pub cause: Error,
    /// Where in the program an operator unwound with it, if it was not returned.
    pub at: Option<&'static Location<'static>>,
    /// What the rank at fault itself ended with, where that says more than the first failure.
    pub own: Option<Error>,
    /// All other ranks.
    pub others: Vec<RankReport>,
}

/// How one rank fared in a failed [`launch`](super::launch).
#[derive(Debug, Clone)]
pub struct RankReport {
    /// The rank.
    pub rank: usize,
    /// What it was doing at the first failure, such as
    /// ``waiting in all_gather #12 `blocks.3` on ranks [0, 1, 2] for rank 2``.
    pub doing: String,
    /// The error it returned, if it did not succeed.
    pub error: Option<Error>,
}

impl LaunchError {
    pub(super) fn new<T>(failure: Failure, ends: Vec<End<T>>, local: &LocalWorld) -> Self {
        let culprit = failure.error(None);
        let rank = culprit.rank();
        let mut cause = Error::Comm(culprit);
        let (mut own, mut at, mut others) = (None, None, Vec::new());
        for (each, end) in ends.into_iter().enumerate() {
            if each == rank {
                at = end.unwound_at();
            }
            let error = end.error(each);
            match error {
                // The rank's own error is more than its message, which is what the others know.
                Some(error) if each == rank && matches!(failure, Failure::Failed { .. }) => cause = error,
                error if each == rank => own = error,
                error => others.push(RankReport { rank: each, doing: local.rendezvous.doing(each), error }),
            }
        }
        let text = cause.to_string();
        let own = own.filter(|own| own.to_string() != text);
        Self { rank, cause, at, own, others }
    }
}

impl fmt::Display for LaunchError {
    /// Ranks that fared alike share a line.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "launch failed at rank {}: {}", self.rank, self.cause)?;
        if let Some(own) = &self.own {
            write!(f, "\n  rank {} itself ended with: {own}", self.rank)?;
        }
        if let Some(at) = self.at {
            write!(f, "\n  in {at}")?;
        }
        let mut lines: Vec<(String, Vec<usize>)> = Vec::new();
        for RankReport { rank, doing, error } in &self.others {
            let end = error.as_ref().map_or("it succeeded".into(), |error| format!("it ended with: {error}"));
            let line = format!("{doing}; {end}");
            match lines.iter_mut().find(|(other, _)| *other == line) {
                Some((_, ranks)) => ranks.push(*rank),
                None => lines.push((line, vec![*rank])),
            }
        }
        for (line, ranks) in lines {
            match &ranks[..] {
                [rank] => write!(f, "\n  rank {rank} was {line}")?,
                ranks => write!(f, "\n  ranks {ranks:?}, each: {line}")?,
            }
        }
        Ok(())
    }
}

impl std::error::Error for LaunchError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.cause)
    }
}
