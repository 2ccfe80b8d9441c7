//! [`OpTiming`]: timestamps of one operation.

use std::time::Instant;

/// Timestamps of one operation's data transfer.
///
/// | | between processes (progress thread) | between threads |
/// |---|---|---|
/// | `taken` | the progress thread has taken up the call, to send it to the other processes | the call was posted |
/// | `begun` | the first bytes for this rank were announced | the rank that waits began to copy or reduce |
/// | `complete` | the last bytes arrived, or the rank itself joined last | the copy or reduction was complete |
///
/// For a deferred call, `begun` and `complete` are never earlier than the moment at which this rank requested the
/// result, even if another rank started the transfer earlier.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TransferTiming {
    /// Start of sending; `None` if all data had arrived before this process began to send.
    pub taken: Option<Instant>,
    /// Start of the transfer.
    pub begun: Instant,
    /// End of the transfer.
    pub complete: Instant,
}

/// Timestamps of one operation of a rank, from posting it until its result was ready.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OpTiming {
    /// Time when the rank posted the operation.
    pub posted: Instant,
    /// Timestamps of the data transfer.
    pub carried: TransferTiming,
    /// Time when the rank began to wait for the result.
    pub wanted: Instant,
}
