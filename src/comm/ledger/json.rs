//! Export of a [`Ledger`] as JSON.

use std::sync::Arc;
use std::time::Duration;

use itertools::Itertools;
use serde_json::{Value, json};

use super::{CallTotals, Ledger, LedgerKey, OffloadTraffic, QueueDepth, Straggler, Summary, Waits};
use crate::comm::PackStats;

impl Ledger {
    /// Returns the contents of the ledger as JSON:
    ///
    /// ```text
    /// {"calls": 3, "bytes": 240,
    ///  "collectives": [{"operation": "all_gather", "phase": "forward", "label": "blocks.0", "calls": 1, "bytes": 100}, ..],
    ///  "waiting_ns": 52000, "moving_ns": 8000,
    ///  "waits": {"count": 3, "histogram": [{"from_us": 0, "waits": 1}, {"from_us": 1, "waits": 0}, ..],
    ///            "stragglers": [{"rank": 1, "waits": 2, "waiting_ns": 51000}]},
    ///  "queue": {"now": 0, "most": 2},
    ///  "backends": ["flex"],
    ///  "copied": {"launches": 0, "bytes": 0, "padding": 0},
    ///  "host_copies": [{"label": "blocks.0", "to_device": {"calls": 2, "bytes": 200}, "to_host": {"calls": 1, "bytes": 40}}, ..]}
    /// ```
    ///
    /// A bucket of the histogram ends where the next one begins, see [`Histogram`](super::Histogram). Stragglers
    /// are ordered by waiting time, longest first.
    ///
    /// ```
    /// use burn_dtensor::comm::{Launch, launch};
    ///
    /// launch(Launch::threads(2), |world| {
    ///     world.barrier("start")?;
    ///     let json: serde_json::Value = serde_json::from_str(&world.ledger().to_json()).unwrap();
    ///     assert_eq!(json["collectives"][0]["label"], "start");
    ///     assert_eq!(json["waits"]["count"], 1);
    ///     Ok(())
    /// })?;
    /// # Ok::<_, burn_dtensor::Error>(())
    /// ```
    pub fn to_json(&self) -> String {
        let totals = self.snapshot();
        let CallTotals { calls, bytes } = totals.total(|_| true);
        let Summary { spent, queue: QueueDepth { now, most }, waits, .. } = self.summary();
        let PackStats { launches, bytes: copied, padding } = self.copied();
        let collective = |(LedgerKey { op, phase, label }, CallTotals { calls, bytes }): (&LedgerKey, &CallTotals)| {
            json!({
                "operation": op.name(), "phase": phase.to_string(), "label": **label, "calls": calls, "bytes": bytes,
            })
        };
        json!({
            "calls": calls,
            "bytes": bytes,
            "collectives": totals.iter().map(collective).collect_vec(),
            "waiting_ns": spent.waiting.as_nanos() as u64,
            "moving_ns": spent.local_work.as_nanos() as u64,
            "waits": self::waits(&waits),
            "queue": { "now": now, "most": most },
            "backends": self.backends(),
            "copied": { "launches": launches, "bytes": copied, "padding": padding },
            "host_copies": self.host_copies().iter().map(host_copies).collect_vec(),
        })
        .to_string()
    }
}

fn host_copies((label, OffloadTraffic { to_device, to_host }): (&Arc<str>, &OffloadTraffic)) -> Value {
    let total = |CallTotals { calls, bytes }: &CallTotals| json!({ "calls": calls, "bytes": bytes });
    json!({ "label": **label, "to_device": total(to_device), "to_host": total(to_host) })
}

fn waits(waits: &Waits) -> Value {
    let bucket = |(from, count): (Duration, u64)| json!({ "from_us": from.as_micros() as u64, "waits": count });
    let straggler = |Straggler { rank, waits, waiting }| json!({ "rank": rank, "waits": waits, "waiting_ns": waiting.as_nanos() as u64 });
    json!({
        "count": waits.count(),
        "histogram": waits.times().iter().map(bucket).collect_vec(),
        "stragglers": waits.stragglers().into_iter().map(straggler).collect_vec(),
    })
}
