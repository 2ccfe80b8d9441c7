//! [`Waits`]: waiting times of a rank, as a [`Histogram`], and the ranks it waited for.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use super::units::Time;

/// Maximum number of late ranks that the table lists.
const SHOWN: usize = 8;

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
        // The bucket is the number of binary digits of the microseconds: numbers from 2^(n - 1) to
        // 2^n - 1 have n digits.
        let digits = (u128::BITS - waiting.as_micros().leading_zeros()) as usize;
        self.0[digits.min(BUCKETS - 1)] += 1;
    }

    /// Returns the number of waits.
    pub fn count(&self) -> u64 {
        self.0.iter().sum()
    }

    /// Iterates over the buckets: the shortest wait of each, and the number of its waits. A bucket
    /// ends where the next one begins.
    pub fn iter(&self) -> impl Iterator<Item = (Duration, u64)> + '_ {
        let from = |bucket: usize| {
            Duration::from_micros(bucket.checked_sub(1).map_or(0, |power| 1 << power))
        };
        self.0
            .iter()
            .enumerate()
            .map(move |(bucket, count)| (from(bucket), *count))
    }
}

/// Time that a rank has spent inside [`Work::wait`](crate::comm::Work::wait).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct WaitBreakdown {
    /// Time spent waiting for other ranks.
    pub waiting: Duration,
    /// Time spent on copies and reductions of the ranks' contributions.
    pub local_work: Duration,
}

/// The waits of a rank: the duration of each, and the rank that joined last, for which it waited.
///
/// If this rank itself was the last, or the backend does not know the last rank, the wait is
/// counted in the histogram, but not attributed to a rank. A rank that joined last has not
/// necessarily delayed this one, because the result may have been complete before it was requested.
/// The waiting times show the difference.
///
/// Displays as a table and a sentence such as `rank 3 came last in 41 of 60 waits, 12.3 ms of 14.0
/// ms`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Waits {
    times: Histogram,
    total: Duration,
    stragglers: BTreeMap<usize, Straggler>,
}

/// A rank for which others wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Straggler {
    /// Global rank of the straggler.
    pub rank: usize,
    /// Number of waits in which it was the last to join.
    pub waits: u64,
    /// Total duration of these waits.
    pub waiting: Duration,
}

impl Waits {
    /// Adds a wait. `straggler` is the rank that joined last, if it was another rank.
    pub(super) fn add(&mut self, waiting: Duration, straggler: Option<usize>) {
        self.times.add(waiting);
        self.total += waiting;
        if let Some(rank) = straggler {
            let straggler = Straggler {
                rank,
                waits: 0,
                waiting: Duration::ZERO,
            };
            let straggler = self.stragglers.entry(rank).or_insert(straggler);
            straggler.waits += 1;
            straggler.waiting += waiting;
        }
    }

    /// Returns the distribution of the waiting times.
    pub fn times(&self) -> &Histogram {
        &self.times
    }

    /// Returns the number of waits.
    pub fn count(&self) -> u64 {
        self.times.count()
    }

    /// Returns the total duration of all waits.
    pub fn total(&self) -> Duration {
        self.total
    }

    /// Returns the other ranks that joined last, ordered by waiting time, longest first.
    pub fn stragglers(&self) -> Vec<Straggler> {
        let mut stragglers: Vec<_> = self.stragglers.values().copied().collect();
        stragglers.sort_by_key(|straggler| Reverse(straggler.weight()));
        stragglers
    }

    /// Returns the rank for which this one has waited longest.
    pub fn straggler(&self) -> Option<Straggler> {
        self.stragglers
            .values()
            .copied()
            .max_by_key(Straggler::weight)
    }

    /// Returns a sentence about the rank for which this one has waited longest.
    pub(super) fn sentence(&self) -> Option<String> {
        let Straggler {
            rank,
            waits,
            waiting,
        } = self.straggler()?;
        let count = self.count();
        let waiting = Time(waiting);
        let total = Time(self.total);
        Some(format!(
            "rank {rank} came last in {waits} of {count} waits, {waiting} of {total}"
        ))
    }
}

impl Straggler {
    /// Returns the sort key of stragglers: with equal times and counts, the lower rank comes first.
    fn weight(&self) -> (Duration, u64, Reverse<usize>) {
        (self.waiting, self.waits, Reverse(self.rank))
    }
}

impl fmt::Display for Waits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:<12} {:>8}", "waited from", "waits")?;
        for (from, count) in self.times.iter().filter(|(_, count)| *count > 0) {
            write!(f, "\n{:<12} {count:>8}", Time(from))?;
        }
        let stragglers = self.stragglers();
        let Some(sentence) = self.sentence() else {
            return Ok(());
        };
        write!(f, "\n{:<12} {:>8} {:>10}", "came last", "waits", "waited")?;
        for Straggler {
            rank,
            waits,
            waiting,
        } in stragglers.iter().take(SHOWN)
        {
            write!(f, "\nrank {rank:<7} {waits:>8} {:>10}", Time(*waiting))?;
        }
        let others = stragglers.iter().skip(SHOWN);
        if others.len() > 0 {
            let count = others.len();
            let waits = others.clone().map(|other| other.waits).sum::<u64>();
            write!(
                f,
                "\n{count:<3} others {waits:>10} {:>10}",
                Time(others.map(|other| other.waiting).sum())
            )?;
        }
        write!(f, "\n{sentence}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Creates waits from pairs of microseconds waited and the last rank.
    fn waits(waits: &[(u64, Option<usize>)]) -> Waits {
        let mut all = Waits::default();
        waits
            .iter()
            .for_each(|(micros, rank)| all.add(Duration::from_micros(*micros), *rank));
        all
    }

    #[test]
    fn the_straggler_is_waited_for_the_longest_not_the_most_often() {
        let waits = waits(&[
            (10, Some(1)),
            (700, Some(3)),
            (20, Some(1)),
            (0, None),
            (5, Some(1)),
            (300, Some(3)),
        ]);
        assert_eq!(
            (waits.count(), waits.total()),
            (6, Duration::from_micros(1035))
        );
        let straggler = |rank, waits, micros| Straggler {
            rank,
            waits,
            waiting: Duration::from_micros(micros),
        };
        assert_eq!(
            waits.stragglers(),
            [straggler(3, 2, 1000), straggler(1, 3, 35)]
        );
        assert_eq!(waits.straggler(), Some(straggler(3, 2, 1000)));
        assert_eq!(
            waits.sentence().as_deref(),
            Some("rank 3 came last in 2 of 6 waits, 1.0 ms of 1.0 ms")
        );
    }

    #[test]
    fn of_equal_stragglers_the_lower_rank_is_named() {
        let waits = waits(&[(4, Some(2)), (4, Some(5)), (4, Some(1))]);
        assert_eq!(
            waits
                .stragglers()
                .iter()
                .map(|straggler| straggler.rank)
                .collect::<Vec<_>>(),
            [1, 2, 5]
        );
        assert_eq!(waits.straggler().map(|straggler| straggler.rank), Some(1));
    }

    #[test]
    fn a_rank_that_is_always_last_waits_for_no_other() {
        let waits = waits(&[(3, None), (0, None)]);
        assert_eq!(
            (waits.count(), waits.stragglers(), waits.straggler()),
            (2, vec![], None)
        );
        assert_eq!(
            waits.to_string(),
            "waited from     waits\n0 ns                1\n2.0 us              1"
        );
    }

    #[test]
    fn the_table_shows_buckets_stragglers_and_the_sentence() {
        let table = waits(&[(0, None), (3, Some(7)), (2, Some(7)), (1500, Some(2))]).to_string();
        let lines = [
            "waited from     waits",
            "0 ns                1",
            "2.0 us              2",
            "1.0 ms              1",
            "came last       waits     waited",
            "rank 2              1     1.5 ms",
            "rank 7              2     5.0 us",
            "rank 2 came last in 1 of 4 waits, 1.5 ms of 1.5 ms",
        ];
        assert_eq!(table.lines().collect::<Vec<_>>(), lines);
    }

    #[test]
    fn of_many_stragglers_the_last_ones_share_a_row() {
        let many: Vec<_> = (0..11)
            .map(|rank| (100 - rank as u64, Some(rank)))
            .collect();
        let table = waits(&many).to_string();
        let rows: Vec<_> = table
            .lines()
            .filter(|line| line.contains("rank ") || line.contains("others"))
            .collect();
        assert_eq!(rows.len(), 8 + 1 + 1);
        assert_eq!(rows[8], "3   others          3   273.0 us", "92 + 91 + 90");
    }

    /// Checks the bounds of each bucket, to the nanosecond.
    #[test]
    fn buckets_begin_at_powers_of_two() {
        let bucket = |nanos: u64| {
            let mut histogram = Histogram::default();
            histogram.add(Duration::from_nanos(nanos));
            assert_eq!(histogram.count(), 1);
            let (from, _) = histogram
                .iter()
                .find(|(_, count)| *count == 1)
                .expect("a bucket has the wait");
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
        let edges: Vec<_> = Histogram::default()
            .iter()
            .map(|(from, _)| from.as_micros())
            .collect();
        assert_eq!(
            (edges.len(), &edges[..5], edges[21]),
            (22, &[0, 1, 2, 4, 8][..], 1 << 20)
        );
        assert!(edges[1..].is_sorted_by(|a, b| 2 * a == *b));
    }

    #[test]
    fn the_longest_wait_there_is_has_a_bucket() {
        let mut histogram = Histogram::default();
        histogram.add(Duration::MAX);
        assert_eq!(
            histogram.iter().last(),
            Some((Duration::from_micros(1 << 20), 1))
        );
    }
}
