//! [`MatchTable`]: matches the calls of all ranks of a group. Pure state: no locks, no tensors, no clock.
//!
//! Invariants, cited by number in the tests:
//! 1. The n-th call of one rank on a group matches the n-th call of every other rank.
//! 2. A collective is complete when every rank of its group has posted with the same signature and contributed.
//!    Values that all ranks must hold identically are compared when the last rank has posted.
//! 3. The contributions of a collective are freed once every rank has taken its result or released its handle. This
//!    does not depend on other collectives. If a failure leaves collectives incomplete, their contributions are
//!    freed with it.
//! 4. The first failure is the only one: it is final, and all groups fail with it.
//! 5. A rank that waits gets an error at once when a rank it needs has returned or waits for it. A cycle of waits
//!    proves a deadlock only if a waiting rank cannot post. In a single-threaded world, a rank that posts while it
//!    waits is at fault. In a multithreaded world it may do so, so no deadlock is reported. A receive from any rank
//!    is not reported either, unless all other ranks have returned.
//! 6. A rank of another process posts in two steps: the call is announced, which is all that counts in 1, 2 and 5,
//!    and its contribution arrives later. Without the contribution nothing is complete. Such a rank takes no result
//!    here. A local rank may post in two steps, too, and takes its result. A contribution may be offered on demand:
//!    it is sent if a local rank requests it, and declined once all local ranks have released the collective.
//! 7. If another process decides which failure is the first, a failure found here ends nothing until that is known.
//!    A collective whose ranks disagree is never complete.
//!
//! Messages between two ranks are in [`P2pQueue`]. Waits and deadlock detection are in `stalled_wait.rs`. Calls of
//! other processes are in `match_table_remote.rs`.

#[path = "match_entry.rs"]
mod match_entry;
#[path = "p2p_queue.rs"] // needed where the rendezvous model includes this file
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

/// Signature of a call: everything that the ranks must agree on.
pub(crate) trait Signature {
    /// Returns the operation.
    fn op(&self) -> Op;
    /// Returns the label that the caller passed.
    fn label(&self) -> Arc<str>;
    /// Describes the difference to `other`, with the value of `self` first; `None` if they agree.
    fn difference(&self, other: &Self) -> Option<String>;
    /// Returns the reason why a receive with this signature refuses a message with the signature `sent`; `None` if
    /// it accepts it.
    fn refusal(&self, sent: &Self) -> Option<String> {
        self.difference(sent)
    }
    /// Returns the divergence if some ranks hold other values than the rest, of those that must be identical.
    /// `prints` are the signatures of all ranks of a collective, in group order; they agree otherwise.
    fn divergence<'a>(prints: impl Iterator<Item = &'a Self> + Clone) -> Option<Divergence>
    where
        Self: 'a,
    {
        let _ = prints;
        None
    }
    /// Returns true if every two ranks agree on something separately, so that agreement is not transitive and all
    /// pairs must be compared.
    fn is_of_pairs(&self) -> bool {
        false
    }
}

/// Key of a group in the [`MatchTable`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct GroupKey(usize);

impl GroupKey {
    pub fn index(self) -> usize {
        self.0
    }
}

/// Identifies the call of one rank in one collective.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct OpHandle {
    pub group: GroupKey,
    /// Group rank of the caller.
    pub member: usize,
    pub seq: u64,
}

/// Contributions of all members, in group order.
pub(crate) type Parts<P> = Arc<[P]>;

/// State of an operation, as a waiting rank sees it.
pub(crate) enum Poll<T> {
    Ready(T),
    Pending,
    Failed,
}

pub(crate) struct MatchTable<F, P> {
    ranks: Vec<RankState>,
    groups: Vec<GroupState<F, P>>,
    /// Keys of the groups, by name and ranks.
    keys: HashMap<Cow<'static, str>, HashMap<Arc<[usize]>, GroupKey>>,
    failure: Option<Failure>,
    /// True if another process decides which failure is the first.
    defers: bool,
    /// First failure found in this process, while another process decides which failure is the first.
    found: Option<Failure>,
    /// True if the other processes do not know the failure yet.
    untold: bool,
    /// Activity of every rank at the time of the first failure.
    scene: Vec<String>,
    /// True if a rank may post and wait on several threads at once.
    multithreaded: bool,
    /// Number of waits that have begun in collectives that are not complete.
    waits: usize,
    /// Contributions that no rank needs any more, until [`take_freed`](Self::take_freed).
    freed: Vec<Parts<P>>,
    /// Offers that no rank needs any more, until [`take_declined`](Self::take_declined).
    declined: Vec<OpHandle>,
}

#[derive(Default)]
struct RankState {
    /// The collective that the rank posted last, or whose result it took since.
    last: Option<CollectiveId>,
    waits: Vec<Wait>,
    /// Number of waits so far.
    begun: u64,
    returned: bool,
}

struct GroupState<F, P> {
    ranks: Arc<[usize]>,
    next: Vec<u64>,
    /// Number of ranks of the group that have returned.
    left: usize,
    /// Sequence number of the oldest entry.
    base: u64,
    slots: VecDeque<MatchEntry<F, P>>,
    /// Empty vector for the next collective, which is reused because it is large if there are many ranks.
    spare: Posts<F, P>,
    /// Queue of each member; empty before the first message of the group.
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

    /// Returns the key of the group with these ranks, in this order, and this name. All its ranks receive the same
    /// key.
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

    /// Returns the global ranks of a group.
    pub fn ranks(&self, group: GroupKey) -> &Arc<[usize]> {
        &self.groups[group.0].ranks
    }

    /// Returns the keys of the groups that have this rank.
    pub fn groups_of(&self, rank: usize) -> impl Iterator<Item = GroupKey> {
        self.groups.iter().enumerate().filter(move |(_, g)| g.ranks.contains(&rank)).map(|(i, _)| GroupKey(i))
    }

    pub fn failure(&self) -> Option<&Failure> {
        self.failure.as_ref()
    }

    /// Describes the activity of `rank` at the first failure, or now if there was none.
    pub fn doing(&self, rank: usize) -> String {
        self.scene.get(rank).cloned().unwrap_or_else(|| self.describe(rank))
    }

    /// Posts the next collective of `member` on `group`, with its contribution `part`. Returns true if the
    /// collective is now complete.
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
            // The collective can never complete, also while another process decides whether this failure is the
            // first.
            g.slots[at].absent += 1;
            self.fail(Failure::Collective(error.clone()));
            return Err(error);
        }
        let ticket = OpHandle { group, member, seq };
        Ok((ticket, self.complete(ticket)))
    }

    /// Completes the collective if all contributions have arrived. Its waits are no longer counted then. Returns
    /// true if so.
    fn complete(&mut self, ticket: OpHandle) -> bool {
        let slot = self.slot_mut(ticket);
        let (waits, complete) = (slot.waits, slot.complete());
        if complete {
            self.waits -= waits;
        }
        complete
    }

    /// Records that `member` of `group` posts a call. Fails if the world has failed, or if the rank waits on
    /// another thread in a single-threaded world.
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

    /// Returns the contributions of the collective if it is complete, and its state otherwise. The rank then computes
    /// with them, whatever it posted in the meantime, such as a prefetch.
    pub fn poll(&mut self, ticket: OpHandle) -> Poll<Parts<P>> {
        let slot = self.slot(ticket);
        match slot.parts.clone() {
            Some(parts) => {
                if !slot.is_internal {
                    let g = &self.groups[ticket.group.0];
                    let (rank, id) = (g.ranks[ticket.member], g.id(ticket.seq, ticket.member));
                    self.ranks[rank].last = Some(id);
                }
                Poll::Ready(parts)
            }
            None if self.failure.is_some() => Poll::Failed,
            None => Poll::Pending,
        }
    }

    /// Returns the global rank that contributed last to a complete collective.
    pub fn last(&self, ticket: OpHandle) -> usize {
        self.groups[ticket.group.0].ranks[self.slot(ticket).last]
    }

    /// Releases a handle: its rank has taken the result or does not need it. After the last release, the entry is
    /// freed.
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

    /// Takes the freed contributions, which the caller drops outside the lock.
    #[must_use]
    pub fn take_freed(&mut self) -> Vec<Parts<P>> {
        std::mem::take(&mut self.freed)
    }

    /// Records the first failure and ignores later ones. Returns the first failure as far as this process knows it.
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

    /// Fails the world with `failure`, which is the first.
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

    /// Records that the program of a rank has ended. Returns false if that was recorded before.
    pub fn returned(&mut self, rank: usize) -> bool {
        if std::mem::replace(&mut self.ranks[rank].returned, true) {
            return false;
        }
        self.groups.iter_mut().filter(|group| group.ranks.contains(&rank)).for_each(|group| group.left += 1);
        true
    }

    /// Returns true if the program of the rank has ended.
    pub fn has_returned(&self, rank: usize) -> bool {
        self.ranks[rank].returned
    }

    /// Returns the ranks whose programs have not ended.
    pub fn running(&self) -> Vec<usize> {
        (0..self.ranks.len()).filter(|rank| !self.ranks[*rank].returned).collect()
    }

    /// Returns the last call that the rank of `member` has posted, or whose result it has taken since.
    pub fn last_call(&self, group: GroupKey, member: usize) -> Option<CollectiveId> {
        self.ranks[self.groups[group.0].ranks[member]].last.clone()
    }

    /// Returns the global ranks that have not posted the collective.
    fn absent(&self, ticket: OpHandle) -> impl Iterator<Item = usize> {
        self.members(ticket, Option::is_none)
    }

    /// Returns the global ranks whose contributions have not arrived.
    fn without_deposit(&self, ticket: OpHandle) -> impl Iterator<Item = usize> {
        self.members(ticket, |joined| joined.as_ref().is_none_or(|(_, part)| part.is_none()))
    }

    /// Returns the global ranks of an incomplete collective for whose calls `which` returns true.
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
        let (print, _) = self.slots[(seq - self.base) as usize].joined[member].as_ref().expect("the member has posted");
        CollectiveId { op: print.op(), seq, label: print.label(), ranks: self.ranks.clone() }
    }

    fn mismatch(&self, seq: u64, culprit: usize, other: usize) -> CommError {
        let slot = &self.slots[(seq - self.base) as usize];
        let print = |member: usize| &slot.joined[member].as_ref().expect("both members have posted").0;
        CommError::Mismatch {
            rank: self.ranks[culprit],
            other: self.ranks[other],
            during: self.id(seq, other),
            differs: print(culprit).difference(print(other)).unwrap_or_default(),
        }
    }

    /// Returns the error if the ranks hold different values where they must be identical. Compares once all ranks
    /// have posted.
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
#[path = "match_table_tests.rs"] // needed where the rendezvous model includes this file
mod tests;

#[cfg(test)]
#[path = "match_table_remote_tests.rs"] // needed where the rendezvous model includes this file
mod remote_tests;

#[cfg(test)]
#[path = "match_table_waits_tests.rs"] // needed where the rendezvous model includes this file
mod waits_tests;
