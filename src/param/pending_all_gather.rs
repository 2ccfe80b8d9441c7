//! [`PendingAllGather`]: the all-gather of a unit's parameters, in flight or complete.

use std::mem;
use std::sync::Arc;

use burn::backend::DispatchTensor;
use parking_lot::Mutex;

use super::offload::CpuOffload;
use crate::comm::{CommError, OpTiming, Work};

/// The result of an all-gather: complete, or in flight.
#[derive(Debug)]
pub(crate) enum PendingAllGather {
    /// The all-gather is in flight. If the shards are in host memory, the second field describes
    /// how the result is copied to the device.
    InFlight(
        Work<Vec<DispatchTensor>>,
        Option<Box<(CpuOffload, Arc<str>)>>,
    ),
    Done(GatheredTensors),
    /// Several copies of the parameters are restored from it.
    Shared(Arc<Mutex<PendingAllGather>>),
}

/// Gathered parameters, with the timing of their all-gather if the caller's request is the one that
/// transferred them.
pub(crate) type GatheredTensors = (Vec<DispatchTensor>, Option<OpTiming>);

impl PendingAllGather {
    /// Starts the data transfer of a deferred all-gather.
    pub(crate) fn start(&mut self) {
        match self {
            Self::InFlight(work, _) => work.start(),
            Self::Done(_) => {}
            Self::Shared(shared) => shared.lock().start(),
        }
    }

    /// Returns true if waiting would not block on other ranks.
    pub(crate) fn is_complete(&self) -> bool {
        match self {
            Self::InFlight(work, _) => work.is_complete(),
            Self::Done(_) => true,
            Self::Shared(shared) => shared.lock().is_complete(),
        }
    }

    /// Returns true if it is an all-gather.
    pub(crate) fn is_under_way(&self) -> bool {
        matches!(self, Self::InFlight(..))
    }

    /// Makes it one whose result several copies can use: see [`share`](Self::share).
    pub(crate) fn shared(gathering: Self) -> Self {
        Self::Shared(Arc::new(Mutex::new(gathering)))
    }

    /// Returns another handle of a [shared](Self::shared) all-gather. The last handle that waits
    /// takes the result.
    pub(crate) fn share(&self) -> Self {
        match self {
            Self::Shared(shared) => Self::Shared(shared.clone()),
            _ => unreachable!("only a shared all-gather has several handles"),
        }
    }

    /// Waits for the all-gather, and keeps its result.
    pub(crate) fn complete(&mut self) -> Result<(), CommError> {
        *self = Self::Done(mem::replace(self, Self::Done((Vec::new(), None))).wait()?);
        Ok(())
    }

    pub(crate) fn wait(self) -> Result<GatheredTensors, CommError> {
        match self {
            Self::InFlight(work, copy_in) => {
                let (unsharded, timing) = work.wait_with_timing()?;
                let unsharded = match copy_in.as_deref() {
                    Some((offloaded, label)) => offloaded.copy_in(label, unsharded),
                    None => unsharded,
                };
                Ok((unsharded, timing))
            }
            Self::Done(unsharded) => Ok(unsharded),
            Self::Shared(shared) => match Arc::try_unwrap(shared) {
                Ok(last) => last.into_inner().wait(),
                Err(shared) => {
                    let mut gathering = shared.lock();
                    let result =
                        mem::replace(&mut *gathering, Self::Done((Vec::new(), None))).wait();
                    *gathering = match &result {
                        Ok((unsharded, _)) => Self::Done((unsharded.clone(), None)),
                        Err(error) => Self::InFlight(Work::failed(error.clone()), None),
                    };
                    result
                }
            },
        }
    }
}
