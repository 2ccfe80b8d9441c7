//! Export of a [`Ledger`] as JSON.

use std::sync::Arc;
use std::time::Duration;

use itertools::Itertools;
use serde_json::{Value, json};

use super::{CallTotals, Ledger, LedgerKey, OffloadTraffic, Straggler, Summary, Waits};

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
    /// A bucket of the histogram ends where the next one begins, see
    /// [`Histogram`](super::Histogram). Stragglers are ordered by waiting time, longest first.
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
        let Summary {
            total,
            spent,
            queue,
            waits,
            ..
        } = self.summary();
        let host_copies = self.host_copies();
        let collective = |(key, CallTotals { calls, bytes }): (&LedgerKey, &CallTotals)| {
            let LedgerKey { op, phase, label } = key;
            json!({ "operation": op, "phase": phase, "label": label, "calls": calls, "bytes": bytes })
        };
        let unit = |(label, traffic): (&Arc<str>, &OffloadTraffic)| {
            let OffloadTraffic { to_device, to_host } = traffic;
            json!({ "label": label, "to_device": to_device, "to_host": to_host })
        };
        json!({
            "calls": total.calls,
            "bytes": total.bytes,
            "collectives": totals.iter().map(collective).collect_vec(),
            "waiting_ns": spent.waiting.as_nanos() as u64,
            "moving_ns": spent.local_work.as_nanos() as u64,
            "waits": self::waits(&waits),
            "queue": queue,
            "backends": self.backends(),
            "copied": self.copied(),
            "host_copies": host_copies.iter().map(unit).collect_vec(),
        })
        .to_string()
    }
}

fn waits(waits: &Waits) -> Value {
    let bucket = |(from, count): (Duration, u64)| json!({ "from_us": from.as_micros() as u64, "waits": count });
    let straggler = |Straggler {
                         rank,
                         waits,
                         waiting,
                     }| json!({ "rank": rank, "waits": waits, "waiting_ns": waiting.as_nanos() as u64 });
    json!({
        "count": waits.count(),
        "histogram": waits.times().iter().map(bucket).collect_vec(),
        "stragglers": waits.stragglers().into_iter().map(straggler).collect_vec(),
    })
}
