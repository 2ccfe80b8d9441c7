//! [`Histogram`]: distribution of waiting times.

use std::time::Duration;

/// Number of buckets: below 1 us, from 1, 2, 4, .. us, and from 2^20 us (about a second).
const BUCKETS: usize = 22;

/// Number of waits by duration, in buckets whose bounds double:
///
/// ```text
/// bucket      0     1     2     3          20            21
/// waited   0 ─┼─ 1 ─┼─ 2 ─┼─ 4 ─┼─ 8 .. 2^19 ─┼─ 2^20 us ─┼─ ..
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Histogram([u64; BUCKETS]);

impl Histogram {
    /// Counts a wait.
    pub(super) fn add(&mut self, waiting: Duration) {
        // The bucket is the number of binary digits of the microseconds: numbers from 2^(n - 1) to 2^n - 1 have n
        // digits.
        let digits = (u128::BITS - waiting.as_micros().leading_zeros()) as usize;
        self.0[digits.min(BUCKETS - 1)] += 1;
    }

    /// Returns the number of waits.
    pub fn count(&self) -> u64 {
        self.0.iter().sum()
    }

    /// Iterates over the buckets: the shortest wait of each, and the number of its waits. A bucket ends where the
    /// next one begins.
    pub fn iter(&self) -> impl Iterator<Item = (Duration, u64)> + '_ {
        let from = |bucket: usize| Duration::from_micros(bucket.checked_sub(1).map_or(0, |power| 1 << power));
        self.0.iter().enumerate().map(move |(bucket, count)| (from(bucket), *count))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks the bounds of each bucket, to the nanosecond.
    #[test]
    fn buckets_begin_at_powers_of_two() {
        let bucket = |nanos: u64| {
            let mut histogram = Histogram::default();
            histogram.add(Duration::from_nanos(nanos));
            assert_eq!(histogram.count(), 1);
            let (from, _) = histogram.iter().find(|(_, count)| *count == 1).expect("a bucket has the wait");
            from.as_micros()
        };
        for (nanos, from) in [
            (0, 0),
            (999, 0),
            (1_000, 1),
            (1_999, 1),
            (2_000, 2),
            (3_999, 2),
            (4_000, 4),
            (1_023_999, 512),
            (1_024_000, 1024),
            (1_048_575_999, 524_288),
            (1_048_576_000, 1_048_576),
            (u64::MAX, 1_048_576),
        ] {
            assert_eq!(bucket(nanos), from, "{nanos} ns");
        }
        let edges: Vec<_> = Histogram::default().iter().map(|(from, _)| from.as_micros()).collect();
        assert_eq!((edges.len(), &edges[..5], edges[21]), (22, &[0, 1, 2, 4, 8][..], 1 << 20));
        assert!(edges[1..].is_sorted_by(|a, b| 2 * a == *b));
    }

    #[test]
    fn the_longest_wait_there_is_has_a_bucket() {
        let mut histogram = Histogram::default();
        histogram.add(Duration::MAX);
        assert_eq!(histogram.iter().last(), Some((Duration::from_micros(1 << 20), 1)));
    }
}
