//! [`HaloPlan`]: the elements that ranks exchange. Pure functions of intervals.

use std::ops::Range;

use smallvec::SmallVec;

/// An interval of each sharded dimension.
pub(in crate::dtensor::ops) type HaloBlock = SmallVec<[Range<usize>; 2]>;

/// Elements that one rank holds, and those that it reads.
///
/// ```text
/// elements of the dimension       0 1 2 3 4 5
/// has 2..4                            x x
/// reads -1..3: the halo is 0, 1   _ x x x
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct HaloRange {
    pub(super) has: HaloBlock,
    /// May extend beyond the dimension, into the padding.
    pub(super) reads: SmallVec<[Range<isize>; 2]>,
    /// Elements of the dimension that it reads, or `None` if it reads only padding.
    pub(super) needs: Option<HaloBlock>,
}

impl HaloRange {
    /// Returns true if the rank needs elements that other ranks hold.
    fn is_in_need(&self) -> bool {
        self.needs
            .as_ref()
            .is_some_and(|needs| meet(&self.has, needs).as_ref() != Some(needs))
    }

    /// Returns true if the rank reads exactly the elements that it holds.
    fn reads_its_own(&self) -> bool {
        self.has
            .iter()
            .zip(&self.reads)
            .all(|(has, reads)| (has.start as isize, has.end as isize) == (reads.start, reads.end))
    }
}

/// Blocks that a rank sends to and receives from each rank of its group, including itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct HaloPlan {
    /// For each rank, the block of this rank's shard that it needs.
    pub(super) gives: Vec<Option<HaloBlock>>,
    /// For each rank, the position of its block among the elements that this rank reads.
    pub(super) takes: Vec<Option<HaloBlock>>,
    /// Number of elements that this rank reads.
    pub(super) lens: SmallVec<[usize; 2]>,
    /// True if any elements move between ranks of the group.
    pub(super) moves: bool,
    /// True if every rank of the group reads exactly the elements that it holds.
    pub(super) is_identity: bool,
}

impl HaloPlan {
    /// Makes the plan of rank `own`.
    pub(super) fn new(parts: &[&HaloRange], own: usize) -> Self {
        let HaloRange { has, reads, needs } = parts[own];
        let starts: SmallVec<[isize; 2]> = has.iter().map(|range| range.start as isize).collect();
        let gives = |part: &&HaloRange| Some(shifted(meet(has, part.needs.as_ref()?)?, &starts));
        let origin: SmallVec<[isize; 2]> = reads.iter().map(|range| range.start).collect();
        let takes = |part: &&HaloRange| Some(shifted(meet(&part.has, needs.as_ref()?)?, &origin));
        Self {
            gives: parts.iter().map(gives).collect(),
            takes: parts.iter().map(takes).collect(),
            lens: reads
                .iter()
                .map(|range| (range.end - range.start) as usize)
                .collect(),
            moves: parts.iter().any(|part| part.is_in_need()),
            is_identity: parts.iter().all(|part| part.reads_its_own()),
        }
    }
}

/// Returns the intersection of two blocks, or `None` if it is empty.
fn meet(a: &HaloBlock, b: &HaloBlock) -> Option<HaloBlock> {
    let both = a
        .iter()
        .zip(b)
        .map(|(a, b)| a.start.max(b.start)..a.end.min(b.end));
    let both: HaloBlock = both.collect();
    both.iter().all(|range| !range.is_empty()).then_some(both)
}

/// Returns the block relative to `origin`, which is not behind it.
fn shifted(block: HaloBlock, origin: &[isize]) -> HaloBlock {
    let seen = |at: usize, origin: isize| (at as isize - origin) as usize;
    block
        .into_iter()
        .zip(origin)
        .map(|(range, &origin)| seen(range.start, origin)..seen(range.end, origin))
        .collect()
}

#[cfg(test)]
mod tests {
    use itertools::iproduct;

    use super::*;

    /// Makes plans for ranks with one dimension, given what each has, reads and needs.
    fn plans(lines: &[(Range<usize>, Range<isize>, Range<usize>)]) -> Vec<HaloPlan> {
        let block = |range: &Range<usize>| HaloBlock::from_iter([range.clone()]);
        let part = |(has, reads, needs): &(Range<usize>, Range<isize>, Range<usize>)| HaloRange {
            has: block(has),
            reads: [reads.clone()].into_iter().collect(),
            needs: (!needs.is_empty()).then(|| block(needs)),
        };
        let parts: Vec<HaloRange> = lines.iter().map(part).collect();
        let parts: Vec<&HaloRange> = parts.iter().collect();
        (0..parts.len())
            .map(|own| HaloPlan::new(&parts, own))
            .collect()
    }

    /// Elements 0..7 are split into 3, 0, 3 and 1. All ranks read the same interval, for every
    /// interval.
    #[test]
    fn what_is_given_is_what_is_taken_and_all_that_is_needed_arrives() {
        let has = [0..3, 3..3, 3..6, 6..7];
        for (start, end) in iproduct!(0..7, 1..8).filter(|(start, end)| start < end) {
            let lines: Vec<_> = has
                .iter()
                .map(|has| {
                    (
                        has.clone(),
                        start as isize - 2..end as isize + 1,
                        start..end,
                    )
                })
                .collect();
            let plans = plans(&lines);
            for (own, plan) in plans.iter().enumerate() {
                assert_eq!(plan.lens[..], [end - start + 3]);
                let mut read = vec![None; plan.lens[0]];
                for (peer, given) in plans.iter().enumerate() {
                    let from = given.gives[own].clone();
                    let to = plan.takes[peer].clone();
                    assert_eq!(from.is_some(), to.is_some());
                    let Some((from, to)) = from.zip(to) else {
                        continue;
                    };
                    assert_eq!(from[0].len(), to[0].len());
                    for (from, to) in from[0].clone().zip(to[0].clone()) {
                        read[to] = Some(has[peer].start + from);
                    }
                }
                let expected = (0..plan.lens[0]).map(|at| {
                    (at + start)
                        .checked_sub(2)
                        .filter(|at| (start..end).contains(at))
                });
                assert_eq!(read, expected.collect::<Vec<_>>());
            }
        }
    }

    #[test]
    fn nothing_moves_where_everyone_has_what_it_needs() {
        let aligned = plans(&[(0..2, 0..2, 0..2), (2..4, 2..4, 2..4)]);
        assert!(aligned.iter().all(|plan| plan.is_identity && !plan.moves));
        let padded = plans(&[(0..2, -1..2, 0..2), (2..4, 2..4, 2..4)]);
        assert!(padded.iter().all(|plan| !plan.is_identity && !plan.moves));
        let idle = plans(&[(0..2, 0..2, 0..2), (2..4, 3..6, 0..0)]);
        assert!(idle.iter().all(|plan| !plan.is_identity && !plan.moves));
        let halo = plans(&[(0..2, 0..3, 0..3), (2..4, 2..4, 2..4)]);
        assert!(halo.iter().all(|plan| !plan.is_identity && plan.moves));
    }
}
