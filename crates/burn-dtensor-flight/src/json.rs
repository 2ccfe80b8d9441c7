//! [`LaunchTrace`] as JSON.

use std::time::{Duration, UNIX_EPOCH};

use itertools::Itertools;
use serde_json::{Value, json};

use crate::fault::Fault;
use crate::format::{ExitKind, OpOutcome};
use crate::merge::{BlockedWait, LaunchTrace};
use crate::operation::Operation;
use crate::process_state::ProcessState;
use crate::read::RankTrace;

impl LaunchTrace {
    /// Returns the trace as JSON, with the last `count` operations of each rank:
    ///
    /// ```text
    /// {"launch": 0, "shrunk": 0, "process": null, "size": 2, "started_ns": 1763884800000000000,
    ///  "fault": {"rank": 1, "why": "gone", "text": "is gone: .."},
    ///  "waits": [{"rank": 0, "operation": "barrier", "seq": 1, "label": "step", "group": [0, 1], "since_ns": 9000,
    ///             "missing": [1], "any": false}],
    ///  "differences": [{"rank": 1, "operation": "barrier", "seq": 1, "group": [0, 1], "differs": "label `a` vs `b`"}],
    ///  "ranks": [{"rank": 0, "host": "a", "pid": 4711, "process": "gone", "program": "running", "text": null,
    ///             "ended_ns": null, "failure": null, "posted": 2, "operations": [
    ///    {"index": 0, "operation": "barrier", "seq": 0, "label": "start", "group": [0, 1], "channel": "",
    ///     "phase": "other", "bytes": 0, "tensors": [], "tensor_count": 0, "posted_ns": 1000, "waited_ns": 1100,
    ///     "over_ns": 2000, "outcome": "done", "last": 1, "partner": null, "tag": null}, ..]}, ..]}
    /// ```
    ///
    /// Times are since the launch's start. Those of an operation are measured on its rank's host,
    /// those of waits are relative to the host that began first.
    pub fn to_json(&self, count: usize) -> String {
        let started = self
            .started()
            .and_then(|started| started.duration_since(UNIX_EPOCH).ok());
        let waits = self.waits();
        let waits = waits.iter().filter(|waiting| !waiting.missing.is_empty());
        json!({
            "launch": self.launch.number,
            "shrunk": self.launch.shrunk,
            "process": self.launch.process,
            "size": self.size,
            "started_ns": started.map(nanos),
            "fault": self.fault().map(|Fault { rank, why, text }| json!({ "rank": rank, "why": why.name(), "text": text })),
            "waits": waits.map(waiting).collect_vec(),
            "differences": self.differences(),
            "ranks": self.ranks.iter().zip(&self.lives).map(|(flight, life)| rank(flight, *life, count)).collect_vec(),
        })
        .to_string()
    }

    fn differences(&self) -> Vec<Value> {
        let meetings = self.meetings();
        let differing = meetings.iter().flat_map(|meeting| {
            let (_, agreed) = meeting.agreed();
            meeting.differences().into_iter().map(move |(rank, differs)| {
                let id = &agreed.id;
                json!({ "rank": rank, "operation": id.op.name(), "seq": id.seq, "group": *id.ranks, "differs": differs })
            })
        });
        differing.collect()
    }
}

fn nanos(time: Duration) -> u64 {
    time.as_nanos() as u64
}

fn waiting(
    BlockedWait {
        rank,
        operation,
        since,
        missing,
        is_for_any,
    }: &BlockedWait<'_>,
) -> Value {
    let id = &operation.id;
    json!({
        "rank": rank, "operation": id.op.name(), "seq": id.seq, "label": *id.label, "group": *id.ranks,
        "since_ns": nanos(*since), "missing": missing, "any": is_for_any,
    })
}

fn rank(flight: &RankTrace, life: ProcessState, count: usize) -> Value {
    let process = match life {
        ProcessState::Runs => "runs",
        ProcessState::Stopped => "stopped",
        ProcessState::Gone => "gone",
        ProcessState::Unknown => "unknown",
    };
    let program = flight
        .ending
        .as_ref()
        .map_or("running", |ending| match ending.how {
            ExitKind::Returned => "returned",
            ExitKind::Failed => "failed",
            ExitKind::Panicked => "panicked",
            ExitKind::Exited => "exited",
        });
    let ending = flight.ending.as_ref();
    let failure = ending.and_then(|ending| ending.failure.as_ref());
    let last = flight.operations.len().saturating_sub(count);
    json!({
        "rank": flight.rank, "host": flight.host, "pid": flight.pid, "process": process, "program": program,
        "text": ending.map(|ending| &ending.text),
        "ended_ns": ending.map(|ending| nanos(ending.at)),
        "failure": failure.map(|failure| json!({ "rank": failure.rank, "text": failure.text })),
        "posted": flight.posted,
        "operations": flight.operations[last..].iter().map(operation).collect_vec(),
    })
}

fn operation(operation: &Operation) -> Value {
    let id = &operation.id;
    let last = operation.over.and_then(|(_, over)| match over {
        OpOutcome::Done(last) => last,
        _ => None,
    });
    let tensors = operation
        .tensors
        .iter()
        .map(ToString::to_string)
        .collect_vec();
    json!({
        "index": operation.index, "operation": id.op.name(), "seq": id.seq, "label": *id.label, "group": *id.ranks,
        "channel": *operation.channel, "phase": operation.phase.to_string(), "bytes": operation.bytes,
        "tensors": tensors, "tensor_count": operation.count,
        "posted_ns": nanos(operation.posted),
        "waited_ns": operation.waited.map(nanos),
        "over_ns": operation.over.map(|(at, _)| nanos(at)),
        "outcome": operation.over.map(|(_, over)| over.name()),
        "last": last,
        "partner": operation.message.and_then(|(partner, _)| partner),
        "tag": operation.message.map(|(_, tag)| tag),
    })
}
