//! [`PendingAllGather`]: gathered parameters, or an all-gather in flight.

use std::mem;
use std::sync::Arc;

use burn::backend::DispatchTensor;

use super::offload::CpuOffload;
use crate::comm::{CommError, OpTiming, Work};

/// The result of an all-gather: complete, or in flight.
#[derive(Debug)]
pub(super) enum PendingAllGather {
    /// The all-gather is in flight. If the shards are in host memory, the second field describes how the result is
    /// copied to the device.
    UnderWay(Work<Vec<DispatchTensor>>, Option<Box<CopyIn>>),
    Done(GatheredTensors),
}

/// Copy of a unit's gathered parameters from host memory to the device on which its ranks compute.
#[derive(Debug)]
pub(super) struct CopyIn {
    pub(super) offloaded: CpuOffload,
    pub(super) label: Arc<str>,
}

/// Gathered parameters, with the timing of their all-gather if the caller's request is the one that transferred
/// them.
pub(super) type GatheredTensors = (Vec<DispatchTensor>, Option<OpTiming>);

impl PendingAllGather {
    /// Starts the data transfer of a deferred all-gather.
    pub(super) fn start(&mut self) {
        if let Self::UnderWay(work, _) = self {
            work.start();
        }
    }

    /// Returns true if waiting would not block on other ranks.
    pub(super) fn is_complete(&self) -> bool {
        match self {
            Self::UnderWay(work, _) => work.is_complete(),
            Self::Done(_) => true,
        }
    }

    /// Returns true if it is an all-gather.
    pub(super) fn is_under_way(&self) -> bool {
        matches!(self, Self::UnderWay(..))
    }

    /// Waits for the all-gather, and keeps its result.
    pub(super) fn complete(&mut self) -> Result<(), CommError> {
        *self = Self::Done(mem::replace(self, Self::Done((Vec::new(), None))).wait()?);
        Ok(())
    }

    pub(super) fn wait(self) -> Result<GatheredTensors, CommError> {
        match self {
            Self::UnderWay(work, copy_in) => {
                let (unsharded, course) = work.wait_with_timing()?;
                let unsharded = match copy_in {
                    Some(copy_in) => copy_in.offloaded.copy_in(&copy_in.label, unsharded),
                    None => unsharded,
                };
                Ok((unsharded, course))
            }
            Self::Done(unsharded) => Ok(unsharded),
        }
    }

    /// Returns the same all-gather without the copy to the device: the gathered parameters stay in the memory in
    /// which the shards are.
    pub(super) fn in_separate_memory(self) -> Self {
        match self {
            Self::UnderWay(work, _) => Self::UnderWay(work, None),
            done @ Self::Done(_) => done,
        }
    }
}
