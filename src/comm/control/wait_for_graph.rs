//! [`WaitForGraph`]: detection of deadlocks among ranks of several processes. Pure state.
//!
//! Each process knows which ranks its own ranks wait for, but not whether those wait, too. A rank
//! that has waited for long asks:
//!
//! ```text
//! process of rank a                           process of rank b
//! a, in its wait 7, needs b  --Needs------->  b waits, in its wait 3
//! a is still in wait 7, and  <-----Waiting--
//! still needs b: --WaitsFor--> first process  (a, 7) needs (b, 3)
//! ```
//!
//! The messages of a process arrive in order. When `Waiting` arrives, all earlier calls of `b` have
//! therefore arrived. If `a` still needs `b`, it does so until the next call of `b`, which `b` does
//! not make before its wait 3 is over. A cycle of such needs never ends.

use std::collections::{HashMap, HashSet};

use serde::{Deserialize, Serialize};

use crate::comm::CollectiveId;

/// Message of deadlock detection, about ranks that have waited for long.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::comm) enum WaitForEdge {
    /// Wait `number` of `rank` needs `other`. Sent to the process of `other`.
    Needs {
        rank: usize,
        number: u64,
        other: usize,
    },
    /// Reply: `other` waits, too, in its wait `in_wait`.
    Waiting {
        rank: usize,
        number: u64,
        other: usize,
        in_wait: u64,
    },
    /// `rank` is still in that wait and still needs `other`. Sent to the first process.
    WaitsFor {
        rank: usize,
        number: u64,
        during: CollectiveId,
        other: usize,
        in_wait: u64,
    },
}

/// Graph of the known waits of ranks, each the latest of its rank.
#[derive(Debug, Default)]
pub(in crate::comm) struct WaitForGraph(HashMap<usize, WaitingRank>);

#[derive(Debug)]
struct WaitingRank {
    number: u64,
    during: CollectiveId,
    /// Needed ranks, each with the number of the wait that it is in.
    needs: HashMap<usize, u64>,
}

/// Each rank of a cycle, the call that it waits in, and the next rank.
type Cycle = Vec<(usize, CollectiveId, usize)>;

impl WaitForGraph {
    /// Adds an edge: wait `number` of `rank` needs `other`, which is in its wait `in_wait`. Returns
    /// a cycle if the edge closes one.
    pub fn add(
        &mut self,
        rank: usize,
        number: u64,
        during: CollectiveId,
        other: usize,
        in_wait: u64,
    ) -> Option<Cycle> {
        let new = || WaitingRank {
            number,
            during: during.clone(),
            needs: HashMap::new(),
        };
        let waiting = self.0.entry(rank).or_insert_with(new);
        if waiting.number < number {
            *waiting = new();
        }
        if waiting.number > number {
            return None;
        }
        waiting.needs.insert(other, in_wait);
        let mut path = Vec::new();
        self.follow(rank, rank, &mut HashSet::new(), &mut path)
            .then(|| {
                path.reverse();
                path
            })
    }

    /// Returns true if waits lead from `rank` to `start`, and then adds them to `path` in reverse
    /// order.
    fn follow(
        &self,
        rank: usize,
        start: usize,
        seen: &mut HashSet<usize>,
        path: &mut Cycle,
    ) -> bool {
        let Some(waiting) = self.0.get(&rank).filter(|_| seen.insert(rank)) else {
            return false;
        };
        for (other, _) in waiting
            .needs
            .iter()
            .filter(|(other, in_wait)| self.0.get(other).is_some_and(|it| it.number == **in_wait))
        {
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
        CollectiveId {
            op: Op::Barrier,
            seq,
            label: "wait".into(),
            ranks: [0, 1, 2].into(),
        }
    }

    /// Adds an edge, given as rank, its wait, the rank that it needs, and the wait of that rank.
    fn add(
        chains: &mut WaitForGraph,
        [rank, number, other, in_wait]: [u64; 4],
    ) -> Option<Vec<(usize, u64, usize)>> {
        let cycle = chains.add(rank as usize, number, id(number), other as usize, in_wait)?;
        Some(
            cycle
                .into_iter()
                .map(|(rank, during, other)| (rank, during.seq, other))
                .collect(),
        )
    }

    #[test]
    fn a_cycle_is_found_once_it_is_closed() {
        let mut chains = WaitForGraph::default();
        assert_eq!(add(&mut chains, [0, 7, 1, 3]), None);
        assert_eq!(add(&mut chains, [2, 5, 0, 7]), None);
        assert_eq!(
            add(&mut chains, [1, 3, 2, 5]),
            Some(vec![(1, 3, 2), (2, 5, 0), (0, 7, 1)])
        );
    }

    #[test]
    fn a_rank_that_waits_for_several_may_be_in_several_chains() {
        let mut chains = WaitForGraph::default();
        assert_eq!(add(&mut chains, [0, 1, 2, 9]), None);
        assert_eq!(add(&mut chains, [0, 1, 1, 4]), None);
        assert_eq!(
            add(&mut chains, [1, 4, 0, 1]),
            Some(vec![(1, 4, 0), (0, 1, 1)])
        );
    }

    #[test]
    fn waits_that_are_over_are_in_no_cycle() {
        let mut chains = WaitForGraph::default();
        assert_eq!(add(&mut chains, [0, 7, 1, 3]), None);
        // Rank 1 waited for rank 0 later, in another wait than rank 0 had seen.
        assert_eq!(add(&mut chains, [1, 4, 0, 7]), None);
        // Rank 0 is in another wait by now.
        assert_eq!(add(&mut chains, [0, 8, 1, 4]), None);
        assert_eq!(
            add(&mut chains, [1, 4, 0, 8]),
            Some(vec![(1, 4, 0), (0, 8, 1)])
        );
        // A message about an old wait that arrives late.
        assert_eq!(add(&mut chains, [0, 7, 1, 4]), None);
    }
}
