//! [`PendingAllGather`]: parameters that are gathered, or on their way; and who holds them while no pass computes with
//! them.

use std::fmt::Debug;
use std::sync::Arc;

use burn::backend::DispatchTensor;

use super::offload::CpuOffload;
use super::shards::LocalShardsId;
use super::storage::SharedWeights;
use crate::comm::{CommError, OpTiming, Work};

/// The result of an all-gather, there or on its way.
#[derive(Debug)]
pub(super) enum PendingAllGather {
    /// Of shards in host memory, with what the wholes are then copied by.
    UnderWay(Work<Vec<DispatchTensor>>, Option<Box<CopyIn>>),
    Done(GatheredTensors),
}

/// How the wholes of a unit come to where its ranks compute, and what that is counted under.
#[derive(Debug)]
pub(super) struct CopyIn {
    pub(super) offloaded: CpuOffload,
    pub(super) label: Arc<str>,
}

/// Gathered parameters, and how that went, if they have moved for those who take them now.
pub(super) type GatheredTensors = (Vec<DispatchTensor>, Option<OpTiming>);

impl PendingAllGather {
    /// Has it begin to move.
    pub(super) fn start(&mut self) {
        if let Self::UnderWay(work, _) = self {
            work.start();
        }
    }

    /// Whether other ranks need not be waited for.
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

    /// The same, of which the wholes stay where the shards are.
    pub(super) fn in_separate_memory(self) -> Self {
        match self {
            Self::UnderWay(work, _) => Self::UnderWay(work, None),
            done @ Self::Done(_) => done,
        }
    }
}

/// Parameters that are there, or on their way, before the forward that will use them.
#[derive(Debug)]
pub(super) struct Unsharded {
    /// What they were gathered from: an optimizer step makes new shards.
    pub(super) shards: LocalShardsId,
    pub(super) prefetched: Prefetched,
}

/// Where parameters are from that no forward had to gather.
#[derive(Debug)]
pub(super) enum Prefetched {
    /// The program has gathered them.
    Program(PendingAllGather),
    /// A unit before it has, in the forward that is under way.
    Prefetch(PendingAllGather),
    /// The same, where nothing moves until the unit is entered.
    Posted(PendingAllGather),
    /// A pass that is over has left them.
    Left(Vec<DispatchTensor>),
    /// Passes have them that are not over.
    Shared(SharedWeights),
}

impl Prefetched {
    /// Whether other ranks need not be waited for.
    pub(super) fn is_there(&self) -> bool {
        match self {
            Self::Program(gathering) | Self::Prefetch(gathering) => gathering.is_complete(),
            // Its parameters are nowhere yet.
            Self::Posted(_) => false,
            Self::Left(_) | Self::Shared(_) => true,
        }
    }

    pub(super) fn is_posted(&self) -> bool {
        matches!(self, Self::Posted(_))
    }

    /// Whether they are for the forward that is under way.
    pub(super) fn is_of_forward(&self) -> bool {
        matches!(self, Self::Prefetch(_) | Self::Posted(_))
    }

    /// Whether passes have left them.
    pub(super) fn is_of_passes(&self) -> bool {
        matches!(self, Self::Left(_) | Self::Shared(_))
    }
}

/// What keeps gathered parameters from forward to backward.
pub(super) trait Keeps: Debug + Send + Sync {
    /// Frees them, and issues the all-gather that backward will need.
    fn reshard(self: Arc<Self>);
}
