//! [`GpuJob`]: a job of a rank for the thread of its GPU, and [`Outcome`]: its result.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::api::{Exported, GpuEvent, UniqueId, error};
use super::layout::StagingLayout;
use super::staging::Lease;
use crate::comm::control::rendezvous::LONGEST;
use crate::comm::data::plane::PlaneResult;

/// Identifies a rank's membership of a channel in this process.
pub(super) type ChannelKey = usize;

/// Connects a rank to the others of a channel.
#[derive(Debug)]
pub(super) struct ConnectJob {
    pub channel: ChannelKey,
    /// Global rank.
    pub rank: usize,
    pub id: UniqueId,
    pub ranks: usize,
    pub member: usize,
}

/// Exchanges the tensors of one call.
#[derive(Debug)]
pub(super) struct ExchangeJob {
    pub channel: ChannelKey,
    /// Global rank.
    pub rank: usize,
    pub layout: Arc<StagingLayout>,
    /// Tensors of the rank; none of one that receives a message.
    pub exported: Option<Exported>,
    /// Tensors of `exported` that are copied in, and their offsets.
    pub copied_in: Vec<(usize, usize)>,
    pub outcome: Arc<Outcome>,
}

/// A job of a rank.
#[derive(Debug)]
pub(super) enum GpuJob {
    Connect(ConnectJob),
    Exchange(ExchangeJob),
}

impl GpuJob {
    /// Returns the global rank.
    pub fn rank(&self) -> usize {
        match self {
            Self::Connect(job) => job.rank,
            Self::Exchange(job) => job.rank,
        }
    }
}

/// An operation that is enqueued, and the memory that has its result afterwards.
#[derive(Debug)]
pub(super) struct Enqueued {
    pub lease: Lease,
    pub done: GpuEvent,
}

/// Result of a job, once its operation is enqueued or has failed.
#[derive(Debug, Default)]
pub(super) struct Outcome {
    result: Mutex<Option<PlaneResult<Enqueued>>>,
    changed: Condvar,
    /// Time at which the operation must be done, once the rank needs its result, and how long that
    /// was then.
    deadline: OnceLock<(Instant, Duration)>,
}

impl Outcome {
    pub fn set(&self, result: PlaneResult<Enqueued>) {
        *self.result.lock() = Some(result);
        self.changed.notify_all();
    }

    /// Returns the time that the operation had, if it is over.
    pub fn expired(&self) -> Option<Duration> {
        let (until, time) = self.deadline.get()?;
        (Instant::now() > *until).then_some(*time)
    }

    /// Waits until the operation is enqueued, at most for `time`. Does not wait for the GPU.
    pub fn wait(&self, time: Duration) -> PlaneResult<Enqueued> {
        let until = Instant::now() + time.min(LONGEST);
        let _ = self.deadline.set((until, time));
        let mut result = self.result.lock();
        loop {
            if let Some(result) = result.take() {
                return result;
            }
            if self.changed.wait_until(&mut result, until).timed_out() {
                return error(format!("the operation was not enqueued within {time:?}"));
            }
        }
    }
}
