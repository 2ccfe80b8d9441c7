//! [`Summary`]: a ledger in one line.

use std::fmt;

use super::units::{ByteSize, Time};
use super::{CallTotals, OffloadTraffic, QueueDepth, WaitBreakdown, Waits};

/// Summary of a ledger, displayed in one line:
///
/// ```text
/// 60 collectives, 12.6 MB; waiting 14.0 ms, moving 3.1 ms; 4 in flight at most; rank 3 came last in 41 of 60 waits, 12.3 ms of 14.0 ms
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Summary {
    /// Totals of all collectives.
    pub total: CallTotals,
    /// Time spent in waits.
    pub spent: WaitBreakdown,
    /// Number of collectives in flight.
    pub queue: QueueDepth,
    /// Distribution of the waits.
    pub waits: Waits,
    /// Copies of all units between host memory and the rank's device.
    pub host_copies: OffloadTraffic,
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            total: CallTotals { calls, bytes },
            spent: WaitBreakdown { waiting, local_work },
            queue,
            waits,
            host_copies,
        } = self;
        let plural = if *calls == 1 { "" } else { "s" };
        write!(f, "{calls} collective{plural}, {}; ", ByteSize(*bytes))?;
        write!(f, "waiting {}, moving {}; {} in flight at most", Time(*waiting), Time(*local_work), queue.most)?;
        if *host_copies != OffloadTraffic::default() {
            let OffloadTraffic { to_device, to_host } = host_copies;
            write!(
                f,
                "; copied {} to the device and {} to the host",
                ByteSize(to_device.bytes),
                ByteSize(to_host.bytes)
            )?;
        }
        waits.sentence().map_or(Ok(()), |sentence| write!(f, "; {sentence}"))
    }
}
