//! Human-readable bytes and durations.

use std::fmt;
use std::time::Duration;

/// Number of bytes, displayed as `12 B` or `1.5 MB`.
pub(super) struct ByteSize(pub u64);

/// Duration, displayed as `12 ns` or `1.5 ms`.
pub(super) struct Time(pub Duration);

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&scaled(
            self.0 as u128,
            &["B", "kB", "MB", "GB", "TB", "PB"],
        ))
    }
}

impl fmt::Display for Time {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&scaled(self.0.as_nanos(), &["ns", "us", "ms", "s"]))
    }
}

/// Formats `number` in the smallest of `units` that leaves at most three digits before the point.
/// Each unit is a thousand times the one before.
fn scaled(number: u128, units: &[&str]) -> String {
    if number < 1000 {
        return format!("{number} {}", units[0]);
    }
    let mut value = number as f64 / 1e3;
    let mut unit = 1;
    // A value that would be displayed as 1000.0 uses the next unit.
    while value >= 999.95 && unit + 1 < units.len() {
        (value, unit) = (value / 1e3, unit + 1);
    }
    format!("{value:.1} {}", units[unit])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_three_digits_before_the_point() {
        let sizes = [
            0,
            999,
            1000,
            1949,
            999_949,
            999_950,
            12_345_678,
            3_000_000_000,
        ]
        .map(|bytes| ByteSize(bytes).to_string());
        assert_eq!(
            sizes,
            [
                "0 B", "999 B", "1.0 kB", "1.9 kB", "999.9 kB", "1.0 MB", "12.3 MB", "3.0 GB"
            ]
        );
        let times = [0, 1_000, 12_345_678, 5_000_000_000_000]
            .map(|nanos| Time(Duration::from_nanos(nanos)).to_string());
        assert_eq!(times, ["0 ns", "1.0 us", "12.3 ms", "5000.0 s"]);
        assert_eq!(format!("{:>8}", ByteSize(7)), "     7 B");
    }
}
