//! [`Wait`]: operation that a rank waits for; with the detection of waits that cannot end.

use std::collections::HashSet;

use super::{CollectiveId, CommError, Failure, GroupKey, MatchTable, OpHandle, RecvHandle, Signature};

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
    /// Ranks that the wait needs, each with the number of the wait it is in, if it is local and waits.
    pub needs: Vec<(usize, Option<u64>)>,
}

impl Wait {
    pub fn group(self) -> GroupKey {
        match self {
            Self::All(ticket) => ticket.group,
            Self::Message(claim) => claim.group,
        }
    }

    /// Returns a value that is equal for all members that wait for the same collective.
    fn shared(self) -> Self {
        match self {
            Self::All(ticket) => Self::All(OpHandle { member: 0, ..ticket }),
            message => message,
        }
    }
}

impl<F: Signature, P> MatchTable<F, P> {
    /// Returns true if the rank need not wait any longer.
    pub fn is_over(&self, wait: Wait) -> bool {
        self.failure.is_some()
            || match wait {
                Wait::All(ticket) => self.slot(ticket).parts.is_some(),
                Wait::Message(claim) => self.has_arrived(claim),
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
        self.check_left(wait);
        if !self.multithreaded
            && self.failure.is_none()
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
            Wait::All(ticket) => {
                let g = &mut self.groups[ticket.group.0];
                let slot = &mut g.slots[(ticket.seq - g.base) as usize];
                slot.waits += usize::from(slot.absent > 0);
                slot.absent > 0
            }
            Wait::Message(claim) => self.await_letter(claim),
        };
        self.waits += usize::from(pending);
    }

    /// Returns true if ranks wait for incomplete operations other than the target of `wait`.
    ///
    /// If no rank does, no rank that `wait` needs is waiting, so no cycle leads through it. In a program of one
    /// group, no search ever runs.
    pub(super) fn others_wait_elsewhere(&self, wait: Wait) -> bool {
        let here = match wait {
            Wait::All(ticket) => self.slot(ticket).waits,
            Wait::Message(_) => 1,
        };
        self.waits > here
    }

    /// Fails the world if a rank that `wait` still needs has returned.
    pub fn check_left(&mut self, wait: Wait) {
        if self.groups[wait.group().0].left == 0 {
            return;
        }
        let left = match wait {
            Wait::All(ticket) => self.absent(ticket).find(|rank| self.ranks[*rank].returned),
            Wait::Message(claim) => {
                let own = self.rank(wait);
                let mut senders = self.senders(claim).iter().copied().filter(|rank| *rank != own);
                let first = senders.next();
                first.filter(|first| [*first].into_iter().chain(senders).all(|rank| self.ranks[rank].returned))
            }
        };
        if let Some(rank) = left {
            let during = self.id(wait);
            self.fail(Failure::Collective(CommError::RankReturned { rank, during }));
        }
    }

    /// Returns the global ranks that `wait` is waiting for, in group order.
    pub fn missing(&self, wait: Wait) -> Vec<usize> {
        match wait {
            Wait::All(ticket) => self.without_deposit(ticket).collect(),
            Wait::Message(claim) => self.sender(claim).map_or_else(|| self.senders(claim).to_vec(), |rank| vec![rank]),
        }
    }

    /// Returns the ranks that must all act before `wait` can end.
    pub(super) fn needs(&self, wait: Wait) -> impl Iterator<Item = usize> {
        let (ticket, senders) = match wait {
            Wait::All(ticket) => (Some(ticket), &[][..]),
            Wait::Message(claim) => (None, self.senders(claim)),
        };
        let own = self.rank(wait);
        let mut others = senders.iter().copied().filter(|rank| senders.len() == 1 || *rank != own);
        let only = others.next().filter(|_| others.next().is_none());
        ticket.into_iter().flat_map(|ticket| self.absent(ticket)).chain(only)
    }

    /// Returns the call that `wait` is for, as its rank made it.
    pub fn id(&self, wait: Wait) -> CollectiveId {
        match wait {
            Wait::All(ticket) => self.groups[ticket.group.0].id(ticket.seq, ticket.member),
            Wait::Message(claim) => self.claim_id(claim),
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

    /// Returns the failure of a `rank` that makes a call while it waits.
    pub(super) fn concurrent(&self, rank: usize, called: CollectiveId) -> Failure {
        let during = self.id(self.ranks[rank].waits[0]);
        Failure::Collective(CommError::ConcurrentCalls { rank, called, during })
    }

    /// Searches for a cycle of waits through `start`. Returns each rank of it, the call that it waits in, and the
    /// next rank.
    fn cycle(&self, start: usize) -> Option<Vec<(usize, CollectiveId, usize)>> {
        let (mut path, mut seen) = (Vec::new(), HashSet::new());
        self.follow(start, start, &mut seen, &mut path).then(|| {
            path.reverse();
            path
        })
    }

    /// Returns true if waits lead from `rank` to `start`, and then adds them to `path` in reverse order.
    ///
    /// Most ranks that a rank waits for do not wait themselves, and are skipped quickly. All waits for one
    /// collective need the same ranks, so only one of them is followed.
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
            for target in self.needs(*wait).filter(|target| !self.ranks[*target].waits.is_empty()) {
                if target == start || self.follow(target, start, seen, path) {
                    path.push((rank, self.id(*wait), target));
                    return true;
                }
            }
        }
        false
    }
}
