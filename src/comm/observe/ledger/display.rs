//! A [`Ledger`] as text: a [`Summary`] in one line, and a table.

use std::fmt;

use super::units::{ByteSize, Time};
use super::{CallTotals, Ledger, LedgerKey, OffloadTraffic, QueueDepth, WaitBreakdown, Waits};

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
            spent:
                WaitBreakdown {
                    waiting,
                    local_work,
                },
            queue,
            waits,
            host_copies,
        } = self;
        let plural = if *calls == 1 { "" } else { "s" };
        write!(f, "{calls} collective{plural}, {}; ", ByteSize(*bytes))?;
        write!(
            f,
            "waiting {}, moving {}; {} in flight at most",
            Time(*waiting),
            Time(*local_work),
            queue.most
        )?;
        if *host_copies != OffloadTraffic::default() {
            let OffloadTraffic { to_device, to_host } = host_copies;
            write!(
                f,
                "; copied {} to the device and {} to the host",
                ByteSize(to_device.bytes),
                ByteSize(to_host.bytes)
            )?;
        }
        waits
            .sentence()
            .map_or(Ok(()), |sentence| write!(f, "; {sentence}"))
    }
}

impl fmt::Display for Ledger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let totals = self.snapshot();
        let copies = self.host_copies();
        let labels = totals
            .iter()
            .map(|(key, _)| &key.label)
            .chain(copies.keys());
        let width = labels
            .map(|label| label.len())
            .max()
            .unwrap_or(0)
            .max("label".len());
        writeln!(
            f,
            "{:<14} {:<8} {:<width$} {:>8} {:>14}",
            "operation", "phase", "label", "calls", "bytes"
        )?;
        for (LedgerKey { op, phase, label }, CallTotals { calls, bytes }) in totals.iter() {
            writeln!(
                f,
                "{op:<14} {phase:<8} {label:<width$} {calls:>8} {bytes:>14}"
            )?;
        }
        let CallTotals { calls, bytes } = totals.total(|_| true);
        write!(
            f,
            "{:<14} {:<8} {:<width$} {calls:>8} {bytes:>14}",
            "total", "", ""
        )?;
        for (unit, OffloadTraffic { to_device, to_host }) in copies {
            for (way, CallTotals { calls, bytes }) in
                [("to device", to_device), ("to host", to_host)]
            {
                if calls > 0 {
                    write!(
                        f,
                        "\n{way:<14} {:<8} {unit:<width$} {calls:>8} {bytes:>14}",
                        ""
                    )?;
                }
            }
        }
        Ok(())
    }
}
