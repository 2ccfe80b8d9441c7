//! [`ExchangeReport`]: what a process says about a call whose tensors are exchanged.

use serde::{Deserialize, Serialize};

/// Report of a process to the one that orders exchanges.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::comm) enum ExchangeReport {
    /// All ranks have posted the call.
    Agreed,
    /// All ranks have posted the deferred call, and a rank of the process needs the result.
    Wanted,
    /// No rank of the process needs the result of the deferred call.
    Declined,
}
