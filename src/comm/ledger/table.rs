//! The table that a [`Ledger`] displays as.

use std::fmt;

use super::{Key, Ledger, Total};

impl fmt::Display for Ledger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let totals = self.snapshot();
        let width = totals.iter().map(|(key, _)| key.label.len()).max().unwrap_or(0).max("label".len());
        writeln!(f, "{:<14} {:<8} {:<width$} {:>8} {:>14}", "operation", "phase", "label", "calls", "bytes")?;
        for (Key { op, phase, label }, Total { calls, bytes }) in totals.iter() {
            writeln!(f, "{op:<14} {phase:<8} {label:<width$} {calls:>8} {bytes:>14}")?;
        }
        let Total { calls, bytes } = totals.total(|_| true);
        write!(f, "{:<14} {:<8} {:<width$} {calls:>8} {bytes:>14}", "total", "", "")
    }
}
