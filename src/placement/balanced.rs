//! [`balanced`]: distributes the rows of several tensors so that all ranks hold nearly equal numbers of bytes.
//!
//! A chunk is the length divided by the number of ranks, rounded up. With 9 rows, 8 ranks hold 2,
//! 2, 2, 2, 1, 0, 0 and 0 of them, and for each tensor the first ranks hold more. The rows of
//! several tensors together can be distributed evenly:
//!
//! ```text
//! a: 5 rows of 3 bytes, b: 4 rows of 1, over 3 ranks       each letter is a byte
//!
//!            chunks                                balanced
//! rank 0     | aaa aaa  b b |     8                | aaa aaa  b |       7
//! rank 1     | aaa aaa  b b |     8                | aaa aaa    |       6
//! rank 2     | aaa          |     3                | aaa  b b b |       6
//! ```

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Number of rows of a tensor, and the bytes of each row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TensorRows {
    pub count: usize,
    pub bytes: usize,
}

/// Returns, for each tensor, the number of its rows on each rank. `held` is the number of bytes
/// that each rank holds in addition.
///
/// Rows are assigned in order of descending size, each to the rank that holds the fewest bytes, or
/// the first of several (longest processing time first, R. L. Graham, Bounds on multiprocessing
/// timing anomalies, 1969). If `held` is zero everywhere, the bytes of any two ranks differ by at
/// most one row, the largest.
pub(crate) fn balanced(tensors: &[TensorRows], held: &[usize]) -> Vec<Vec<usize>> {
    let mut ranks: BinaryHeap<_> = held
        .iter()
        .enumerate()
        .map(|(rank, &bytes)| Reverse((bytes, rank)))
        .collect();
    let mut lengths = vec![vec![0; held.len()]; tensors.len()];
    let mut order: Vec<_> = (0..tensors.len()).collect();
    order.sort_by_key(|&at| Reverse(tensors[at].bytes));
    for at in order {
        let TensorRows { count, bytes } = tensors[at];
        for _ in 0..count {
            let mut least = ranks.peek_mut().expect("a group has a rank");
            let Reverse((held, rank)) = &mut *least;
            *held += bytes;
            lengths[at][*rank] += 1;
        }
    }
    lengths
}

#[cfg(test)]
mod tests {
    use itertools::Itertools;

    use super::*;

    fn rows(tensors: &[(usize, usize)]) -> Vec<TensorRows> {
        tensors
            .iter()
            .map(|&(count, bytes)| TensorRows { count, bytes })
            .collect()
    }

    /// Returns the bytes that each rank holds.
    fn loads(tensors: &[TensorRows], lengths: &[Vec<usize>], ranks: usize) -> Vec<usize> {
        (0..ranks)
            .map(|rank| {
                tensors
                    .iter()
                    .zip(lengths)
                    .map(|(rows, lengths)| rows.bytes * lengths[rank])
                    .sum()
            })
            .collect()
    }

    fn spread(loads: &[usize]) -> usize {
        loads.iter().max().unwrap() - loads.iter().min().unwrap()
    }

    #[test]
    fn the_picture() {
        let tensors = rows(&[(5, 3), (4, 1)]);
        assert_eq!(balanced(&tensors, &[0; 3]), [[2, 2, 1], [1, 0, 3]]);
    }

    /// Every pair of tensors of up to 5 rows of up to 4 bytes, on up to 4 ranks, is compared with
    /// the best of all distributions, found by exhaustive search.
    #[test]
    fn no_rank_holds_much_more_than_in_the_best_way() {
        let ways = |count: usize, ranks: usize| {
            let ways = (0..ranks).map(|_| 0..=count).multi_cartesian_product();
            ways.filter(move |lengths| lengths.iter().sum::<usize>() == count)
                .collect_vec()
        };
        for ranks in 1..=4 {
            let by_count = (0..=5).map(|count| ways(count, ranks)).collect_vec();
            for (a, b) in (0..=5).cartesian_product(0..=4).tuple_combinations() {
                let tensors = rows(&[a, b]);
                let lengths = balanced(&tensors, &vec![0; ranks]);
                for (tensor, lengths) in tensors.iter().zip(&lengths) {
                    assert_eq!(lengths.iter().sum::<usize>(), tensor.count);
                }
                let found = *loads(&tensors, &lengths, ranks).iter().max().unwrap();
                let all = by_count[a.0].iter().cartesian_product(&by_count[b.0]);
                let best = all
                    .map(|(a, b)| {
                        *loads(&tensors, &[a.clone(), b.clone()], ranks)
                            .iter()
                            .max()
                            .unwrap()
                    })
                    .min()
                    .unwrap();
                // Graham's bound: 4/3 - 1/(3 ranks).
                assert!(
                    3 * ranks * found <= (4 * ranks - 1) * best,
                    "{found} for {best}: {tensors:?} on {ranks}"
                );
            }
        }
    }

    /// For random tensors, all rows are assigned, and no two ranks differ by more than the largest
    /// row.
    #[test]
    fn ranks_are_at_most_a_row_apart() {
        let mut state = 7_u64;
        let mut draw = |below: usize| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as usize % below
        };
        for _ in 0..500 {
            let ranks = 1 + draw(9);
            let count = draw(6);
            let tensors: Vec<_> = (0..count)
                .map(|_| TensorRows {
                    count: draw(40),
                    bytes: draw(60),
                })
                .collect();
            let lengths = balanced(&tensors, &vec![0; ranks]);
            for (tensor, lengths) in tensors.iter().zip(&lengths) {
                assert_eq!(lengths.iter().sum::<usize>(), tensor.count);
            }
            let largest = tensors
                .iter()
                .filter(|rows| rows.count > 0)
                .map(|rows| rows.bytes)
                .max()
                .unwrap_or(0);
            let loads = loads(&tensors, &lengths, ranks);
            assert!(spread(&loads) <= largest, "{loads:?} of {tensors:?}");
        }
    }

    #[test]
    fn what_ranks_hold_besides_is_made_up_for() {
        let tensors = rows(&[(6, 2)]);
        assert_eq!(balanced(&tensors, &[8, 0, 4]), [[0, 4, 2]]);
    }
}
