//! [`Snapshot`]: numbers of calls and bytes by operation, phase and label; [`LedgerEntry`], [`QueueDepth`],
//! [`OffloadTraffic`].

use std::collections::BTreeMap;
use std::sync::{Arc, LazyLock};

use serde::Serialize;

use crate::comm::{Op, Phase};

/// Maximum number of keys that a ledger counts separately.
pub(super) const KEYS: usize = 4096;

/// Label under which further keys are counted together.
pub(super) static OTHERS: LazyLock<Arc<str>> = LazyLock::new(|| "(other labels)".into());

/// Number of calls and of payload bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct CallTotals {
    /// Number of collectives.
    pub calls: u64,
    /// Payload bytes, see [`Ledger`](super::Ledger).
    pub bytes: u64,
}

impl CallTotals {
    pub(super) fn add(&mut self, bytes: u64) {
        self.calls += 1;
        self.bytes += bytes;
    }
}

impl std::iter::Sum for CallTotals {
    fn sum<I: Iterator<Item = Self>>(iter: I) -> Self {
        iter.fold(Self::default(), |a, b| Self {
            calls: a.calls + b.calls,
            bytes: a.bytes + b.bytes,
        })
    }
}

/// Key under which a ledger counts a collective.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
pub struct LedgerKey {
    /// Operation of the collective.
    #[serde(rename = "operation")]
    pub op: Op,
    /// Pass in which it ran.
    pub phase: Phase,
    /// Label of the call.
    pub label: Arc<str>,
}

/// A copy of a ledger's totals.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Snapshot(BTreeMap<LedgerKey, CallTotals>);

impl Snapshot {
    /// Counts one collective.
    pub(super) fn add(&mut self, mut key: LedgerKey, bytes: u64) {
        if self.0.len() >= KEYS && !self.0.contains_key(&key) {
            key.label = OTHERS.clone();
        }
        self.0.entry(key).or_default().add(bytes);
    }

    /// Returns the totals of the collectives whose key `select` accepts.
    pub fn total(&self, select: impl Fn(&LedgerKey) -> bool) -> CallTotals {
        self.0
            .iter()
            .filter(|(key, _)| select(key))
            .map(|(_, total)| *total)
            .sum()
    }

    /// Iterates over all keys with their totals, in order of operation, phase and label.
    pub fn iter(&self) -> impl Iterator<Item = (&LedgerKey, &CallTotals)> {
        self.0.iter()
    }

    /// Returns totals grouped by the value of `by`.
    pub(super) fn grouped<K: Ord>(&self, by: impl Fn(&LedgerKey) -> K) -> BTreeMap<K, CallTotals> {
        let mut groups = BTreeMap::new();
        for (key, total) in self.iter() {
            let group: &mut CallTotals = groups.entry(by(key)).or_default();
            group.calls += total.calls;
            group.bytes += total.bytes;
        }
        groups
    }
}

/// One collective that the ledger has counted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LedgerEntry {
    /// Index among all counted collectives, from 0.
    pub index: u64,
    /// Operation of the collective.
    pub op: Op,
    /// Number of ranks in the group.
    pub group_size: usize,
    /// Payload bytes.
    pub bytes: u64,
    /// Label of the call, such as the path of a unit.
    pub label: Arc<str>,
    /// Pass in which it ran.
    pub phase: Phase,
}

/// Number of collectives of a rank that are in flight: posted, and neither waited for nor dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct QueueDepth {
    /// Current number.
    pub now: u64,
    /// Largest number so far.
    pub most: u64,
}

impl QueueDepth {
    /// Counts an accepted collective.
    pub(super) fn enter(&mut self) {
        self.now += 1;
        self.most = self.most.max(self.now);
    }

    /// Removes a collective that was waited for or dropped.
    pub(super) fn leave(&mut self) {
        self.now -= 1;
    }
}

/// Copies made by kernels around a rank's collectives, where a list of tensors is packed into one
/// buffer.
///
/// They are counted on Cube backends (wgpu, CUDA), for all-gathers and reduce-scatters of at least
/// two float tensors of the same dtype: one copy or reduction before the collective, and one after
/// it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct PackStats {
    /// Number of kernels launched.
    pub launches: u64,
    /// Bytes of tensor elements written by the kernels.
    pub bytes: u64,
    /// Bytes of padding written by the kernels: between shards, and where a rank's shard is smaller
    /// than the largest.
    pub padding: u64,
}

impl std::ops::AddAssign for PackStats {
    fn add_assign(&mut self, more: Self) {
        self.launches += more.launches;
        self.bytes += more.bytes;
        self.padding += more.padding;
    }
}

/// Copies made by units whose shards are in host memory; see
/// [`FullyShard::with_offload`](crate::fsdp::FullyShard::with_offload).
///
/// A call is one copy of several tensors of a unit; bytes are those of the tensors' elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct OffloadTraffic {
    /// Copies of gathered parameters to the rank's device.
    pub to_device: CallTotals,
    /// Copies of reduced gradients to host memory, where the optimizer steps.
    pub to_host: CallTotals,
}

/// Direction of a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CopyDirection {
    ToDevice,
    ToHost,
}

impl OffloadTraffic {
    pub(super) fn way(&mut self, way: CopyDirection) -> &mut CallTotals {
        match way {
            CopyDirection::ToDevice => &mut self.to_device,
            CopyDirection::ToHost => &mut self.to_host,
        }
    }
}

impl std::iter::Sum for OffloadTraffic {
    fn sum<I: Iterator<Item = Self>>(copies: I) -> Self {
        copies.fold(Self::default(), |a, b| Self {
            to_device: [a.to_device, b.to_device].into_iter().sum(),
            to_host: [a.to_host, b.to_host].into_iter().sum(),
        })
    }
}

#[cfg(test)]
mod tests {
    use itertools::Itertools;

    use super::*;
    use crate::comm::Ledger;
    use crate::comm::observe::flight::{LaunchId, LaunchStart, Recorder};

    #[test]
    fn labels_without_end_share_a_row() {
        let mut totals = Snapshot::default();
        let key = |label: &str| LedgerKey {
            op: Op::Barrier,
            phase: Phase::Other,
            label: label.into(),
        };
        for i in 0..KEYS + 10 {
            totals.add(key(&i.to_string()), 1);
        }
        totals.add(key("0"), 1);
        let labels = totals.grouped(|key| key.label.clone());
        assert_eq!(labels.len(), KEYS + 1);
        assert_eq!((labels["0"].calls, labels["(other labels)"].calls), (2, 10));
        assert_eq!(totals.total(|_| true).calls, KEYS as u64 + 11);
    }

    #[test]
    fn copies_between_host_and_device_are_told_by_unit() {
        let ledger = Ledger::new(
            Recorder::new(0, &LaunchStart::new(2, LaunchId::first(0)), None)
                .expect("it has no file"),
        );
        assert!(
            !ledger.summary().to_string().contains("device"),
            "no copies yet"
        );
        for (unit, way, bytes) in [
            ("b", CopyDirection::ToDevice, 100),
            ("a", CopyDirection::ToHost, 7),
            ("b", CopyDirection::ToDevice, 20),
        ] {
            ledger.crossed(&unit.into(), way, bytes);
        }
        let twice = CallTotals {
            calls: 2,
            bytes: 120,
        };
        let once = CallTotals { calls: 1, bytes: 7 };
        assert_eq!(
            ledger.host_copies()["b"],
            OffloadTraffic {
                to_device: twice,
                ..Default::default()
            }
        );
        assert_eq!(
            ledger.summary().host_copies,
            OffloadTraffic {
                to_device: twice,
                to_host: once
            }
        );
        assert!(
            ledger
                .summary()
                .to_string()
                .contains("120 B to the device and 7 B to the host")
        );
        let table = ledger.to_string();
        let rows: Vec<_> = table
            .lines()
            .skip(2)
            .map(|row| row.split_whitespace().collect_vec())
            .collect();
        assert_eq!(
            rows,
            [
                ["to", "host", "a", "1", "7"],
                ["to", "device", "b", "2", "120"]
            ]
            .map(Vec::from)
        );
        let json: serde_json::Value = serde_json::from_str(&ledger.to_json()).unwrap();
        assert_eq!(json["host_copies"][1]["to_device"]["bytes"], 120);
        assert_eq!(json["bytes"], 0, "copies are not collectives");
        ledger.reset();
        assert!(ledger.host_copies().is_empty());
    }
}
