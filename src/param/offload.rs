//! CPU offload: [`OffloadPolicy`] selects the memory of a unit's shards, and [`CpuOffload`] makes
//! the copies between host memory and the device.
//!
//! ```text
//!   host    shard ── all-gather ──> full           gradient of the shard ──> optimizer
//!                                    │ copy                ^ copy
//!   device                         weight ─> .. ─> gradient ── reduce-scatter
//! ```
//!
//! Shards are gathered in host memory. Processes send from and to host memory in any case, threads
//! read each other's shards directly, and a prefetched unit takes no device memory. Gradients are
//! reduced on the device, so that a rank copies only its own shards of them.

use std::sync::Arc;

use burn::backend::DispatchTensor;
use burn::tensor::Device;

use crate::comm::{Communicator, CopyDirection, Ledger};
use crate::memory::{self, ToHost};

/// Memory in which a unit's shards are stored, with their gradients and their optimizer state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OffloadPolicy {
    /// The shards are on the rank's device.
    #[default]
    Never,
    /// The shards are in host memory, as tensors of burn's CPU backend Flex. Optimizers step there,
    /// on the rank's CPU threads.
    Cpu,
}

/// Copies between the host shards of a unit and the device of one rank.
#[derive(Debug, Clone)]
pub(crate) struct CpuOffload {
    /// Device on which the rank computes.
    device: Device,
    ledger: Arc<Ledger>,
}

impl CpuOffload {
    /// Creates the copies for the rank that owns `comm`.
    pub(crate) fn of(comm: &Communicator) -> Self {
        Self {
            device: comm.device().clone(),
            ledger: comm.ledger().clone(),
        }
    }

    pub(super) fn device(&self) -> &Device {
        &self.device
    }

    /// Copies parameters of a unit to the rank's device: gathered ones, and ones that need no
    /// gathering.
    pub(super) fn copy_in(
        &self,
        unit: &Arc<str>,
        tensors: Vec<DispatchTensor>,
    ) -> Vec<DispatchTensor> {
        self.count(unit, CopyDirection::ToDevice, &tensors);
        tensors
            .into_iter()
            .map(|tensor| memory::copied_to(tensor, &self.device))
            .collect()
    }

    /// Starts to copy a unit's reduced gradients to host memory, where its shards are.
    pub(super) fn copy_out(&self, unit: &Arc<str>, tensors: Vec<DispatchTensor>) -> ToHost {
        self.count(unit, CopyDirection::ToHost, &tensors);
        ToHost::begin(tensors)
    }

    fn count(&self, unit: &Arc<str>, way: CopyDirection, tensors: &[DispatchTensor]) {
        if !tensors.is_empty() {
            self.ledger
                .crossed(unit, way, tensors.iter().map(memory::bytes).sum());
        }
    }
}
