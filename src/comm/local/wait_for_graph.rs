//! [`WaitForGraph`]: whether ranks of several processes wait for each other. Pure state.
//!
//! Each process knows what its own ranks wait for, and not whether those wait, too. A rank that has waited for long asks:
//!
//! ```text
//! process of rank a                           process of rank b
//! a, in its wait 7, needs b  --Needs------->  b waits, in its wait 3
//! a is still in it, and      <-----WaitingRank--
//! still needs b: --WaitsFor--> first process  (a, 7) needs (b, 3)
//! ```
//!
//! All that a process has sent arrives in order. So when word comes that `b` waits, all has come that `b` had called
//! before: if `a` needs it still, then until `b` calls again, which it does not before its wait 3 is over. Such needs, in a
//! cycle, are for ever.

use std::collections::{HashMap, HashSet};

use crate::comm::CollectiveId;

/// What processes tell each other of ranks that have waited for long.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::comm) enum WaitForEdge {
    /// A rank, in its wait of this number, needs another.
    Needs { rank: usize, number: u64, other: usize },
    /// Which waits, too.
    Waiting { rank: usize, number: u64, other: usize, in_wait: u64 },
    /// And is needed still.
    WaitsFor { rank: usize, number: u64, during: CollectiveId, other: usize, in_wait: u64 },
}

/// What ranks are known to wait for, in their last waits.
#[derive(Debug, Default)]
pub(super) struct WaitForGraph(HashMap<usize, WaitingRank>);

#[derive(Debug)]
struct WaitingRank {
    number: u64,
    during: CollectiveId,
    /// By rank, the number of the wait that it is in.
    needs: HashMap<usize, u64>,
}

/// Each rank of a cycle, what it waits in, and the next one.
type Cycle = Vec<(usize, CollectiveId, usize)>;

impl WaitForGraph {
    /// A rank, in its wait of this number, needs another, which is in the wait `in_wait`. Returns a cycle, if that closes one.
    pub fn add(&mut self, rank: usize, number: u64, during: CollectiveId, other: usize, in_wait: u64) -> Option<Cycle> {
        let new = || WaitingRank { number, during: during.clone(), needs: HashMap::new() };
        let waiting = self.0.entry(rank).or_insert_with(new);
        if waiting.number < number {
            *waiting = new();
        }
        if waiting.number > number {
            return None;
        }
        waiting.needs.insert(other, in_wait);
        let mut path = Vec::new();
        self.follow(rank, rank, &mut HashSet::new(), &mut path).then(|| {
            path.reverse();
            path
        })
    }

    /// Whether waits lead from `rank` to `start`; if so, adds them to `path`, the last one first.
    fn follow(&self, rank: usize, start: usize, seen: &mut HashSet<usize>, path: &mut Cycle) -> bool {
        let Some(waiting) = self.0.get(&rank).filter(|_| seen.insert(rank)) else { return false };
        let is_in = |(other, in_wait): &(&usize, &u64)| self.0.get(other).is_some_and(|it| it.number == **in_wait);
        for (other, _) in waiting.needs.iter().filter(is_in) {
            if *other == start || self.follow(*other, start, seen, path) {
                path.push((rank, waiting.during.clone(), *other));
                return true;
            }
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::Op;

    fn id(seq: u64) -> CollectiveId {
        CollectiveId { op: Op::Barrier, seq, label: "wait".into(), ranks: [0, 1, 2].into() }
    }

    /// Rank, its wait, whom it needs, and that one's wait.
    fn add(chains: &mut WaitForGraph, [rank, number, other, in_wait]: [u64; 4]) -> Option<Vec<(usize, u64, usize)>> {
        let cycle = chains.add(rank as usize, number, id(number), other as usize, in_wait)?;
        Some(cycle.into_iter().map(|(rank, during, other)| (rank, during.seq, other)).collect())
    }

    #[test]
    fn a_cycle_is_found_once_it_is_closed() {
        let mut chains = WaitForGraph::default();
        assert_eq!(add(&mut chains, [0, 7, 1, 3]), None);
        assert_eq!(add(&mut chains, [2, 5, 0, 7]), None);
        assert_eq!(add(&mut chains, [1, 3, 2, 5]), Some(vec![(1, 3, 2), (2, 5, 0), (0, 7, 1)]));
    }

    #[test]
    fn a_rank_that_waits_for_several_may_be_in_several_chains() {
        let mut chains = WaitForGraph::default();
        assert_eq!(add(&mut chains, [0, 1, 2, 9]), None);
        assert_eq!(add(&mut chains, [0, 1, 1, 4]), None);
        assert_eq!(add(&mut chains, [1, 4, 0, 1]), Some(vec![(1, 4, 0), (0, 1, 1)]));
    }

    #[test]
    fn waits_that_are_over_are_in_no_cycle() {
        let mut chains = WaitForGraph::default();
        assert_eq!(add(&mut chains, [0, 7, 1, 3]), None);
        // Rank 1 waited for rank 0 later, in another wait than the one that rank 0 had seen.
        assert_eq!(add(&mut chains, [1, 4, 0, 7]), None);
        // And rank 0 is in another wait since.
        assert_eq!(add(&mut chains, [0, 8, 1, 4]), None);
        assert_eq!(add(&mut chains, [1, 4, 0, 8]), Some(vec![(1, 4, 0), (0, 8, 1)]));
        // Word of an old wait that comes late.
        assert_eq!(add(&mut chains, [0, 7, 1, 4]), None);
    }
}
