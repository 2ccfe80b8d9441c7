//! [`LaunchTrace`] as text.

use std::fmt::{self, Write};
use std::time::{Duration, SystemTime};

use crate::format::{ExitKind, OpOutcome};
use crate::merge::LaunchTrace;
use crate::op::Op;
use crate::operation::Operation;
use crate::process_state::ProcessState;
use crate::read::RankTrace;

/// Default number of operations to print for each rank.
const LAST: usize = 5;

impl LaunchTrace {
    /// Returns the same text as [`Display`](fmt::Display), but with the last `count` operations of
    /// each rank.
    pub fn text(&self, count: usize) -> String {
        let mut text = String::new();
        self.write(&mut text, count)
            .expect("writing to a string does not fail");
        text
    }

    fn write(&self, f: &mut impl Write, count: usize) -> fmt::Result {
        let started = self
            .started()
            .and_then(|started| SystemTime::now().duration_since(started).ok());
        let started = started
            .map(|ago| format!(", begun {} ago", time(ago)))
            .unwrap_or_default();
        writeln!(f, "{}: {} ranks{started}", self.launch, self.size)?;
        match self.fault() {
            Some(fault) => writeln!(f, "  at fault: {fault}")?,
            None if self.is_over() => writeln!(f, "  every rank has returned")?,
            None => writeln!(f, "  nothing is wrong: no rank waits for a missing rank")?,
        }
        for waiting in self
            .waits()
            .iter()
            .filter(|waiting| !waiting.missing.is_empty())
        {
            let any = if waiting.is_for_any { "any of " } else { "" };
            let rank = waiting.rank;
            let id = &waiting.operation.id;
            let missing = &waiting.missing;
            writeln!(
                f,
                "  rank {rank} waits in {id} for {any}ranks {missing:?}, since {}",
                time(waiting.since)
            )?;
        }
        let differing = self.meetings();
        for meeting in &differing {
            for (rank, differs) in meeting.differences() {
                writeln!(
                    f,
                    "  rank {rank} differs in {}: {differs}",
                    meeting.agreed().1.id
                )?;
            }
        }
        let without: Vec<_> = (0..self.size)
            .filter(|rank| self.rank(*rank).is_none())
            .collect();
        if !without.is_empty() {
            writeln!(f, "  no flight file: ranks {without:?}")?;
        }
        for (flight, life) in self.ranks.iter().zip(&self.lives) {
            writeln!(f, "rank {}: {}", flight.rank, state(flight, *life))?;
            let last = flight.operations.len().saturating_sub(count);
            for operation in &flight.operations[last..] {
                writeln!(f, "  {}", line(operation))?;
            }
        }
        Ok(())
    }

    fn is_over(&self) -> bool {
        self.ranks.len() == self.size
            && self.ranks.iter().all(|flight| {
                flight
                    .ending
                    .as_ref()
                    .is_some_and(|ending| ending.how == ExitKind::Returned)
            })
    }
}

/// Shows the last five operations of each rank.
impl fmt::Display for LaunchTrace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.text(LAST).trim_end())
    }
}

fn state(flight: &RankTrace, life: ProcessState) -> String {
    let program = match &flight.ending {
        None => match life {
            ProcessState::Gone => "its process no longer exists".into(),
            ProcessState::Stopped => "its process is stopped".into(),
            ProcessState::Runs => "is running".into(),
            ProcessState::Unknown => "has not ended, according to its file".into(),
        },
        Some(ending) => {
            let did = match ending.how {
                ExitKind::Returned => "returned",
                ExitKind::Failed => "failed",
                ExitKind::Panicked => "panicked",
                ExitKind::Exited => "exited",
            };
            let text = if ending.text.is_empty() {
                String::new()
            } else {
                format!(": {}", ending.text)
            };
            format!("{did} at {}{text}", time(ending.at))
        }
    };
    format!(
        "{program} (process {} of {}, {} operations)",
        flight.pid, flight.host, flight.posted
    )
}

/// Returns a line like `#1 at 1.204 s: barrier #1 .. (done, waited 3.100 ms, last to call was rank
/// 1)`.
fn line(operation: &Operation) -> String {
    let waited = |until: Duration| {
        operation
            .waited
            .map(|from| time(until.saturating_sub(from)))
    };
    let then = match (operation.over, operation.waited) {
        (None, None) => "posted".into(),
        (None, Some(from)) => format!("waiting since {}", time(from)),
        (Some((at, OpOutcome::Done(last))), _) => {
            let of = if operation.id.op == Op::Receive {
                "received from"
            } else {
                "last to call was"
            };
            let last = last
                .map(|rank| format!(", {of} rank {rank}"))
                .unwrap_or_default();
            format!("done, waited {}{last}", waited(at).unwrap_or_default())
        }
        (Some((at, over)), _) => {
            let waited = waited(at)
                .map(|waited| format!(", waited {waited}"))
                .unwrap_or_default();
            format!("{}{waited}", over.name())
        }
    };
    format!(
        "#{} at {}: {operation} ({then})",
        operation.index,
        time(operation.posted)
    )
}

/// Formats a time with a unit that fits its magnitude.
fn time(time: Duration) -> String {
    let seconds = time.as_secs();
    match seconds {
        0..60 => [(1e9, "s"), (1e6, "ms"), (1e3, "us")]
            .into_iter()
            .find(|(unit, _)| time.as_nanos() as f64 >= *unit)
            .map_or_else(
                || format!("{} ns", time.as_nanos()),
                |(unit, name)| format!("{:.3} {name}", time.as_nanos() as f64 / unit),
            ),
        60..3600 => format!("{} min {} s", seconds / 60, seconds % 60),
        _ => format!("{} h {} min", seconds / 3600, seconds / 60 % 60),
    }
}
