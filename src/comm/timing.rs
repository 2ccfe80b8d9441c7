//! [`OpTiming`]: when a call was posted, when what it moves moved, and when its rank wanted that.

use std::time::Instant;

/// When what a call moves moved.
///
/// | | between processes, by the thread that communicates | between threads |
/// |---|---|---|
/// | `taken` | it has taken the call up, to tell the other processes | the call was posted |
/// | `begun` | the first bytes for this rank were announced to it | the rank that waits began to copy or reduce |
/// | `complete` | the last bytes were there, or the rank itself came last | it was through |
///
/// Of a call made ahead both are no earlier than the rank wanted it, though another may have had it move before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TransferTiming {
    /// Whoever moves it has taken the call up; `None` if it had not when all was there.
    pub taken: Option<Instant>,
    /// It began to move.
    pub begun: Instant,
    /// All of it was there.
    pub complete: Instant,
}

/// The course of one call of a rank, until its result was there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OpTiming {
    /// The rank has posted it.
    pub posted: Instant,
    /// What it moves has moved.
    pub carried: TransferTiming,
    /// The rank began to wait for the result.
    pub wanted: Instant,
}
