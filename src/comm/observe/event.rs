//! [`CallEvent`]: the events of a call.

use std::cell::Cell;
use std::sync::Arc;
use std::time::Duration;

use burn_dtensor_flight::format::Peer;

use crate::comm::backend::CallSignature;
use crate::comm::{Group, Op, Phase};

/// An event of a call of a rank. Each call has them in this order:
///
/// ```text
/// Posted ─> Counted ─> Accepted ─────────────> Waiting ─> Completed      a call
///                   │           │                      └> Failed
///                   └> Refused  └> Dropped
/// Posted ────────────> Accepted ─> Counted ──> Waiting ─> Completed      a deferred call
///                   └> Refused  └> Dropped             └> Failed
/// ```
#[derive(Debug, Clone, Copy)]
pub(crate) enum CallEvent<'a> {
    /// The rank posts the call to the backend.
    Posted(&'a Posting<'a>),
    /// The rank depends on the result from now on: the ledger counts the call.
    Counted,
    /// The backend has accepted the call: the rank has taken part, and the call is in flight.
    Accepted,
    /// The rank could not take part, because the world has failed or this call made it fail.
    Refused,
    /// The rank waits for the result.
    Waiting,
    /// The rank has the result.
    Completed {
        /// Time spent waiting for other ranks.
        waiting: Duration,
        /// Time spent on copies and reductions.
        local_work: Duration,
        /// Global rank that called last, if the backend knows it, or for a receive the sender.
        last: Option<usize>,
    },
    /// The wait failed.
    Failed,
    /// The rank has dropped the call without waiting for its result.
    Dropped,
}

/// Properties of a call that all its events have.
#[derive(Debug, Clone)]
pub(crate) struct CallInfo {
    /// Global rank that makes the call.
    pub rank: usize,
    pub op: Op,
    pub group_size: usize,
    /// Payload bytes, as the [`Ledger`](crate::comm::Ledger) counts them.
    pub bytes: u64,
    pub label: Arc<str>,
    pub phase: Phase,
    /// Sequence number among the collectives of the group, or among the rank's messages there.
    pub seq: u64,
}

/// Description of a call that is being posted.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Posting<'a> {
    /// Ranks of the group, with this rank's index.
    pub group: &'a Group,
    /// Number of the channel in the flight recorder.
    pub channel: u32,
    /// Sequence number among the channel's collectives, or among this rank's messages on the
    /// channel.
    pub seq: u64,
    pub signature: &'a CallSignature,
    pub phase: Phase,
    pub bytes: u64,
    pub peer: Option<Peer>,
}

/// A function that receives the events of a thread.
pub(crate) type Listener = fn(&CallInfo, &CallEvent<'_>);

thread_local! {
    static LISTENER: Cell<Option<Listener>> = const { Cell::new(None) };
}

/// Sets the function that receives the events of the calling thread from now on; `None` removes it.
pub(crate) fn listen(listener: Option<Listener>) {
    LISTENER.set(listener);
}

/// Passes an event to the listener of the calling thread, if there is one.
pub(super) fn tell(info: &CallInfo, event: &CallEvent<'_>) {
    if let Some(listener) = LISTENER.get() {
        listener(info, event);
    }
}
