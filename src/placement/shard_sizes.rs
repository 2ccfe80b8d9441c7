//! [`ShardSizes`]: division of a length among the ranks of one mesh dimension.

use std::ops::Range;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

use super::chunk;

/// Division of a length among ranks: it determines the interval that each rank holds.
///
/// ```text
/// length 5 over 3 ranks      rank 0    rank 1    rank 2
/// Chunked(5)                 | 0 1     | 2 3     | 4 |
/// Uneven([3, 0, 2])          | 0 1 2   |         | 3 4 |
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ShardSizes {
    /// This length is split into [`chunk`]s: all ranks hold equally many elements, except for the
    /// last ranks.
    Chunked(usize),
    /// Explicit sizes, one per rank, possibly 0.
    Uneven(Arc<[usize]>),
}

impl ShardSizes {
    /// Returns the length that is divided.
    pub fn total(&self) -> usize {
        match self {
            Self::Chunked(len) => *len,
            Self::Uneven(lengths) => lengths.iter().sum(),
        }
    }

    /// Returns the interval that rank `rank` of `ranks` holds. An empty interval starts where the
    /// next one starts.
    ///
    /// # Panics
    /// If `rank` is not below `ranks`, or if the sizes are not those of `ranks` ranks.
    pub fn range(&self, ranks: usize, rank: usize) -> Range<usize> {
        match self {
            Self::Chunked(len) => chunk(*len, ranks, rank),
            Self::Uneven(lengths) => {
                assert_eq!(
                    lengths.len(),
                    ranks,
                    "expected one shard size for each of {ranks} ranks, but got \
                                                  {lengths:?}"
                );
                let start = lengths[..rank].iter().sum();
                start..start + lengths[rank]
            }
        }
    }

    /// Returns the explicit sizes, if there are any.
    pub fn lengths(&self) -> Option<&Arc<[usize]>> {
        match self {
            Self::Chunked(_) => None,
            Self::Uneven(lengths) => Some(lengths),
        }
    }

    /// Returns the distinct sizes that ranks hold, ascending.
    pub(super) fn distinct(&self, ranks: usize) -> SmallVec<[usize; 4]> {
        let mut lengths: SmallVec<[usize; 4]> = match self {
            // Three ranks suffice: one with a full chunk, the one with a shorter chunk, and the
            // last one.
            Self::Chunked(len) => {
                let full = len.div_ceil(ranks).max(1);
                [0, (len / full).min(ranks - 1), ranks - 1]
                    .iter()
                    .map(|&rank| self.range(ranks, rank).len())
                    .collect()
            }
            Self::Uneven(lengths) => lengths.iter().copied().collect(),
        };
        lengths.sort_unstable();
        lengths.dedup();
        lengths
    }
}

#[cfg(test)]
mod tests {
    use itertools::Itertools;

    use super::*;

    /// All divisions of up to 4 elements among up to 4 ranks are compared with assigning one
    /// element after another.
    #[test]
    fn uneven_sizes_deal_the_elements_in_order() {
        for lengths in (1..=4).flat_map(|ranks| (0..ranks).map(|_| 0..=4).multi_cartesian_product())
        {
            let owners = lengths
                .iter()
                .enumerate()
                .flat_map(|(rank, &len)| vec![rank; len])
                .collect_vec();
            let sizes = ShardSizes::Uneven(lengths.clone().into());
            assert_eq!(sizes.total(), owners.len());
            let mut held = lengths
                .iter()
                .enumerate()
                .map(|(rank, _)| sizes.range(lengths.len(), rank))
                .collect_vec();
            for (element, &owner) in owners.iter().enumerate() {
                let holders = held
                    .iter()
                    .positions(|range| range.contains(&element))
                    .collect_vec();
                assert_eq!(holders, [owner], "element {element} of {lengths:?}");
            }
            held.dedup_by_key(|range| range.len());
            assert!(
                held.iter()
                    .all(|range| sizes.distinct(lengths.len()).contains(&range.len())),
                "{lengths:?}"
            );
        }
    }

    #[test]
    fn the_distinct_lengths_are_those_of_all_ranks() {
        for (len, ranks) in (0..30).cartesian_product(1..=8) {
            let all = (0..ranks)
                .map(|rank| chunk(len, ranks, rank).len())
                .sorted()
                .dedup()
                .collect_vec();
            assert_eq!(
                ShardSizes::Chunked(len).distinct(ranks).to_vec(),
                all,
                "{len} over {ranks}"
            );
        }
        assert_eq!(
            ShardSizes::Uneven([3, 0, 3, 1].into()).distinct(4).to_vec(),
            [0, 1, 3]
        );
    }

    #[test]
    #[should_panic(expected = "expected one shard size for each of 2 ranks, but got [3, 0, 2]")]
    fn lengths_of_other_ranks_panic() {
        ShardSizes::Uneven([3, 0, 2].into()).range(2, 0);
    }
}
