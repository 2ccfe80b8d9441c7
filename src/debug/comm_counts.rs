//! [`CommCounts`]: collectives by module and operator.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use itertools::Itertools;
use serde::Serialize;
use serde_json::json;

use crate::comm::{CallTotals, Op, Phase};
use crate::watch::Seen;

/// Number of calls and bytes of one kind of collective.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct CommCount {
    /// Path of the module whose forward, or its gradient, issued the collective: a layer of
    /// [`nn`](crate::nn) or a [unit](fn@crate::fsdp::unit). The path of the model is `root`; the
    /// path is empty outside all modules. For a collective that no operator issued, this is its
    /// label, which for a unit is the unit's path.
    pub module: Arc<str>,
    /// Operator or method of a DTensor that caused the collective, if any.
    pub operator: Option<&'static str>,
    /// Operation.
    #[serde(rename = "collective")]
    pub op: Op,
    /// Pass in which the collective ran.
    pub phase: Phase,
    /// Number of calls and payload bytes.
    #[serde(flatten)]
    pub total: CallTotals,
}

/// Collectives of a rank, counted by module, operator, operation and phase.
///
/// [`Display`](fmt::Display) writes a table:
///
/// ```text
/// module    operator  collective  phase     calls  bytes
/// blocks.0  -         all_gather  forward       1   4096
/// blocks.0  linear    all_reduce  forward       1    512
/// total                                         2   4608
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CommCounts(Vec<CommCount>);

impl CommCounts {
    pub(super) fn of(collectives: &[Seen]) -> Self {
        let mut totals: BTreeMap<_, CallTotals> = BTreeMap::new();
        for Seen {
            call,
            module,
            change,
        } in collectives
        {
            let module = match change {
                Some(_) => module.clone().unwrap_or_default(),
                None => call.label.clone(),
            };
            let operator = change.as_ref().map(|change| change.origin.operator);
            let total = totals
                .entry((module, operator, call.op, call.phase))
                .or_default();
            *total = [
                *total,
                CallTotals {
                    calls: 1,
                    bytes: call.bytes,
                },
            ]
            .into_iter()
            .sum();
        }
        Self(
            totals
                .into_iter()
                .map(|((module, operator, op, phase), total)| CommCount {
                    module,
                    operator,
                    op,
                    phase,
                    total,
                })
                .collect(),
        )
    }

    /// Returns the counts, sorted by module, operator, operation and phase.
    pub fn rows(&self) -> &[CommCount] {
        &self.0
    }

    /// Returns the totals of the rows that `select` accepts.
    pub fn total(&self, select: impl Fn(&CommCount) -> bool) -> CallTotals {
        self.0
            .iter()
            .filter(|row| select(row))
            .map(|row| row.total)
            .sum()
    }

    /// Returns the totals of the module at `path` and all modules inside it. The paths of a model's
    /// modules do not begin with `root`: for the entire model, use [`total`](Self::total).
    pub fn inside(&self, path: &str) -> CallTotals {
        let below = |module: &str| {
            module
                .strip_prefix(path)
                .is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
        };
        self.total(|row| below(&row.module))
    }

    /// Returns the counts as JSON: `{"calls", "bytes", "collectives": [{"module", "operator",
    /// "collective", "phase", "calls", "bytes"}]}`, where `operator` may be null.
    pub fn to_json(&self) -> String {
        let CallTotals { calls, bytes } = self.total(|_| true);
        json!({ "calls": calls, "bytes": bytes, "collectives": self.0 }).to_string()
    }
}

impl fmt::Display for CommCounts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut lines = vec![
            [
                "module",
                "operator",
                "collective",
                "phase",
                "calls",
                "bytes",
            ]
            .map(String::from),
        ];
        for CommCount {
            module,
            operator,
            op,
            phase,
            total: CallTotals { calls, bytes },
        } in &self.0
        {
            let operator = operator.unwrap_or("-").into();
            let module = if module.is_empty() {
                "-".into()
            } else {
                module.to_string()
            };
            lines.push([
                module,
                operator,
                op.to_string(),
                phase.to_string(),
                calls.to_string(),
                bytes.to_string(),
            ]);
        }
        let CallTotals { calls, bytes } = self.total(|_| true);
        lines.push(["total", "", "", "", &calls.to_string(), &bytes.to_string()].map(String::from));
        let widths: [usize; 6] =
            std::array::from_fn(|at| lines.iter().map(|line| line[at].len()).max().unwrap_or(0));
        let line = |line: &[String; 6]| {
            line.iter()
                .enumerate()
                .map(|(at, cell)| match at {
                    0..4 => format!("{cell:<0$}", widths[at]),
                    _ => format!("{cell:>0$}", widths[at]),
                })
                .join("  ")
        };
        write!(f, "{}", lines.iter().map(line).join("\n"))
    }
}
