//! [`HostCopies`]: what goes to and fro between host memory and a device.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::Total;
use super::totals::{KEYS, OTHERS};

/// What units whose shards are in host memory have copied; see
/// [`FullyShard::offload`](crate::fsdp::FullyShard::offload).
///
/// Calls are copies of some of a unit's tensors at once; bytes are of their elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct HostCopies {
    /// Gathered parameters, to where the rank computes.
    pub to_device: Total,
    /// Reduced gradients, to where the optimizer steps.
    pub to_host: Total,
}

/// A way that tensors go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Way {
    ToDevice,
    ToHost,
}

impl HostCopies {
    fn way(&mut self, way: Way) -> &mut Total {
        match way {
            Way::ToDevice => &mut self.to_device,
            Way::ToHost => &mut self.to_host,
        }
    }
}

impl std::iter::Sum for HostCopies {
    fn sum<I: Iterator<Item = Self>>(copies: I) -> Self {
        copies.fold(Self::default(), |a, b| Self {
            to_device: [a.to_device, b.to_device].into_iter().sum(),
            to_host: [a.to_host, b.to_host].into_iter().sum(),
        })
    }
}

/// By unit.
#[derive(Debug, Default)]
pub(super) struct ByUnit(pub(super) BTreeMap<Arc<str>, HostCopies>);

impl ByUnit {
    pub(super) fn add(&mut self, unit: &Arc<str>, way: Way, bytes: u64) {
        let known = self.0.len() < KEYS || self.0.contains_key(unit);
        let unit = if known { unit } else { &*OTHERS };
        self.0.entry(unit.clone()).or_default().way(way).add(bytes);
    }
}
