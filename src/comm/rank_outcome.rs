//! [`RankOutcome`]: outcome of a rank's program.

use std::any::Any;
use std::panic::{AssertUnwindSafe, Location, catch_unwind};

use super::backend::Failure;
use super::flight::{ExitKind, FirstFailure, ProgramExit};
use super::panic::{error_behind, panic_report};
use super::rank_worlds::RankWorlds;
use super::{CommError, rank_context};
use crate::Error;

/// Outcome of a rank's program.
pub(super) enum RankOutcome<T> {
    Done(T),
    Failed {
        error: Error,
        /// Program line from which the program unwound with the error, if it did.
        at: Option<&'static Location<'static>>,
    },
    Panicked(String),
}

impl<T> RankOutcome<T> {
    /// Runs `body` and returns its outcome; a panic is also an outcome.
    pub fn of(body: impl FnOnce() -> Self) -> Self {
        catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(Self::from_panic)
    }

    /// Creates the outcome from the payload of a panic. Never panics, even if dropping the payload
    /// does.
    pub fn from_panic(payload: Box<dyn Any + Send>) -> Self {
        let end = match error_behind(&*payload) {
            Some(error) => Self::Failed {
                error,
                at: rank_context::unwound_at(),
            },
            None => Self::Panicked(panic_report(&*payload)),
        };
        // A payload that panics when it is dropped may leave a payload that does the same.
        if let Err(another) = catch_unwind(AssertUnwindSafe(|| drop(payload))) {
            std::mem::forget(another);
        }
        end
    }

    /// Ends the rank in every world of which it was a member: reports a failure to the other ranks,
    /// which may be waiting for this one; records the outcome in the flight recorders, with the
    /// first failure of each world as far as that is known; and notifies the backends that the
    /// rank's program is over. Other processes wait for this notification, and the record must be
    /// complete when the launch has ended everywhere.
    pub fn report(&self, worlds: &RankWorlds) {
        let (how, text) = match self {
            Self::Done(_) => (ExitKind::Returned, String::new()),
            Self::Failed { error, .. } => (ExitKind::Failed, error.to_string()),
            Self::Panicked(message) => (ExitKind::Panicked, message.clone()),
        };
        for (backend, rank) in worlds.iter() {
            let message = text.clone();
            match self {
                Self::Done(_) => {}
                Self::Failed { .. } => drop(backend.fail(Failure::Failed { rank, message })),
                Self::Panicked(_) => drop(backend.fail(Failure::Panicked { rank, message })),
            }
        }
        for (backend, rank, ledger) in worlds.with_ledgers() {
            let failure = backend.failure().map(|failure| first(&failure, rank));
            ledger.recorder().ended(|at| ProgramExit {
                how,
                at,
                text: text.clone(),
                failure,
            });
        }
        for (backend, rank) in worlds.iter() {
            backend.rank_exited(rank, self.error(rank), self.unwound_at());
        }
    }

    pub fn is_done(&self) -> bool {
        matches!(self, Self::Done(_))
    }

    pub fn done(self) -> Option<T> {
        match self {
            Self::Done(value) => Some(value),
            _ => None,
        }
    }

    pub fn unwound_at(&self) -> Option<&'static Location<'static>> {
        match self {
            Self::Failed { at, .. } => *at,
            _ => None,
        }
    }

    /// Creates the outcome of a program that returned an error.
    pub fn failed(error: Error) -> Self {
        Self::Failed { error, at: None }
    }

    pub fn error(&self, rank: usize) -> Option<Error> {
        match self {
            Self::Done(_) => None,
            Self::Failed { error, .. } => Some(error.clone()),
            Self::Panicked(message) => Some(
                CommError::RankPanicked {
                    rank,
                    message: message.clone(),
                    during: None,
                }
                .into(),
            ),
        }
    }
}

/// Returns the first failure of a launch, from the point of view of `rank`.
pub(super) fn first(failure: &Failure, rank: usize) -> FirstFailure {
    let error = failure.error(None);
    let is_own = match failure {
        Failure::Panicked { .. } | Failure::Failed { .. } => true,
        Failure::Collective(error) => error.is_of_program(),
    };
    let is_difference = matches!(
        error,
        CommError::Mismatch { .. } | CommError::Diverged { .. }
    );
    FirstFailure {
        rank: error.rank(),
        is_own: is_own && error.rank() == rank,
        is_difference,
        text: error.to_string(),
    }
}
