//! [`blocks`]: the blocks that ranks send each other between two layouts on different ranks.

use std::collections::BTreeMap;
use std::ops::Range;

use super::Layout;

/// A rectangular block of a tensor that one rank sends to another, or keeps.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TensorBlock {
    /// Rank that sends the block.
    pub from: usize,
    /// Rank that receives the block.
    pub to: usize,
    /// Ranges of the block in the global tensor.
    pub block: Vec<Range<usize>>,
}

/// Returns the blocks that convert a tensor of shape `global` from one layout to another. Each
/// layout comes with the ranks of its mesh, row-major.
///
/// Every rank receives each element of its shard once, from itself if it already holds it. Among
/// ranks that hold replicas, the one that has sent the fewest elements so far is the sender, so
/// that they share the load.
///
/// ```text
/// [4, 2] on (2), [S(0)]         ->   on (2, 2), [R, S(1)]
/// rank 0  | a b |  rank 1  | e f |   ranks 0 and 2  | a |   ranks 1 and 3  | b |
///         | c d |          | g h |                  | c |                  | d |
///                                                   | e |                  | f |
///                                                   | g |                  | h |
/// ```
///
/// # Panics
/// If a layout has a partial placement, or does not fit a tensor of that shape.
pub(crate) fn blocks(
    from: (&Layout, &[usize]),
    to: (&Layout, &[usize]),
    global: &[usize],
) -> Vec<TensorBlock> {
    assert!(
        !from.0.has_partial() && !to.0.has_partial(),
        "partial values cannot be sent as blocks of a tensor"
    );
    let mut holders: Vec<(Vec<Range<usize>>, Vec<usize>)> = Vec::new();
    for (rank, slices) in held(from, global) {
        match holders.iter_mut().find(|(known, _)| *known == slices) {
            Some((_, ranks)) => ranks.push(rank),
            None => holders.push((slices, vec![rank])),
        }
    }
    let mut given: BTreeMap<usize, usize> = BTreeMap::new();
    let mut found = Vec::new();
    for (to, wanted) in held(to, global) {
        for (slices, ranks) in &holders {
            let block: Vec<_> = slices
                .iter()
                .zip(&wanted)
                .map(|(a, b)| a.start.max(b.start)..a.end.min(b.end))
                .collect();
            if block.iter().any(Range::is_empty) {
                continue;
            }
            let from = if ranks.contains(&to) {
                to
            } else {
                let from = *ranks
                    .iter()
                    .min_by_key(|rank| given.get(*rank).copied().unwrap_or(0))
                    .expect("every block has a holder");
                *given.entry(from).or_default() +=
                    block.iter().map(ExactSizeIterator::len).product::<usize>();
                from
            };
            found.push(TensorBlock { from, to, block });
        }
    }
    found
}

/// Returns the ranges that each rank holds, without the ranks that hold nothing.
fn held<'a>(
    (layout, ranks): (&'a Layout, &'a [usize]),
    global: &'a [usize],
) -> impl Iterator<Item = (usize, Vec<Range<usize>>)> {
    let coordinate = |position: usize| {
        let mut rest = position;
        let mut coordinate = layout.mesh_shape().to_vec();
        for index in coordinate.iter_mut().rev() {
            (rest, *index) = (rest / *index, rest % *index);
        }
        coordinate
    };
    let slices = move |position| layout.local_slices(global, &coordinate(position));
    let all = ranks
        .iter()
        .enumerate()
        .map(move |(position, &rank)| (rank, slices(position)));
    all.filter(|(_, slices)| !slices.iter().any(Range::is_empty))
}

#[cfg(test)]
mod tests {
    use itertools::Itertools;

    use super::super::Placement::{Replicate as R, Shard as S};
    use super::*;

    /// Returns the indices of all elements of a block.
    fn elements(block: &[Range<usize>]) -> Vec<Vec<usize>> {
        block.iter().cloned().multi_cartesian_product().collect()
    }

    #[test]
    fn every_rank_gets_its_part_once_and_of_one_that_holds_it() {
        let layouts = |mesh: &[usize]| {
            let placements = mesh
                .iter()
                .map(|_| [R, S(0), S(1)])
                .multi_cartesian_product();
            placements
                .map(|placements| Layout::new(mesh, &placements).unwrap())
                .collect_vec()
        };
        let sources = [
            (vec![2], vec![0, 1]),
            (vec![2, 2], vec![3, 1, 0, 2]),
            (vec![3], vec![4, 5, 6]),
        ];
        let targets = [
            (vec![4], vec![0, 1, 2, 3]),
            (vec![2, 3], vec![5, 4, 3, 2, 1, 0]),
            (vec![1], vec![7]),
        ];
        for ((mesh, ranks), (other_mesh, other_ranks)) in sources.iter().cartesian_product(&targets)
        {
            for (from, to) in layouts(mesh).iter().cartesian_product(&layouts(other_mesh)) {
                for shape in [[5, 3], [1, 4], [0, 2]] {
                    let found = blocks((from, ranks), (to, other_ranks), &shape);
                    let holds: BTreeMap<_, _> = held((from, ranks), &shape).collect();
                    for TensorBlock { from, block, to } in &found {
                        let slices = &holds[from];
                        assert!(
                            block
                                .iter()
                                .zip(slices)
                                .all(|(a, b)| b.start <= a.start && a.end <= b.end)
                        );
                        assert!(
                            from == to || !holds.get(to).is_some_and(|own| own == slices),
                            "the recipient already holds the block"
                        );
                    }
                    for (rank, slices) in held((to, other_ranks), &shape) {
                        let got = found.iter().filter(|own_block| own_block.to == rank);
                        let got = got
                            .flat_map(|own_block| elements(&own_block.block))
                            .sorted()
                            .collect_vec();
                        assert_eq!(got, elements(&slices), "{from} -> {to}, rank {rank}");
                    }
                    let wanted = held((to, other_ranks), &shape)
                        .map(|(rank, _)| rank)
                        .collect_vec();
                    assert!(found.iter().all(|own_block| wanted.contains(&own_block.to)));
                }
            }
        }
    }

    #[test]
    fn copies_share_the_load() {
        let copies = Layout::replicate(&[3]).unwrap();
        let rows = Layout::new(&[6], &[S(0)]).unwrap();
        let found = blocks(
            (&copies, &[0, 1, 2]),
            (&rows, &[3, 4, 5, 6, 7, 8]),
            &[12, 2],
        );
        assert_eq!(
            found
                .iter()
                .map(|own_block| (own_block.from, own_block.to))
                .collect_vec(),
            [(0, 3), (1, 4), (2, 5), (0, 6), (1, 7), (2, 8)]
        );
    }
}
