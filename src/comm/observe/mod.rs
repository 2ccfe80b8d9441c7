//! Observation of a rank's calls: one stream of events, and its consumers.
//!
//! ```text
//! Communicator, Work ─> ObservedCall::emit ─┬─> flight    the last operations of the rank, also in a file
//!                                           ├─> ledger    totals, waits, operations in flight
//!                                           ├─> spans     a `tracing` span for each call
//!                                           └─> listener  one function of a thread: `debug::trace_comm`
//! ```
//!
//! [`ObservedCall`] is the only place that emits [`CallEvent`]s. Each consumer decides what an
//! event means to it, and knows none of the others. Without a listener or a subscriber of
//! `tracing`, an event costs a check of each.

mod event;
pub mod flight;
mod ledger;
mod observed_call;
mod spans;

pub(crate) use event::{CallEvent, CallInfo, Posting, listen};
pub(crate) use ledger::CopyDirection;
pub use ledger::{
    CallTotals, Histogram, Ledger, LedgerEntry, LedgerKey, OffloadTraffic, PackStats, QueueDepth,
    Snapshot, Straggler, Summary, WaitBreakdown, Waits,
};
pub(super) use observed_call::ObservedCall;
