//! Display of a [`Ledger`] as a table.

use std::fmt;

use super::{CallTotals, Ledger, LedgerKey, OffloadTraffic};

impl fmt::Display for Ledger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (totals, copies) = (self.snapshot(), self.host_copies());
        let labels = totals.iter().map(|(key, _)| &key.label).chain(copies.keys());
        let width = labels.map(|label| label.len()).max().unwrap_or(0).max("label".len());
        writeln!(f, "{:<14} {:<8} {:<width$} {:>8} {:>14}", "operation", "phase", "label", "calls", "bytes")?;
        for (LedgerKey { op, phase, label }, CallTotals { calls, bytes }) in totals.iter() {
            writeln!(f, "{op:<14} {phase:<8} {label:<width$} {calls:>8} {bytes:>14}")?;
        }
        let CallTotals { calls, bytes } = totals.total(|_| true);
        write!(f, "{:<14} {:<8} {:<width$} {calls:>8} {bytes:>14}", "total", "", "")?;
        for (unit, OffloadTraffic { to_device, to_host }) in copies {
            for (way, CallTotals { calls, bytes }) in [("to device", to_device), ("to host", to_host)] {
                if calls > 0 {
                    write!(f, "\n{way:<14} {:<8} {unit:<width$} {calls:>8} {bytes:>14}", "")?;
                }
            }
        }
        Ok(())
    }
}
