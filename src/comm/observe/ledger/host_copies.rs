//! [`OffloadTraffic`]: copies between host memory and a device.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::Serialize;

use super::CallTotals;
use super::totals::{KEYS, OTHERS};

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
    fn way(&mut self, way: CopyDirection) -> &mut CallTotals {
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

/// Copies by unit.
#[derive(Debug, Default)]
pub(super) struct TrafficByUnit(pub(super) BTreeMap<Arc<str>, OffloadTraffic>);

impl TrafficByUnit {
    pub(super) fn add(&mut self, unit: &Arc<str>, way: CopyDirection, bytes: u64) {
        let known = self.0.len() < KEYS || self.0.contains_key(unit);
        let unit = if known { unit } else { &*OTHERS };
        self.0.entry(unit.clone()).or_default().way(way).add(bytes);
    }
}

#[cfg(test)]
mod tests {
    use itertools::Itertools;

    use super::*;
    use crate::comm::Ledger;
    use crate::comm::observe::flight::{LaunchId, LaunchStart, Recorder};

    #[test]
    fn copies_between_host_and_device_are_told_by_unit() {
        let ledger =
            Ledger::new(Recorder::new(0, &LaunchStart::new(2, LaunchId::first(0)), None).expect("it has no file"));
        assert!(!ledger.summary().to_string().contains("device"), "no copies yet");
        for (unit, way, bytes) in
            [("b", CopyDirection::ToDevice, 100), ("a", CopyDirection::ToHost, 7), ("b", CopyDirection::ToDevice, 20)]
        {
            ledger.crossed(&unit.into(), way, bytes);
        }
        let (twice, once) = (CallTotals { calls: 2, bytes: 120 }, CallTotals { calls: 1, bytes: 7 });
        assert_eq!(ledger.host_copies()["b"], OffloadTraffic { to_device: twice, ..Default::default() });
        assert_eq!(ledger.summary().host_copies, OffloadTraffic { to_device: twice, to_host: once });
        assert!(ledger.summary().to_string().contains("120 B to the device and 7 B to the host"));
        let table = ledger.to_string();
        let rows: Vec<_> = table.lines().skip(2).map(|row| row.split_whitespace().collect_vec()).collect();
        assert_eq!(rows, [["to", "host", "a", "1", "7"], ["to", "device", "b", "2", "120"]].map(Vec::from));
        let json: serde_json::Value = serde_json::from_str(&ledger.to_json()).unwrap();
        assert_eq!(json["host_copies"][1]["to_device"]["bytes"], 120);
        assert_eq!(json["bytes"], 0, "copies are not collectives");
        ledger.reset();
        assert!(ledger.host_copies().is_empty());
    }
}
