//! [`Fault`]: determines which rank is at fault, and why.
//!
//! The checks run in this order, from certain evidence to weaker evidence:
//!
//! 1. A program failed by itself, as its rank recorded: a panic, an error, an invalid call, or a
//!    process that it ended. If there are several, the first is at fault.
//! 2. Calls of one collective differ: a rank outside the majority is at fault; of two ranks, the
//!    one that called last.
//! 3. Ranks received an error about another difference: between a message and its receive, or
//!    between values that must be identical.
//! 4. A process no longer exists or is stopped, although its program had not ended. Either other
//!    ranks wait for it, or only some processes are in this state.
//! 5. Ranks wait for each other in a cycle.
//! 6. A rank is waited for, but waits for no other rank: it has returned, or is busy elsewhere. If
//!    fewer ranks wait than have returned, the waiting ranks made an extra call.
//! 7. No process of the launch is running: the rank whose last recorded activity is the oldest is
//!    at fault.
//! 8. Programs ended with the failure of another rank, of which nothing else is known, such as a
//!    lost connection.

use std::cmp::Reverse;
use std::fmt;

use itertools::Itertools;

use crate::format::{ExitKind, ProgramExit};
use crate::merge::{BlockedWait, CollectiveTrace, LaunchTrace};
use crate::operation::Operation;
use crate::process_state::ProcessState;

/// Rank at fault, with the reason. Displays as a line that names the rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    /// The rank. In a deadlock, the rank of the cycle that began to wait last.
    pub rank: usize,
    /// Kind of the fault.
    pub why: FaultKind,
    /// Description of the fault, to be appended to "rank 1".
    pub text: String,
}

/// Kind of a fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FaultKind {
    /// The rank's program panicked.
    Panicked,
    /// The rank's program returned an error or made an invalid call, or other ranks received an
    /// error about it.
    Failed,
    /// The rank's process ended while its program ran, for example by [`exit`](std::process::exit),
    /// and nothing had failed before.
    Exited,
    /// The rank's call differs from those of the other ranks, or its values do.
    Disagrees,
    /// The rank's process no longer exists.
    Gone,
    /// The rank's process is stopped.
    Stopped,
    /// The rank waits for a rank that waits for it, directly or through other ranks.
    Deadlock,
    /// The rank returned while other ranks needed it: it made too few calls.
    Left,
    /// The rank made a call that most other ranks returned without: it made an extra call.
    Surplus,
    /// Other ranks wait for the rank, and it does not call.
    Absent,
}

impl FaultKind {
    /// Returns the name of the kind.
    pub fn name(self) -> &'static str {
        match self {
            Self::Panicked => "panicked",
            Self::Failed => "failed",
            Self::Exited => "exited",
            Self::Disagrees => "disagrees",
            Self::Gone => "gone",
            Self::Stopped => "stopped",
            Self::Deadlock => "deadlock",
            Self::Left => "left",
            Self::Surplus => "surplus",
            Self::Absent => "absent",
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} {}", self.rank, self.text)
    }
}

impl LaunchTrace {
    /// Returns the rank at fault, or `None` if nothing is known to be wrong. If the program is
    /// running, a rank that others wait for may just be slow.
    pub fn fault(&self) -> Option<Fault> {
        let waits = self.waits();
        self.failed_by_itself()
            .or_else(|| self.disagrees())
            .or_else(|| self.told_to_differ())
            .or_else(|| self.lost(&waits))
            .or_else(|| circle(&waits))
            .or_else(|| self.waited_for(&waits))
            .or_else(|| self.all_lost(&waits))
            .or_else(|| self.told_to_fail())
    }

    fn failed_by_itself(&self) -> Option<Fault> {
        let own = |ending: &ProgramExit, rank: usize| match &ending.failure {
            Some(failure) => failure.is_own && failure.rank == rank,
            None => ending.how != ExitKind::Returned,
        };
        let failed = self
            .ranks
            .iter()
            .filter_map(|flight| Some((flight, flight.ending.as_ref()?)));
        let failed = failed.filter(|(flight, ending)| own(ending, flight.rank));
        let (flight, ending) =
            failed.min_by_key(|(flight, ending)| self.since(flight, ending.at))?;
        let text = match &ending.failure {
            // The program may return another error after its own call failed, or none.
            Some(failure)
                if ending.how != ExitKind::Panicked && !failure.text.contains(&ending.text) =>
            {
                &failure.text
            }
            _ => &ending.text,
        };
        let (why, did) = match ending.how {
            ExitKind::Panicked => (FaultKind::Panicked, "panicked"),
            ExitKind::Exited if ending.failure.is_none() => (FaultKind::Exited, "exited"),
            ExitKind::Failed | ExitKind::Returned | ExitKind::Exited => {
                (FaultKind::Failed, "failed")
            }
        };
        Some(Fault {
            rank: flight.rank,
            why,
            text: format!("{did}: {text}"),
        })
    }

    fn disagrees(&self) -> Option<Fault> {
        let failed = self.failed();
        let meetings = self.meetings();
        let at_fault = meetings.iter().find(|meeting| {
            // A call after a failure proves nothing, because the program may be cleaning up.
            let before = |(rank, operation): &&(usize, &Operation)| {
                let flight = self.rank(*rank).expect("a rank that has called has a file");
                failed.is_none_or(|failed| self.since(flight, operation.posted) <= failed)
            };
            let mut before = meeting
                .called
                .iter()
                .filter(before)
                .map(|(_, operation)| operation);
            let first = before.next();
            first.is_some_and(|first| before.any(|other| other.difference(first).is_some()))
        })?;
        let (other, agreed) = at_fault.agreed();
        let (rank, differs) = at_fault.differences().into_iter().next()?;
        let (_, called) = at_fault.called.iter().find(|(caller, _)| *caller == rank)?;
        let order = order(&meetings, rank, called, agreed);
        let text = format!("called {called}, but rank {other} called {agreed}: {differs}{order}");
        Some(Fault {
            rank,
            why: FaultKind::Disagrees,
            text,
        })
    }

    fn told_to_differ(&self) -> Option<Fault> {
        let told = self
            .ranks
            .iter()
            .filter_map(|flight| flight.ending.as_ref()?.failure.as_ref());
        let failure = told.into_iter().find(|failure| failure.is_difference)?;
        Some(Fault {
            rank: failure.rank,
            why: FaultKind::Disagrees,
            text: format!("differs: {}", failure.text),
        })
    }

    fn told_to_fail(&self) -> Option<Fault> {
        let told = self.ranks.iter().filter_map(|flight| {
            let ending = flight
                .ending
                .as_ref()
                .filter(|ending| ending.how == ExitKind::Failed)?;
            Some((self.since(flight, ending.at), ending.failure.as_ref()?))
        });
        let (_, failure) = told.min_by_key(|(at, _)| *at)?;
        Some(Fault {
            rank: failure.rank,
            why: FaultKind::Failed,
            text: format!("failed: {}", failure.text),
        })
    }

    fn lost(&self, waits: &[BlockedWait<'_>]) -> Option<Fault> {
        let (lost, others): (Vec<_>, Vec<_>) = needed(waits)
            .into_iter()
            .partition(|rank| self.is_lost(*rank));
        // A launcher that has ended the processes of this host may have done so because of a rank
        // of another.
        let may_be_lost = |rank: &usize| {
            let has_not_ended = self
                .rank(*rank)
                .is_some_and(|flight| flight.ending.is_none());
            has_not_ended && self.life(*rank) == ProcessState::Unknown
        };
        let only = || Some(self.all_that_are_lost()).filter(|lost| lost.len() < self.ranks.len());
        let only = || only().filter(|_| !others.iter().any(may_be_lost));
        let rank = self
            .silent_first(lost)
            .or_else(|| self.silent_first(only()?))?;
        Some(self.not_there(rank, waits))
    }

    fn all_lost(&self, waits: &[BlockedWait<'_>]) -> Option<Fault> {
        let rank = self.silent_first(self.all_that_are_lost())?;
        let Fault { why, text, .. } = self.not_there(rank, waits);
        Some(Fault {
            rank,
            why,
            text: text + "; no process is running, and this rank stopped recording first",
        })
    }

    /// Returns true if the rank's process no longer exists or is stopped, although its program had
    /// not ended.
    fn is_lost(&self, rank: usize) -> bool {
        self.ending(rank).is_none()
            && matches!(self.life(rank), ProcessState::Gone | ProcessState::Stopped)
    }

    fn all_that_are_lost(&self) -> Vec<usize> {
        self.ranks
            .iter()
            .map(|flight| flight.rank)
            .filter(|rank| self.is_lost(*rank))
            .collect()
    }

    fn waited_for(&self, waits: &[BlockedWait<'_>]) -> Option<Fault> {
        let needed = needed(waits);
        let returned = |rank: &usize| {
            self.ending(*rank)
                .is_some_and(|ending| ending.how == ExitKind::Returned)
        };
        let (left, mut others): (Vec<_>, Vec<_>) = needed.into_iter().partition(returned);
        others.retain(|rank| !self.ended_by_another(*rank));
        if let Some(rank) = self.silent_first(others) {
            return Some(self.not_there(rank, waits));
        }
        let rank = self.silent_first(left)?;
        let waiting = waits
            .iter()
            .find(|waiting| waiting.missing.contains(&rank))?;
        let id = &waiting.operation.id;
        let here = id.ranks.len() - waiting.missing.len();
        let is_surplus = !id.op.is_message()
            && here < waiting.missing.len()
            && waiting.missing.iter().all(returned);
        Some(if is_surplus {
            let text = format!(
                "called {id}, a call too many: ranks {:?} have returned without it",
                waiting.missing
            );
            Fault {
                rank: waiting.rank,
                why: FaultKind::Surplus,
                text,
            }
        } else {
            let text = format!("returned, but rank {} waits for it in {id}", waiting.rank);
            Fault {
                rank,
                why: FaultKind::Left,
                text,
            }
        })
    }

    /// Returns true if the rank's program ended after the rank had received the failure of another
    /// rank.
    fn ended_by_another(&self, rank: usize) -> bool {
        let failure = self.ending(rank).and_then(|ending| ending.failure.as_ref());
        failure.is_some_and(|failure| failure.rank != rank)
    }

    fn ending(&self, rank: usize) -> Option<&ProgramExit> {
        self.rank(rank)?.ending.as_ref()
    }

    /// Returns the rank whose last recorded activity is the oldest. A rank without a file counts as
    /// the oldest.
    fn silent_first(&self, ranks: Vec<usize>) -> Option<usize> {
        ranks.into_iter().min_by_key(|rank| {
            self.rank(*rank)
                .map(|flight| self.since(flight, flight.last_sign()))
        })
    }

    /// Returns the fault of a rank that other ranks wait for, or whose process is lost, with what
    /// is known about it.
    fn not_there(&self, rank: usize, waits: &[BlockedWait<'_>]) -> Fault {
        let last = self.rank(rank).and_then(|flight| {
            flight
                .operations
                .iter()
                .rfind(|operation| operation.is_taken())
        });
        let last = last.map_or("; no operation yet".into(), |operation| {
            format!("; last operation: {}", operation.id)
        });
        let pid = self.rank(rank).map_or(0, |flight| flight.pid);
        let (why, text) = match (self.rank(rank), self.life(rank)) {
            (None, _) => (
                FaultKind::Absent,
                "has no file: its process did not begin the launch, or uses another folder".into(),
            ),
            (Some(flight), ProcessState::Gone) if flight.ending.is_none() => (
                FaultKind::Gone,
                format!("is gone: process {pid} no longer exists{last}"),
            ),
            (Some(flight), ProcessState::Stopped) if flight.ending.is_none() => (
                FaultKind::Stopped,
                format!("is stopped: process {pid} is stopped by a signal or a debugger{last}"),
            ),
            _ => (FaultKind::Absent, format!("is missing{last}")),
        };
        let waiting = waits
            .iter()
            .filter(|waiting| waiting.missing.contains(&rank))
            .map(|waiting| waiting.rank);
        let waiting: Vec<_> = waiting.sorted().dedup().collect();
        let first = waits.iter().find(|waiting| waiting.missing.contains(&rank));
        let awaited = first.map(|first| {
            format!(
                "; ranks {waiting:?} wait for it, first in {}",
                first.operation.id
            )
        });
        Fault {
            rank,
            why,
            text: text + &awaited.unwrap_or_default(),
        }
    }
}

/// Returns the ranks that others wait for and that do not wait themselves.
fn needed(waits: &[BlockedWait<'_>]) -> Vec<usize> {
    let waits_too = |rank: usize| {
        waits
            .iter()
            .any(|waiting| waiting.rank == rank && !waiting.missing.is_empty())
    };
    let needed = waits
        .iter()
        .flat_map(|waiting| waiting.missing.iter().copied());
    needed
        .filter(|rank| !waits_too(*rank))
        .sorted()
        .dedup()
        .collect()
}

/// Finds ranks that wait for each other in a cycle. Ranks that wait in several operations, or for
/// any rank, are ignored, because they may not be blocked.
fn circle(waits: &[BlockedWait<'_>]) -> Option<Fault> {
    let of = |rank: usize| {
        let mut waits = waits.iter().filter(|waiting| waiting.rank == rank);
        let first = waits.next().filter(|waiting| !waiting.is_for_any)?;
        waits.next().is_none().then_some(first)
    };
    // Starts with the rank that began to wait last, because its wait closed the cycle.
    let from_last = waits
        .iter()
        .sorted_by_key(|waiting| Reverse((waiting.since, waiting.rank)));
    from_last
        .filter_map(|start| of(start.rank))
        .find_map(|start| {
            let mut paths = vec![vec![start]];
            let mut seen = Vec::new();
            while let Some(path) = paths.pop() {
                let last = path.last().expect("a path is never empty");
                if last.missing.contains(&start.rank) {
                    let next = path
                        .iter()
                        .skip(1)
                        .map(|waiting| waiting.rank)
                        .chain([start.rank]);
                    let said = path.iter().zip(next).map(|(waiting, next)| {
                        format!(
                            "rank {} waits in {} for rank {next}",
                            waiting.rank, waiting.operation.id
                        )
                    });
                    let text = format!("closed a deadlock: {}", said.into_iter().join(", "));
                    return Some(Fault {
                        rank: start.rank,
                        why: FaultKind::Deadlock,
                        text,
                    });
                }
                for next in last.missing.iter().filter_map(|rank| of(*rank)) {
                    if !seen.contains(&next.rank) {
                        seen.push(next.rank);
                        paths.push(path.iter().copied().chain([next]).collect());
                    }
                }
            }
            None
        })
}

/// Describes how the call order of `rank`, which `called` something else than the others `agreed`
/// on, differs from theirs. Compares it with the next collective of the channel.
fn order(
    meetings: &[CollectiveTrace<'_>],
    rank: usize,
    called: &Operation,
    agreed: &Operation,
) -> String {
    let at = |seq: u64| {
        let same = |meeting: &&CollectiveTrace<'_>| {
            let (_, first) = meeting.called[0];
            first.id.seq == seq
                && first.id.ranks == called.id.ranks
                && first.channel == called.channel
        };
        meetings.iter().find(same)
    };
    let next = at(called.id.seq + 1);
    let of_rank = |meeting: &CollectiveTrace<'_>| {
        meeting
            .called
            .iter()
            .find(|(caller, _)| *caller == rank)
            .map(|(_, operation)| operation.difference(agreed).is_none())
    };
    let others = |meeting: &CollectiveTrace<'_>| {
        let mut others = meeting.called.iter().filter(|(caller, _)| *caller != rank);
        others.any(|(_, operation)| operation.difference(called).is_none())
    };
    match (
        next.and_then(of_rank).unwrap_or(false),
        next.is_some_and(others),
    ) {
        (true, true) => "; it makes these two calls in another order".into(),
        (true, false) => "; the others' call is its next one: it makes one call too many".into(),
        (false, true) => "; its call is the others' next one: it has left one call out".into(),
        (false, false) => String::new(),
    }
}
