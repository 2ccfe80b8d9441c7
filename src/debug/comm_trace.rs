//! [`trace_comm`]: runs a closure and records its communication.

use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

use super::CommCounts;
use crate::comm::{CallInfo, Op};
use crate::watch::{self, LayoutChange, Log};

/// Runs `program` and records the collectives that the calling thread issues, in forward and in
/// backward. Calls may be nested: the inner one records its own closure, the outer one everything.
///
/// Local: nothing additional is sent, and each rank may trace or not.
pub fn trace_comm<T>(program: impl FnOnce() -> T) -> (T, CommTrace) {
    let (value, log) = watch::watch(program);
    (value, CommTrace(log))
}

/// Collectives that a rank issued, and what caused them.
///
/// [`Display`](fmt::Display) writes the table of [`counts`](Self::counts), and one line for each of
/// the [`changes`](Self::changes).
#[derive(Debug, Clone)]
pub struct CommTrace(Log);

/// A change of the layout of a tensor or of its gradient, with its collectives. It dereferences to
/// the [`LayoutChange`].
///
/// [`Display`](fmt::Display) writes `src/main.rs:12 matmul in blocks.0.up, forward: [4, 8] [S(0)]
/// -> [R]: all_gather of 2 ranks, 128 bytes`.
#[derive(Debug, Clone)]
pub struct TracedLayoutChange {
    change: Arc<LayoutChange>,
    /// Collectives of the change, in order. Empty if each rank already had the data that it needed.
    pub collectives: Vec<TracedCollective>,
}

/// One collective of a layout change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TracedCollective {
    /// Operation.
    pub op: Op,
    /// Number of ranks in its group.
    pub ranks: usize,
    /// Payload bytes, as the [`Ledger`](crate::comm::Ledger) counts them.
    pub bytes: u64,
}

impl CommTrace {
    /// Returns the collectives, counted by module, operator, operation and phase.
    pub fn counts(&self) -> CommCounts {
        CommCounts::of(&self.0.collectives)
    }

    /// Returns the changes of layout that operators and methods of DTensors made, in order. A
    /// result that is reused from the cache of a tensor's clones is listed only once, at its first
    /// use.
    pub fn changes(&self) -> Vec<TracedLayoutChange> {
        let changed = |change: &Arc<LayoutChange>| {
            let steps = self.0.collectives.iter().filter(|seen| {
                seen.change
                    .as_ref()
                    .is_some_and(|cause| Arc::ptr_eq(cause, change))
            });
            let step = |seen: &watch::Seen| {
                let CallInfo {
                    op,
                    group_size,
                    bytes,
                    ..
                } = seen.call;
                TracedCollective {
                    op,
                    ranks: group_size,
                    bytes,
                }
            };
            TracedLayoutChange {
                change: change.clone(),
                collectives: steps.map(step).collect(),
            }
        };
        self.0.changes.iter().map(changed).collect()
    }
}

impl TracedLayoutChange {
    /// Returns the payload bytes of all collectives of the change.
    pub fn bytes(&self) -> u64 {
        self.collectives
            .iter()
            .map(|collective| collective.bytes)
            .sum()
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
        let LayoutChange {
            origin,
            from,
            to,
            summed,
            shape,
            phase,
        } = &*self.change;
        write!(
            f,
            "{}:{} {}",
            origin.at.file(),
            origin.at.line(),
            origin.operator
        )?;
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
        self.changes()
            .iter()
            .try_for_each(|change| write!(f, "\n{change}"))
    }
}
