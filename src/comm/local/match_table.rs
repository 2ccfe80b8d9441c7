//! [`MatchTable`]: who has joined which collective. Pure state: no locks, no tensors, no clock.
//!
//! Invariants, cited by number in the tests:
//! 1. The n-th call of one rank on a group meets the n-th call of every other rank.
//! 2. A collective is complete when every rank of its group has joined with the same fingerprint. What all ranks hold alike
//!    is compared when the last of them has.
//! 3. A collective's deposits are freed once every rank has taken its result or given it up, whatever
//!    becomes of others; those of collectives that a failure leaves incomplete are freed with it.
//! 4. The first failure is the only one: it is final, and joint for all groups.
//! 5. A rank that waits is told at once when a rank it needs has returned or waits for it. The latter
//!    proves a deadlock only where a rank that waits does not call: one that does is at fault, and in a
//!    multithreaded world, where it may, nothing is claimed. Nor of a receive that takes anybody's message,
//!    unless all others have returned.
//! 6. A rank of another process joins in two steps: it is announced, which is all that counts in 1, 2 and 5, and its
//!    deposit comes later, without which nothing is complete. It takes no result here. A rank that is here may join so,
//!    too, and takes its result.
//!    A deposit may be offered: it comes if a rank here asks for it, and is declined once all have given up.
//! 7. Where another process decides which failure is the first, one found here ends nothing until that is known;
//!    what ranks disagree about is never complete.
//!
//! Messages between two ranks are the [`P2pQueue`]'s; what ranks wait for, and in vain, is in `waits.rs`, what
//! other processes have a part in in `board_remote.rs`.

#[path = "match_entry.rs"]
mod match_entry;
#[path = "p2p_queue.rs"] // also where the model of the rendezvous includes this file
mod p2p_queue;
#[path = "match_table_remote.rs"]
mod remote;
#[path = "stalled_wait.rs"]
mod stalled_wait;

use std::borrow::Cow;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use crate::comm::backend::Failure;
use crate::comm::{CollectiveId, CommError, Divergence, Op};

use match_entry::{MatchEntry, Posts};
use p2p_queue::P2pQueue;
pub(crate) use p2p_queue::{P2pMessage, RecvHandle, RemoteMessageHandle};
pub(crate) use stalled_wait::{StalledWait, Wait};

/// What two ranks must agree on.
pub(crate) trait Signature {
    /// The operation.
    fn op(&self) -> Op;
    /// The caller's label.
    fn label(&self) -> Arc<str>;
    /// What differs, this one's value first; `None` if nothing does.
    fn difference(&self, other: &Self) -> Option<String>;
    /// Why a receive with this one refuses a message with `sent`; `None` if it takes it.
    fn refusal(&self, sent: &Self) -> Option<String> {
        self.difference(sent)
    }
    /// Who holds other values than the others, of what all must hold alike: of all ranks of a collective, in group order,
    /// who agree.
    fn divergence<'a>(prints: impl Iterator<Item = &'a Self> + Clone) -> Option<Divergence>
    where
        Self: 'a,
    {
        let _ = prints;
        None
    }
    /// Whether every two ranks have an agreement of their own: one that agrees with a second need not agree
    /// with a third that does.
    fn is_of_pairs(&self) -> bool {
        false
    }
}

/// A group's place on the board.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct GroupKey(usize);

impl GroupKey {
    pub fn index(self) -> usize {
        self.0
    }
}

/// One rank's part in one collective.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct OpHandle {
    pub group: GroupKey,
    /// The rank's position in the group.
    pub member: usize,
    pub seq: u64,
}

/// Every member's deposit, in group order.
pub(crate) type Parts<P> = Arc<[P]>;

/// What a waiting rank finds.
pub(crate) enum Poll<T> {
    Ready(T),
    Pending,
    Failed,
}

pub(crate) struct MatchTable<F, P> {
    ranks: Vec<RankState>,
    groups: Vec<GroupState<F, P>>,
    /// By name and ranks.
    keys: HashMap<Cow<'static, str>, HashMap<Arc<[usize]>, GroupKey>>,
    failure: Option<Failure>,
    /// Another process decides which failure is the first.
    defers: bool,
    /// The first failure found here, while it is not decided whether it is the first.
    found: Option<Failure>,
    /// Other processes do not know yet of the failure that was found here.
    untold: bool,
    /// What every rank was doing when the first failure came.
    scene: Vec<String>,
    /// A rank may call and wait on several threads at once.
    multithreaded: bool,
    /// How many waits have begun in collectives that are not complete.
    waits: usize,
    /// Deposits that nobody needs any more, until [`take_freed`](Self::take_freed).
    freed: Vec<Parts<P>>,
    /// Offers that nobody needs any more, until [`take_declined`](Self::take_declined).
    declined: Vec<OpHandle>,
}

#[derive(Default)]
struct RankState {
    last: Option<CollectiveId>,
    waits: Vec<Wait>,
    /// Waits so far.
    begun: u64,
    returned: bool,
}

struct GroupState<F, P> {
    ranks: Arc<[usize]>,
    next: Vec<u64>,
    /// How many of its ranks have returned.
    left: usize,
    /// Sequence number of the oldest slot.
    base: u64,
    slots: VecDeque<MatchEntry<F, P>>,
    /// Empty places for the next collective: of many ranks they are much memory.
    spare: Posts<F, P>,
    /// Of each member; nothing before the first message.
    mail: Vec<P2pQueue<F, P>>,
}

impl<F: Signature, P> MatchTable<F, P> {
    pub fn new(ranks: usize, multithreaded: bool) -> Self {
        Self {
            ranks: (0..ranks).map(|_| RankState::default()).collect(),
            groups: Vec::new(),
            keys: HashMap::new(),
            failure: None,
            defers: false,
            found: None,
            untold: false,
            scene: Vec::new(),
            multithreaded,
            waits: 0,
            freed: Vec::new(),
            declined: Vec::new(),
        }
    }

    /// The group of these ranks in this order and of this name; the same for all its ranks.
    pub fn group(&mut self, ranks: &[usize], name: impl Into<Cow<'static, str>>) -> GroupKey {
        let named = self.keys.entry(name.into()).or_default();
        if let Some(key) = named.get(ranks) {
            return *key;
        }
        let (key, ranks) = (GroupKey(self.groups.len()), Arc::from(ranks));
        named.insert(Arc::clone(&ranks), key);
        let next = vec![0; ranks.len()];
        let left = ranks.iter().filter(|rank| self.ranks[**rank].returned).count();
        self.groups.push(GroupState {
            ranks,
            next,
            left,
            base: 0,
            slots: VecDeque::new(),
            spare: Vec::new(),
            mail: Vec::new(),
        });
        key
    }

    /// Global ranks of a group.
    pub fn ranks(&self, group: GroupKey) -> &Arc<[usize]> {
        &self.groups[group.0].ranks
    }

    /// Keys of the groups with this rank.
    pub fn groups_of(&self, rank: usize) -> impl Iterator<Item = GroupKey> {
        self.groups.iter().enumerate().filter(move |(_, g)| g.ranks.contains(&rank)).map(|(i, _)| GroupKey(i))
    }

    pub fn failure(&self) -> Option<&Failure> {
        self.failure.as_ref()
    }

    /// What `rank` was doing at the first failure, or is doing now if there was none.
    pub fn doing(&self, rank: usize) -> String {
        self.scene.get(rank).cloned().unwrap_or_else(|| self.describe(rank))
    }

    /// Adds `member`'s deposit to its next collective of `group`. True: now complete.
    pub fn post(&mut self, group: GroupKey, member: usize, print: F, part: P) -> Result<(OpHandle, bool), CommError> {
        self.join_with(group, member, print, Some(part))
    }

    fn join_with(
        &mut self,
        group: GroupKey,
        member: usize,
        print: F,
        part: Option<P>,
    ) -> Result<(OpHandle, bool), CommError> {
        let g = &self.groups[group.0];
        let seq = g.next[member];
        let id = CollectiveId { op: print.op(), seq, label: print.label(), ranks: g.ranks.clone() };
        if let Err(error) = self.enter(group, member, id) {
            self.freed.extend(part.map(|part| Arc::from([part])));
            return Err(error);
        }
        let g = &mut self.groups[group.0];
        g.next[member] += 1;
        let at = (seq - g.base) as usize;
        if at == g.slots.len() {
            g.slots.push_back(MatchEntry::new(g.ranks.len(), std::mem::take(&mut g.spare)));
        }
        let slot = &mut g.slots[at];
        let suspect = slot.suspect(member, &print);
        slot.joined[member] = Some((print, None));
        slot.expected -= 1;
        slot.first = slot.first.min(member);
        if let Some(part) = part {
            slot.put(member, part);
        }
        let error = match suspect {
            Some((culprit, other)) => Some(g.mismatch(seq, culprit, other)),
            None => g.diverged(seq),
        };
        if let Some(error) = error {
            // Never complete, also while it is not decided that this ends it.
            g.slots[at].absent += 1;
            self.fail(Failure::Collective(error.clone()));
            return Err(error);
        }
        let ticket = OpHandle { group, member, seq };
        Ok((ticket, self.complete(ticket)))
    }

    /// Hands the deposits out once all are there, for which nobody waits any more then. True: they are.
    fn complete(&mut self, ticket: OpHandle) -> bool {
        let slot = self.slot_mut(ticket);
        let (waits, complete) = (slot.waits, slot.complete());
        if complete {
            self.waits -= waits;
        }
        complete
    }

    /// Notes that `member` of `group` calls, unless it may not.
    fn enter(&mut self, group: GroupKey, member: usize, id: CollectiveId) -> Result<(), CommError> {
        let rank = self.groups[group.0].ranks[member];
        if let Some(failure) = &self.failure {
            return Err(failure.error(Some(id)));
        }
        if !self.multithreaded && !self.ranks[rank].waits.is_empty() {
            let concurrent = self.concurrent(rank, id);
            return Err(self.fail(concurrent).error(None));
        }
        self.ranks[rank].last = Some(id);
        Ok(())
    }

    /// Whether the result of `ticket` is there.
    pub fn poll(&mut self, ticket: OpHandle) -> Poll<Parts<P>> {
        match &self.slot(ticket).parts {
            Some(parts) => Poll::Ready(parts.clone()),
            None if self.failure.is_some() => Poll::Failed,
            None => Poll::Pending,
        }
    }

    /// The global rank that was the last to join the collective of `ticket`, which is complete.
    pub fn last(&self, ticket: OpHandle) -> usize {
        self.groups[ticket.group.0].ranks[self.slot(ticket).last]
    }

    /// The result of `ticket` has been taken, or will never be.
    pub fn release(&mut self, ticket: OpHandle) {
        let g = &mut self.groups[ticket.group.0];
        let slot = &mut g.slots[(ticket.seq - g.base) as usize];
        slot.unreleased -= 1;
        if slot.unreleased == 0 {
            self.freed.push(slot.parts.take().unwrap_or_else(|| slot.deposits()));
            g.spare = std::mem::take(&mut slot.joined);
            g.spare.fill_with(|| None);
            self.declined.extend(slot.offered.drain(..).map(|member| OpHandle { member, ..ticket }));
        }
        while g.slots.front().is_some_and(|slot| slot.unreleased == 0) {
            g.slots.pop_front();
            g.base += 1;
        }
    }

    /// What has been freed, to be dropped outside the lock.
    #[must_use]
    pub fn take_freed(&mut self) -> Vec<Parts<P>> {
        std::mem::take(&mut self.freed)
    }

    /// Records the first failure; later ones are ignored. Returns the one that counts, as far as is known here.
    pub fn fail(&mut self, failure: Failure) -> Failure {
        if let Some(first) = self.failure.as_ref().or(self.found.as_ref()) {
            return first.clone();
        }
        self.untold = true;
        if self.defers {
            self.found = Some(failure.clone());
        } else {
            self.decide(failure.clone());
        }
        failure
    }

    /// Ends everything with `failure`, which is the first.
    pub fn decide(&mut self, failure: Failure) {
        if self.failure.is_some() {
            return;
        }
        self.scene = (0..self.ranks.len()).map(|rank| self.describe(rank)).collect();
        self.failure = Some(failure);
        let slots = self.groups.iter_mut().flat_map(|group| &mut group.slots);
        for slot in slots.filter(|slot| slot.parts.is_none()) {
            self.freed.push(slot.deposits());
        }
        self.free_letters();
    }

    /// The rank's program is over. False: it was already.
    pub fn returned(&mut self, rank: usize) -> bool {
        if std::mem::replace(&mut self.ranks[rank].returned, true) {
            return false;
        }
        self.groups.iter_mut().filter(|group| group.ranks.contains(&rank)).for_each(|group| group.left += 1);
        true
    }

    /// Whether the rank's program is over.
    pub fn has_returned(&self, rank: usize) -> bool {
        self.ranks[rank].returned
    }

    /// Whether those of all ranks are.
    pub fn all_returned(&self) -> bool {
        self.ranks.iter().all(|rank| rank.returned)
    }

    /// What `member` of `group` has called last.
    pub fn last_call(&self, group: GroupKey, member: usize) -> Option<CollectiveId> {
        self.ranks[self.groups[group.0].ranks[member]].last.clone()
    }

    /// Who has not joined.
    fn absent(&self, ticket: OpHandle) -> impl Iterator<Item = usize> {
        self.members(ticket, Option::is_none)
    }

    /// Who has not joined, or has a deposit on its way.
    fn without_deposit(&self, ticket: OpHandle) -> impl Iterator<Item = usize> {
        self.members(ticket, |joined| joined.as_ref().is_none_or(|(_, part)| part.is_none()))
    }

    /// The global ranks of members of an incomplete collective.
    fn members(
        &self,
        ticket: OpHandle,
        which: impl Fn(&Option<(F, Option<P>)>) -> bool,
    ) -> impl Iterator<Item = usize> {
        let (g, slot) = (&self.groups[ticket.group.0], self.slot(ticket));
        let joined = if slot.absent == 0 { &[] } else { &slot.joined[..] };
        g.ranks.iter().zip(joined).filter(move |(_, joined)| which(joined)).map(|(rank, _)| *rank)
    }

    fn slot(&self, ticket: OpHandle) -> &MatchEntry<F, P> {
        let g = &self.groups[ticket.group.0];
        &g.slots[(ticket.seq - g.base) as usize]
    }

    fn slot_mut(&mut self, ticket: OpHandle) -> &mut MatchEntry<F, P> {
        let g = &mut self.groups[ticket.group.0];
        &mut g.slots[(ticket.seq - g.base) as usize]
    }

    fn describe(&self, rank: usize) -> String {
        let state = &self.ranks[rank];
        if state.returned {
            return "finished".into();
        }
        if let Some(wait) = state.waits.last() {
            return match &self.missing(*wait)[..] {
                [] => format!("leaving {}", self.id(*wait)),
                [one] => format!("waiting in {} for rank {one}", self.id(*wait)),
                several => format!("waiting in {} for ranks {several:?}", self.id(*wait)),
            };
        }
        match &state.last {
            Some(id) => format!("computing since {id}"),
            None => "computing, before any collective".into(),
        }
    }
}

impl<F: Signature, P> GroupState<F, P> {
    fn id(&self, seq: u64, member: usize) -> CollectiveId {
        let (print, _) = self.slots[(seq - self.base) as usize].joined[member].as_ref().expect("the member has joined");
        CollectiveId { op: print.op(), seq, label: print.label(), ranks: self.ranks.clone() }
    }

    fn mismatch(&self, seq: u64, culprit: usize, other: usize) -> CommError {
        let slot = &self.slots[(seq - self.base) as usize];
        let print = |member: usize| &slot.joined[member].as_ref().expect("both have joined").0;
        CommError::Mismatch {
            rank: self.ranks[culprit],
            other: self.ranks[other],
            during: self.id(seq, other),
            differs: print(culprit).difference(print(other)).unwrap_or_default(),
        }
    }

    /// Why what all hold alike is not alike, once all have joined.
    fn diverged(&self, seq: u64) -> Option<CommError> {
        let slot = &self.slots[(seq - self.base) as usize];
        if slot.expected > 0 {
            return None;
        }
        let divergence = F::divergence(slot.joined.iter().flatten().map(|(print, _)| print))?;
        Some(divergence.error(&self.ranks, self.id(seq, slot.first)))
    }
}

#[cfg(test)]
#[path = "match_table_tests.rs"] // also where the model of the rendezvous includes this file
mod tests;

#[cfg(test)]
#[path = "match_table_remote_tests.rs"] // also where the model of the rendezvous includes this file
mod remote_tests;

#[cfg(test)]
#[path = "match_table_waits_tests.rs"] // also where the model of the rendezvous includes this file
mod waits_tests;
