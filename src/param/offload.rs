//! [`OffloadPolicy`]: whether a unit's shards are in host memory while its ranks compute elsewhere; [`CpuOffload`]: the
//! copies then.
//!
//! ```text
//!   host    shard ── all-gather ──> whole          gradient of the shard ──> optimizer
//!                                    │ copy                ^ copy
//!   device                         weight ─> .. ─> gradient ── reduce-scatter
//! ```
//!
//! Shards are gathered where they are: processes send from and to host memory anyway, threads read each other's, and what
//! is issued ahead of need keeps nothing on the device. Gradients are reduced where they come up, so that a rank copies no
//! more than its own parts of them.

use std::sync::Arc;

use burn::backend::DispatchTensor;
use burn::tensor::Device;

use crate::comm::{Communicator, CopyDirection, Ledger};
use crate::memory::{self, ToHost};

/// Where a unit's shards are, and with them their gradients and what an optimizer remembers of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OffloadPolicy {
    /// On the rank's device.
    #[default]
    Never,
    /// In host memory, as tensors of burn's CPU backend Flex. Optimizers step there, on the rank's CPU threads.
    Cpu,
}

/// What a unit needs whose shards are in host memory.
#[derive(Debug, Clone)]
pub(crate) struct CpuOffload {
    /// Where its ranks compute.
    device: Device,
    ledger: Arc<Ledger>,
}

impl CpuOffload {
    /// Of the rank that `comm` is seen from.
    pub(crate) fn of(comm: &Communicator) -> Self {
        Self { device: comm.device().clone(), ledger: comm.ledger().clone() }
    }

    pub(super) fn device(&self) -> &Device {
        &self.device
    }

    /// What was gathered of a unit, or needs no gathering, for the rank to compute with.
    pub(super) fn copy_in(&self, unit: &Arc<str>, tensors: Vec<DispatchTensor>) -> Vec<DispatchTensor> {
        self.count(unit, CopyDirection::ToDevice, &tensors);
        tensors.into_iter().map(|tensor| memory::copied_to(tensor, &self.device)).collect()
    }

    /// Begins to copy a unit's reduced gradients to its shards.
    pub(super) fn copy_out(&self, unit: &Arc<str>, tensors: Vec<DispatchTensor>) -> ToHost {
        self.count(unit, CopyDirection::ToHost, &tensors);
        ToHost::begin(tensors)
    }

    fn count(&self, unit: &Arc<str>, way: CopyDirection, tensors: &[DispatchTensor]) {
        if !tensors.is_empty() {
            self.ledger.crossed(unit, way, tensors.iter().map(memory::bytes).sum());
        }
    }
}
