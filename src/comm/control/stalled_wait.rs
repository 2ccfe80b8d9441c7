//! [`Wait`]: operation that a rank waits for; with the detection of waits that cannot end.

use std::collections::HashSet;

use super::{
    CollectiveId, CommError, Failure, GroupKey, MatchTable, OpHandle, RankState, RecvHandle,
    Signature,
};

/// Operation that a rank waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Wait {
    /// A collective, which needs all ranks of its group.
    All(OpHandle),
    /// A message.
    Message(RecvHandle),
}

/// A wait of a rank that takes long, which may be part of a deadlock.
#[derive(Debug, Clone)]
pub(crate) struct StalledWait {
    pub rank: usize,
    /// Number of this wait, counted over all waits of the rank.
    pub number: u64,
    pub during: CollectiveId,
    /// Ranks that the wait needs, each with the number of the wait it is in, if it is local and
    /// waits.
    pub needs: Vec<(usize, Option<u64>)>,
}

impl Wait {
    pub fn group(self) -> GroupKey {
        match self {
            Self::All(op) => op.group,
            Self::Message(receive) => receive.group,
        }
    }

    /// Returns a value that is equal for all members that wait for the same collective.
    fn shared(self) -> Self {
        match self {
            Self::All(op) => Self::All(OpHandle { member: 0, ..op }),
            message => message,
        }
    }
}

impl<F: Signature, P> MatchTable<F, P> {
    /// Returns true if the rank need not wait any longer.
    pub fn is_over(&self, wait: Wait) -> bool {
        self.failure().is_some()
            || match wait {
                Wait::All(op) => self.entry(op).parts.is_some(),
                Wait::Message(receive) => self.has_arrived(receive),
            }
    }

    /// Records that a rank waits, and fails the world if it would wait forever.
    pub fn begin_wait(&mut self, wait: Wait) {
        let rank = self.rank(wait);
        if !self.multithreaded && !self.ranks[rank].waits.is_empty() {
            self.fail(self.concurrent(rank, self.id(wait)));
        }
        self.ranks[rank].waits.push(wait);
        self.ranks[rank].begun += 1;
        self.count(wait);
        self.check_returned(wait);
        if !self.multithreaded
            && self.failure().is_none()
            && self.others_wait_elsewhere(wait)
            && let Some(waits) = self.cycle(rank)
        {
            self.fail(Failure::Collective(CommError::Deadlock { waits }));
        }
    }

    /// Records that `rank` no longer waits.
    pub fn end_wait(&mut self, rank: usize, wait: Wait) {
        self.ranks[rank].waits.retain(|other| *other != wait);
    }

    /// Counts a wait if its target is not complete.
    fn count(&mut self, wait: Wait) {
        let pending = match wait {
            Wait::All(op) => {
                let entry = self.entry_mut(op);
                entry.waits += usize::from(entry.absent > 0);
                entry.absent > 0
            }
            Wait::Message(receive) => self.await_message(receive),
        };
        self.waits += usize::from(pending);
    }

    /// Returns true if ranks wait for incomplete operations other than the target of `wait`, or its
    /// rank for its own message.
    ///
    /// If no rank does, no rank that `wait` needs is waiting, so no cycle leads through it. In a
    /// program of one group, no search ever runs.
    pub(super) fn others_wait_elsewhere(&self, wait: Wait) -> bool {
        let here = match wait {
            Wait::All(op) => self.entry(op).waits,
            Wait::Message(receive) => usize::from(self.senders(receive) != [self.rank(wait)]),
        };
        self.waits > here
    }

    /// Fails the world if a rank that `wait` still needs has returned.
    pub fn check_returned(&mut self, wait: Wait) {
        if self.groups[wait.group().0].returned == 0 {
            return;
        }
        let returned = match wait {
            Wait::All(op) => self.absent(op).find(|rank| self.ranks[*rank].returned),
            Wait::Message(receive) => {
                let own = self.rank(wait);
                let mut senders = self
                    .senders(receive)
                    .iter()
                    .copied()
                    .filter(|rank| *rank != own);
                let first = senders.next();
                first.filter(|first| {
                    [*first]
                        .into_iter()
                        .chain(senders)
                        .all(|rank| self.ranks[rank].returned)
                })
            }
        };
        if let Some(rank) = returned {
            let during = self.id(wait);
            self.fail(Failure::Collective(CommError::RankReturned {
                rank,
                during,
            }));
        }
    }

    /// Returns the global ranks that `wait` is waiting for, in group order.
    pub fn missing(&self, wait: Wait) -> Vec<usize> {
        match wait {
            Wait::All(op) => self.without_data(op).collect(),
            Wait::Message(receive) => self
                .sender(receive)
                .map_or_else(|| self.senders(receive).to_vec(), |rank| vec![rank]),
        }
    }

    /// Returns the ranks that must all act before `wait` can end.
    pub(super) fn needs(&self, wait: Wait) -> impl Iterator<Item = usize> {
        let (op, senders) = match wait {
            Wait::All(op) => (Some(op), &[][..]),
            Wait::Message(receive) => (None, self.senders(receive)),
        };
        let own = self.rank(wait);
        let mut others = senders
            .iter()
            .copied()
            .filter(|rank| senders.len() == 1 || *rank != own);
        let only = others.next().filter(|_| others.next().is_none());
        op.into_iter().flat_map(|op| self.absent(op)).chain(only)
    }

    /// Returns the call that `wait` is for, as its rank made it.
    pub fn id(&self, wait: Wait) -> CollectiveId {
        match wait {
            Wait::All(op) => {
                let g = &self.groups[op.group.0];
                g.id(op.seq, g.signature(op.seq, op.member))
            }
            Wait::Message(receive) => self.receive_id(receive),
        }
    }

    /// Returns the global rank that waits.
    pub fn rank(&self, wait: Wait) -> usize {
        let (group, member) = match wait {
            Wait::All(OpHandle { group, member, .. }) => (group, member),
            Wait::Message(RecvHandle { group, member, .. }) => (group, member),
        };
        self.groups[group.0].ranks[member]
    }

    /// Returns the description of a stalled wait, with which other processes search for a deadlock.
    /// Returns `None` if a waiting rank may call on another thread, because no deadlock can be
    /// proved then.
    pub fn stalled(&self, wait: Wait) -> Option<StalledWait> {
        if self.multithreaded || self.is_over(wait) {
            return None;
        }
        let rank = self.rank(wait);
        let needs = self
            .needs(wait)
            .map(|other| (other, self.wait_of(other)))
            .collect();
        Some(StalledWait {
            rank,
            number: self.ranks[rank].begun,
            during: self.id(wait),
            needs,
        })
    }

    /// Returns the number of the wait that a rank is in.
    pub fn wait_of(&self, rank: usize) -> Option<u64> {
        let RankState { waits, begun, .. } = &self.ranks[rank];
        (!waits.is_empty()).then_some(*begun)
    }

    /// Returns the call that `rank` waits in, if it is still in wait `number` and needs `other`.
    pub fn still_needs(&self, rank: usize, number: u64, other: usize) -> Option<CollectiveId> {
        let wait = *self.ranks[rank]
            .waits
            .last()
            .filter(|_| self.ranks[rank].begun == number)?;
        (!self.is_over(wait) && self.needs(wait).any(|needed| needed == other))
            .then(|| self.id(wait))
    }

    /// Returns the failure of a `rank` that makes a call while it waits.
    pub(super) fn concurrent(&self, rank: usize, called: CollectiveId) -> Failure {
        let during = self.id(self.ranks[rank].waits[0]);
        Failure::Collective(CommError::ConcurrentCalls {
            rank,
            called,
            during,
        })
    }

    /// Searches for a cycle of waits through `start`. Returns each rank of it, the call that it
    /// waits in, and the next rank.
    fn cycle(&self, start: usize) -> Option<Vec<(usize, CollectiveId, usize)>> {
        let mut path = Vec::new();
        let mut seen = HashSet::new();
        self.follow(start, start, &mut seen, &mut path).then(|| {
            path.reverse();
            path
        })
    }

    /// Returns true if waits lead from `rank` to `start`, and then adds them to `path` in reverse
    /// order.
    ///
    /// Most ranks that a rank waits for do not wait themselves, and are skipped quickly. All waits
    /// for one collective need the same ranks, so only one of them is followed.
    fn follow(
        &self,
        rank: usize,
        start: usize,
        seen: &mut HashSet<Wait>,
        path: &mut Vec<(usize, CollectiveId, usize)>,
    ) -> bool {
        for wait in &self.ranks[rank].waits {
            if !seen.insert(wait.shared()) {
                continue;
            }
            for target in self
                .needs(*wait)
                .filter(|target| !self.ranks[*target].waits.is_empty())
            {
                if target == start || self.follow(target, start, seen, path) {
                    path.push((rank, self.id(*wait), target));
                    return true;
                }
            }
        }
        false
    }
}
