//! [`PendingAllGather`]: gathered parameters, or an all-gather in flight, and the owners of gathered parameters
//! between passes.

use std::fmt::Debug;
use std::sync::Arc;

use burn::backend::DispatchTensor;

use super::offload::CpuOffload;
use super::shards::LocalShardsId;
use super::storage::SharedWeights;
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

/// Parameters that are gathered, or being gathered, before the forward that will use them.
#[derive(Debug)]
pub(super) struct Unsharded {
    /// The shards that they were gathered from. An optimizer step replaces the shards, which makes the gathered
    /// values stale.
    pub(super) shards: LocalShardsId,
    pub(super) prefetched: Prefetched,
}

/// Origin of unsharded parameters that a forward finds without gathering them itself.
#[derive(Debug)]
pub(super) enum Prefetched {
    /// The program called `unshard`.
    Program(PendingAllGather),
    /// An earlier unit of the running forward prefetched them.
    Prefetch(PendingAllGather),
    /// An earlier unit of the running forward posted the all-gather, whose data transfer does not start before this
    /// unit is entered.
    Posted(PendingAllGather),
    /// A completed pass kept them.
    Left(Vec<DispatchTensor>),
    /// Passes that are not complete hold them and share them with the next forward.
    Shared(SharedWeights),
}

impl Prefetched {
    /// Returns true if using the parameters would not block on other ranks.
    pub(super) fn is_there(&self) -> bool {
        match self {
            Self::Program(gathering) | Self::Prefetch(gathering) => gathering.is_complete(),
            // The transfer of a posted all-gather has not started.
            Self::Posted(_) => false,
            Self::Left(_) | Self::Shared(_) => true,
        }
    }

    pub(super) fn is_posted(&self) -> bool {
        matches!(self, Self::Posted(_))
    }

    /// Returns true if they were gathered for the running forward.
    pub(super) fn is_of_forward(&self) -> bool {
        matches!(self, Self::Prefetch(_) | Self::Posted(_))
    }

    /// Returns true if passes kept or share them.
    pub(super) fn is_of_passes(&self) -> bool {
        matches!(self, Self::Left(_) | Self::Shared(_))
    }
}

/// A pass that keeps gathered parameters from forward to backward.
pub(super) trait Keeps: Debug + Send + Sync {
    /// Frees the parameters and issues the all-gather that backward will need.
    fn reshard(self: Arc<Self>);
}
