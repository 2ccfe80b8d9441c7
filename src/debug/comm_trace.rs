//! [`trace_comm`]: a part of a program, and what it sent.

use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

use super::CommCounts;
use crate::comm::Op;
use crate::watch::{self, LayoutChange, Log};

/// Runs `program` and says what the calling thread sends meanwhile, in forward and in backward. One inside
/// another sees what is its own, the outer one all.
///
/// Local: nothing more is sent, and every rank may watch or not.
pub fn trace_comm<T>(program: impl FnOnce() -> T) -> (T, CommTrace) {
    let (value, log) = watch::watch(program);
    (value, CommTrace(log))
}

/// What a rank sent, and why.
///
/// Displays as the table of [`counts`](Self::counts), and one line for each of the [`changes`](Self::changes).
#[derive(Debug, Clone)]
pub struct CommTrace(Log);

/// A tensor that changed its layout, or whose gradient did; derefs to what is said of the [`LayoutChange`].
///
/// Displays as `src/main.rs:12 matmul in blocks.0.up, forward: [4, 8] [S(0)] -> [R]: all_gather of 2 ranks, 128
/// bytes`.
#[derive(Debug, Clone)]
pub struct TracedLayoutChange {
    change: Arc<LayoutChange>,
    /// What was sent for it, in order; nothing where each rank had what it needs.
    pub collectives: Vec<TracedCollective>,
}

/// One collective.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TracedCollective {
    /// What it did.
    pub op: Op,
    /// Number of ranks in its group.
    pub ranks: usize,
    /// Payload bytes, as the [`Ledger`](crate::comm::Ledger) counts them.
    pub bytes: u64,
}

impl CommTrace {
    /// The collectives, counted by module, operator, operation and phase.
    pub fn counts(&self) -> CommCounts {
        CommCounts::of(&self.0.collectives)
    }

    /// The changes of layout, in order: those that operators and methods of DTensors made, each where it was
    /// made for the first time. An input that is there already, for a clone of it was brought there, is none.
    pub fn changes(&self) -> Vec<TracedLayoutChange> {
        let changed = |change: &Arc<LayoutChange>| {
            let steps = self
                .0
                .collectives
                .iter()
                .filter(|seen| seen.change.as_ref().is_some_and(|cause| Arc::ptr_eq(cause, change)));
            let step = |seen: &watch::Seen| {
                let entry = &seen.entry;
                TracedCollective { op: entry.op, ranks: entry.group_size, bytes: entry.bytes }
            };
            TracedLayoutChange { change: change.clone(), collectives: steps.map(step).collect() }
        };
        self.0.changes.iter().map(changed).collect()
    }
}

impl TracedLayoutChange {
    /// Payload bytes of all its collectives.
    pub fn bytes(&self) -> u64 {
        self.collectives.iter().map(|collective| collective.bytes).sum()
    }
}

impl Deref for TracedLayoutChange {
    type Target = LayoutChange;

    fn deref(&self) -> &LayoutChange {
        &self.change
    }
}

impl fmt::Display for TracedLayoutChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let LayoutChange { origin, from, to, summed, shape, phase } = &*self.change;
        write!(f, "{}:{} {}", origin.at.file(), origin.at.line(), origin.operator)?;
        if let Some(module) = &origin.module {
            write!(f, " in {module}")?;
        }
        write!(f, ", {phase}: {shape:?} ")?;
        match from == to {
            true => write!(f, "{from}")?,
            false => write!(f, "{from} -> {to}")?,
        }
        if !summed.is_empty() {
            write!(f, ", summed over {}", summed.join(", "))?;
        }
        for (at, TracedCollective { op, ranks, bytes }) in self.collectives.iter().enumerate() {
            let separator = if at == 0 { ':' } else { ',' };
            write!(f, "{separator} {op} of {ranks} ranks, {bytes} bytes")?;
        }
        Ok(())
    }
}

impl fmt::Display for CommTrace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.counts())?;
        self.changes().iter().try_for_each(|change| write!(f, "\n{change}"))
    }
}
