//! [`Fault`]: which rank is at fault, and why.
//!
//! What is known for certain comes first:
//!
//! 1. A program that failed by itself, as its rank has noted: a panic, an error, a call that cannot be right, a process that
//!    it ended in the middle. Of several the one that did so first.
//! 2. Calls of one collective that differ: the rank outside the majority; of two, the one that came last.
//! 3. What ranks were told of two that differ otherwise: in a message and its receive, or in what all hold alike.
//! 4. A process that is gone, or stopped, while its program had not ended: one that others wait for, or the only ones.
//! 5. Waits in a circle.
//! 6. Who is waited for, and waits for nobody: it has returned, or is somewhere else. If fewer wait than have returned,
//!    those who wait make a call too many.
//! 7. Where every process is gone or stopped: the one whose rank gave its last sign first.

use std::cmp::Reverse;
use std::fmt;

use itertools::Itertools;

use super::merge::{BlockedWait, CollectiveTrace, LaunchTrace};
use super::operation::Operation;
use super::process_state::ProcessState;
use super::program_exit::{ExitKind, ProgramExit};

/// The rank at fault; displays as a line that names it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    /// The rank. Of a deadlock, the one of the circle that waited last.
    pub rank: usize,
    /// Why.
    pub why: FaultKind,
    /// What it did, behind "rank 1".
    pub text: String,
}

/// Why a rank is at fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FaultKind {
    /// Its program panicked.
    Panicked,
    /// Its program returned an error, or called what cannot be right.
    Failed,
    /// Its process ended in the middle of its program, such as by [`exit`](std::process::exit), and nothing had failed before.
    Exited,
    /// It called otherwise than the others, or holds other values.
    Disagrees,
    /// Its process is gone.
    Gone,
    /// Its process is stopped.
    Stopped,
    /// It waits for a rank that waits for it.
    Deadlock,
    /// It returned while others needed it: it made a call too few.
    Left,
    /// It called what most others have returned without: a call too many.
    Surplus,
    /// It is waited for, and does not come.
    Absent,
}

impl FaultKind {
    /// Its name.
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
    /// The rank at fault, if anything is wrong: who waits may only be early, and who is waited for slow.
    pub fn fault(&self) -> Option<Fault> {
        let waits = self.waits();
        self.failed_by_itself()
            .or_else(|| self.disagrees())
            .or_else(|| self.told_to_differ())
            .or_else(|| self.lost(&waits))
            .or_else(|| circle(&waits))
            .or_else(|| self.waited_for(&waits))
            .or_else(|| self.all_lost(&waits))
    }

    fn failed_by_itself(&self) -> Option<Fault> {
        let own = |ending: &ProgramExit, rank: usize| match &ending.failure {
            Some(failure) => failure.is_own && failure.rank == rank,
            None => ending.how != ExitKind::Returned,
        };
        let failed = self.ranks.iter().filter_map(|flight| Some((flight, flight.ending.as_ref()?)));
        let failed = failed.filter(|(flight, ending)| own(ending, flight.rank));
        let (flight, ending) = failed.min_by_key(|(flight, ending)| self.since(flight, ending.at))?;
        let text = match &ending.failure {
            // A program may return something else after a call of its own failed, or nothing.
            Some(failure) if ending.how != ExitKind::Panicked && !failure.text.contains(&ending.text) => &failure.text,
            _ => &ending.text,
        };
        let (why, did) = match ending.how {
            ExitKind::Panicked => (FaultKind::Panicked, "panicked"),
            ExitKind::Exited if ending.failure.is_none() => (FaultKind::Exited, "exited"),
            ExitKind::Failed | ExitKind::Returned | ExitKind::Exited => (FaultKind::Failed, "failed"),
        };
        Some(Fault { rank: flight.rank, why, text: format!("{did}: {text}") })
    }

    fn disagrees(&self) -> Option<Fault> {
        let failed = self.failed();
        let meetings = self.meetings();
        let at_fault = meetings.iter().find(|meeting| {
            // What is called after a failure proves nothing: its program may clean up.
            let before = |(rank, operation): &&(usize, &Operation)| {
                let flight = self.rank(*rank).expect("who has called has a file");
                failed.is_none_or(|failed| self.since(flight, operation.posted) <= failed)
            };
            let mut before = meeting.called.iter().filter(before).map(|(_, operation)| operation);
            let first = before.next();
            first.is_some_and(|first| before.any(|other| other.difference(first).is_some()))
        })?;
        let (other, agreed) = at_fault.agreed();
        let (rank, differs) = at_fault.differences().into_iter().next()?;
        let (_, called) = at_fault.called.iter().find(|(caller, _)| *caller == rank)?;
        let order = order(&meetings, rank, called, agreed);
        let text = format!("called {called}, where rank {other} called {agreed}: {differs}{order}");
        Some(Fault { rank, why: FaultKind::Disagrees, text })
    }

    fn told_to_differ(&self) -> Option<Fault> {
        let told = self.ranks.iter().filter_map(|flight| flight.ending.as_ref()?.failure.as_ref());
        let failure = told.into_iter().find(|failure| failure.is_difference)?;
        Some(Fault { rank: failure.rank, why: FaultKind::Disagrees, text: format!("differs: {}", failure.text) })
    }

    fn lost(&self, waits: &[BlockedWait<'_>]) -> Option<Fault> {
        let needed = needed(waits).into_iter().filter(|rank| self.is_lost(*rank)).collect_vec();
        let only = || Some(self.all_that_are_lost()).filter(|lost| lost.len() < self.ranks.len());
        let rank = self.silent_first(needed).or_else(|| self.silent_first(only()?))?;
        Some(self.not_there(rank, waits))
    }

    fn all_lost(&self, waits: &[BlockedWait<'_>]) -> Option<Fault> {
        let rank = self.silent_first(self.all_that_are_lost())?;
        let Fault { why, text, .. } = self.not_there(rank, waits);
        Some(Fault { rank, why, text: text + "; no rank's process goes on, and this rank's last sign is the oldest" })
    }

    /// Whether the rank's process is gone or stopped, and its program had not ended.
    fn is_lost(&self, rank: usize) -> bool {
        self.ending(rank).is_none() && matches!(self.life(rank), ProcessState::Gone | ProcessState::Stopped)
    }

    fn all_that_are_lost(&self) -> Vec<usize> {
        self.ranks.iter().map(|flight| flight.rank).filter(|rank| self.is_lost(*rank)).collect()
    }

    fn waited_for(&self, waits: &[BlockedWait<'_>]) -> Option<Fault> {
        let needed = needed(waits);
        let returned = |rank: &usize| self.ending(*rank).is_some_and(|ending| ending.how == ExitKind::Returned);
        let (left, mut others): (Vec<_>, Vec<_>) = needed.into_iter().partition(returned);
        others.retain(|rank| !self.ended_by_another(*rank));
        if let Some(rank) = self.silent_first(others) {
            return Some(self.not_there(rank, waits));
        }
        let rank = self.silent_first(left)?;
        let waiting = waits.iter().find(|waiting| waiting.missing.contains(&rank))?;
        let id = &waiting.operation.id;
        let here = id.ranks.len() - waiting.missing.len();
        let is_surplus = !id.op.is_message() && here < waiting.missing.len() && waiting.missing.iter().all(returned);
        Some(if is_surplus {
            let text = format!("called {id}, a call too many: ranks {:?} have returned without it", waiting.missing);
            Fault { rank: waiting.rank, why: FaultKind::Surplus, text }
        } else {
            let text = format!("returned, and {id}, which rank {} waits in, still needs it", waiting.rank);
            Fault { rank, why: FaultKind::Left, text }
        })
    }

    /// Whether the rank's program ended since it was told of another rank.
    fn ended_by_another(&self, rank: usize) -> bool {
        let failure = self.ending(rank).and_then(|ending| ending.failure.as_ref());
        failure.is_some_and(|failure| failure.rank != rank)
    }

    fn ending(&self, rank: usize) -> Option<&ProgramExit> {
        self.rank(rank)?.ending.as_ref()
    }

    /// The one that gave its last sign first; of one without a file there was none.
    fn silent_first(&self, ranks: Vec<usize>) -> Option<usize> {
        ranks.into_iter().min_by_key(|rank| self.rank(*rank).map(|flight| self.since(flight, flight.last_sign())))
    }

    /// A rank that is waited for, and what is known of it.
    fn not_there(&self, rank: usize, waits: &[BlockedWait<'_>]) -> Fault {
        let last = self.rank(rank).and_then(|flight| flight.operations.iter().rfind(|operation| operation.is_taken()));
        let last = last.map_or(", before any operation".into(), |operation| format!(", after {}", operation.id));
        let pid = self.rank(rank).map_or(0, |flight| flight.pid);
        let (why, text) = match (self.rank(rank), self.life(rank)) {
            (None, _) => {
                (FaultKind::Absent, "has no file: its process has not begun the launch, or writes elsewhere".into())
            }
            (Some(flight), ProcessState::Gone) if flight.ending.is_none() => {
                (FaultKind::Gone, format!("is gone, with its process {pid}{last}"))
            }
            (Some(flight), ProcessState::Stopped) if flight.ending.is_none() => {
                (FaultKind::Stopped, format!("is stopped, with its process {pid}{last}"))
            }
            _ => (FaultKind::Absent, format!("has not come{last}")),
        };
        let waiting = waits.iter().filter(|waiting| waiting.missing.contains(&rank)).map(|waiting| waiting.rank);
        let waiting: Vec<_> = waiting.sorted().dedup().collect();
        let first = waits.iter().find(|waiting| waiting.missing.contains(&rank));
        let awaited = first.map(|first| format!("; ranks {waiting:?} wait for it, first in {}", first.operation.id));
        Fault { rank, why, text: text + &awaited.unwrap_or_default() }
    }
}

/// The ranks that others wait for, and that wait for nobody themselves.
fn needed(waits: &[BlockedWait<'_>]) -> Vec<usize> {
    let waits_too = |rank: usize| waits.iter().any(|waiting| waiting.rank == rank && !waiting.missing.is_empty());
    let needed = waits.iter().flat_map(|waiting| waiting.missing.iter().copied());
    needed.filter(|rank| !waits_too(*rank)).sorted().dedup().collect()
}

/// Ranks that wait for each other. Of a rank that waits in several operations, or for anybody, nothing is claimed.
fn circle(waits: &[BlockedWait<'_>]) -> Option<Fault> {
    let of = |rank: usize| {
        let mut waits = waits.iter().filter(|waiting| waiting.rank == rank);
        let first = waits.next().filter(|waiting| !waiting.is_for_any)?;
        waits.next().is_none().then_some(first)
    };
    // From the one that waited last, whose wait closed it.
    let from_last = waits.iter().sorted_by_key(|waiting| Reverse((waiting.since, waiting.rank)));
    from_last.filter_map(|start| of(start.rank)).find_map(|start| {
        let mut paths = vec![vec![start]];
        let mut seen = Vec::new();
        while let Some(path) = paths.pop() {
            let last = path.last().expect("a path begins somewhere");
            if last.missing.contains(&start.rank) {
                let next = path.iter().skip(1).map(|waiting| waiting.rank).chain([start.rank]);
                let said = path.iter().zip(next).map(|(waiting, next)| {
                    format!("rank {} waits in {} for rank {next}", waiting.rank, waiting.operation.id)
                });
                let text = format!("closed a deadlock: {}", said.into_iter().join(", "));
                return Some(Fault { rank: start.rank, why: FaultKind::Deadlock, text });
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

/// What the calls before and after say of a rank that `called` what the others did not.
fn order(meetings: &[CollectiveTrace<'_>], rank: usize, called: &Operation, agreed: &Operation) -> String {
    let at = |seq: u64| {
        let same = |meeting: &&CollectiveTrace<'_>| {
            let (_, first) = meeting.called[0];
            first.id.seq == seq && first.id.ranks == called.id.ranks && first.channel == called.channel
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
    match (next.and_then(of_rank).unwrap_or(false), next.is_some_and(others)) {
        (true, true) => "; it makes the two calls in another order".into(),
        (true, false) => "; that is its next call: it makes one too many".into(),
        (false, true) => "; that is the others' next call: it has left one out".into(),
        (false, false) => String::new(),
    }
}
