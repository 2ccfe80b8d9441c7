//! [`MatchTable`]: matches the calls of all ranks of a group. Pure state: no locks, no tensors, no clock.
//!
//! Invariants, cited by number in the tests:
//! 1. The n-th call of one rank on a group matches the n-th call of every other rank.
//! 2. A collective is complete when every rank of its group has posted with the same signature and
//!    contributed. Values that all ranks must hold identically are compared when the last rank has
//!    posted.
//! 3. The contributions of a collective are freed once every rank has taken its result or released
//!    its handle. This does not depend on other collectives. If a failure leaves collectives
//!    incomplete, their contributions are freed with it.
//! 4. The first failure is the only one: it is final, and all groups fail with it.
//! 5. A rank that waits gets an error at once when a rank it needs has returned or waits for it. A
//!    cycle of waits proves a deadlock only if a waiting rank cannot post. In a single-threaded
//!    world, a rank that posts while it waits is at fault. In a multithreaded world it may do so,
//!    so no deadlock is reported. A receive from any rank is not reported either, unless all other
//!    ranks have returned.
//! 6. A call may be posted before its contribution arrives ([`CallData`]). The post is all that
//!    counts in 1, 2 and 5; without the contribution nothing is complete. A rank of another process
//!    takes no result here. A contribution on demand is sent if a local rank requests it, and
//!    declined once all local ranks have released the collective.
//! 7. If another process decides which failure is the first, a failure found here ends nothing
//!    until that is known. A collective whose ranks disagree is never complete.
//!
//! Messages between two ranks are in [`P2pQueue`]. Waits and deadlock detection are in
//! `stalled_wait.rs`.

#[path = "arbiter.rs"] // needed where the rendezvous model includes this file
mod arbiter;
#[path = "match_entry.rs"]
mod match_entry;
#[path = "p2p_queue.rs"]
mod p2p_queue;
#[path = "stalled_wait.rs"]
mod stalled_wait;

use std::borrow::Cow;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::comm::backend::Failure;
use crate::comm::{CollectiveId, CommError, Divergence, Op};

use arbiter::FailureArbiter;
use match_entry::MatchEntry;
use p2p_queue::P2pQueue;
pub(crate) use p2p_queue::{MessageHandle, P2pMessage, RecvHandle};
pub(crate) use stalled_wait::{StalledWait, Wait};

/// Signature of a call: everything that the ranks must agree on.
pub(crate) trait Signature {
    /// Returns the operation.
    fn op(&self) -> Op;
    /// Returns the label that the caller passed.
    fn label(&self) -> Arc<str>;
    /// Describes the difference to `other`, with the value of `self` first; `None` if they agree.
    fn difference(&self, other: &Self) -> Option<String>;
    /// Returns the reason why a receive with this signature refuses a message with the signature
    /// `sent`; `None` if it accepts it.
    fn refusal(&self, sent: &Self) -> Option<String> {
        self.difference(sent)
    }
    /// Returns the divergence if some ranks hold other values than the rest, of those that must be
    /// identical. `all` are the signatures of all ranks of a collective, in group order; they agree
    /// otherwise.
    fn divergence<'a>(all: impl Iterator<Item = &'a Self> + Clone) -> Option<Divergence>
    where
        Self: 'a,
    {
        let _ = all;
        None
    }
    /// Returns true if every two ranks agree on something separately, so that agreement is not
    /// transitive and all pairs must be compared.
    fn is_of_pairs(&self) -> bool {
        false
    }
}

/// Describes when the data of a call reaches the ranks of other processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum DataMode {
    /// With the call.
    Eager,
    /// Once a rank there requests it.
    OnDemand,
    /// As soon as the caller has it.
    Deferred,
}

/// Contribution of a call that is being posted.
pub(crate) enum CallData<P> {
    /// Contribution of a local rank. If there is none, the rank [contributes
    /// later](MatchTable::provide_data), and the call is an internal part of the rank's last call,
    /// which stays the one that is reported.
    Local(Option<P>),
    /// The contribution of a rank of another process arrives later.
    Remote(DataMode),
}

impl<P> From<P> for CallData<P> {
    fn from(part: P) -> Self {
        Self::Local(Some(part))
    }
}

/// Key of a group in the [`MatchTable`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
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
    pub(super) arbiter: FailureArbiter,
    /// Activity of every rank at the time of the first failure.
    waits_at_failure: Vec<String>,
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
    /// Sequence number of the next call of each member.
    next: Vec<u64>,
    /// Number of ranks of the group that have returned.
    returned: usize,
    /// Sequence number of the oldest entry.
    base: u64,
    entries: VecDeque<MatchEntry<F, P>>,
    /// Queue of each member; empty before the first message of the group.
    queues: Vec<P2pQueue<F, P>>,
}

impl<F: Signature, P> MatchTable<F, P> {
    pub fn new(ranks: usize, multithreaded: bool) -> Self {
        let groups = Vec::new();
        let keys = HashMap::new();
        let arbiter = FailureArbiter::default();
        let waits_at_failure = Vec::new();
        let freed = Vec::new();
        let declined = Vec::new();
        let ranks = (0..ranks).map(|_| RankState::default()).collect();
        Self {
            ranks,
            groups,
            keys,
            arbiter,
            waits_at_failure,
            multithreaded,
            waits: 0,
            freed,
            declined,
        }
    }

    /// Returns the key of the group with these ranks, in this order, and this name. All its ranks
    /// receive the same key.
    pub fn group(&mut self, ranks: &[usize], name: impl Into<Cow<'static, str>>) -> GroupKey {
        let named = self.keys.entry(name.into()).or_default();
        if let Some(key) = named.get(ranks) {
            return *key;
        }
        let key = GroupKey(self.groups.len());
        let ranks = Arc::from(ranks);
        named.insert(Arc::clone(&ranks), key);
        let returned = ranks
            .iter()
            .filter(|rank| self.ranks[**rank].returned)
            .count();
        let next = vec![0; ranks.len()];
        let entries = VecDeque::new();
        let queues = Vec::new();
        self.groups.push(GroupState {
            ranks,
            next,
            returned,
            base: 0,
            entries,
            queues,
        });
        key
    }

    /// Returns the global ranks of a group.
    pub fn ranks(&self, group: GroupKey) -> &Arc<[usize]> {
        &self.groups[group.0].ranks
    }

    /// Returns the keys of the groups that have this rank.
    pub fn groups_of(&self, rank: usize) -> impl Iterator<Item = GroupKey> {
        self.groups
            .iter()
            .enumerate()
            .filter(move |(_, g)| g.ranks.contains(&rank))
            .map(|(i, _)| GroupKey(i))
    }

    /// Returns the first failure, if it is decided.
    pub fn failure(&self) -> Option<&Failure> {
        self.arbiter.decided()
    }

    /// Describes the activity of `rank` at the first failure, or now if there was none.
    pub fn activity(&self, rank: usize) -> String {
        self.waits_at_failure
            .get(rank)
            .cloned()
            .unwrap_or_else(|| self.describe(rank))
    }

    /// Posts the next collective of `member` on `group`. Returns true if that has a consequence:
    /// the collective is now complete, or a rank already needs the contribution that is offered on
    /// demand.
    pub fn post(
        &mut self,
        group: GroupKey,
        member: usize,
        signature: F,
        data: impl Into<CallData<P>>,
    ) -> Result<(OpHandle, bool), CommError> {
        let (part, mode) = match data.into() {
            CallData::Local(part) => (part, None),
            CallData::Remote(mode) => (None, Some(mode)),
        };
        let is_internal = part.is_none() && mode.is_none();
        let g = &self.groups[group.0];
        let rank = g.ranks[member];
        let seq = g.next[member];
        let id = g.id(seq, &signature);
        let reported = is_internal.then(|| self.ranks[rank].last.clone());
        if let Err(error) = self.enter(rank, id) {
            self.freed.extend(part.map(|part| Arc::from([part])));
            return Err(error);
        }
        let g = &mut self.groups[group.0];
        g.next[member] += 1;
        let at = (seq - g.base) as usize;
        if at == g.entries.len() {
            g.entries.push_back(MatchEntry::new(g.ranks.len()));
        }
        let entry = &mut g.entries[at];
        let differs_from = entry.post(member, signature);
        entry.is_internal |= is_internal;
        let error = match differs_from {
            Some(other) => Some(g.mismatch(seq, member, other)),
            None => g.diverged(seq),
        };
        if let Some(error) = error {
            // The collective can never complete, also while another process decides whether this
            // failure is the first.
            g.entries[at].absent += 1;
            self.freed.extend(part.map(|part| Arc::from([part])));
            self.fail(Failure::Collective(error.clone()));
            return Err(error);
        }
        let op = OpHandle { group, member, seq };
        if let Some(last) = reported {
            self.ranks[rank].last = last;
        }
        let Some(mode) = mode else {
            return Ok((op, part.is_some_and(|part| self.provide_data(op, part))));
        };
        let entry = self.entry_mut(op);
        let is_offered = mode == DataMode::OnDemand;
        let is_needed = is_offered && entry.is_wanted;
        entry
            .offered
            .extend((is_offered && !is_needed).then_some(member));
        self.release(op);
        Ok((op, is_needed))
    }

    /// Adds the contribution of a posted call. Returns true if the collective is now complete: all
    /// contributions have arrived. Its waits are no longer counted then.
    pub fn provide_data(&mut self, op: OpHandle, part: P) -> bool {
        let is_awaited = self.failure().is_none()
            && self
                .find_entry(op)
                .is_some_and(|entry| entry.awaits(op.member));
        if !is_awaited {
            // No rank takes it any more.
            self.freed.push(Arc::from([part]));
            return false;
        }
        let entry = self.entry_mut(op);
        entry.posts[op.member]
            .as_mut()
            .expect("the member has posted")
            .1 = Some(part);
        (entry.absent, entry.last) = (entry.absent - 1, op.member);
        if entry.absent > 0 {
            return false;
        }
        entry.parts = Some(entry.take_parts());
        let waits = entry.waits;
        self.waits -= waits;
        true
    }

    /// Records that `rank` makes the call `id`. Fails if the world has failed, or if the rank waits
    /// on another thread in a single-threaded world.
    fn enter(&mut self, rank: usize, id: CollectiveId) -> Result<(), CommError> {
        if let Some(failure) = self.failure() {
            return Err(failure.error(Some(id)));
        }
        if !self.multithreaded && !self.ranks[rank].waits.is_empty() {
            let concurrent = self.concurrent(rank, id);
            return Err(self.fail(concurrent).error(None));
        }
        self.ranks[rank].last = Some(id);
        Ok(())
    }

    /// Records that a local rank needs the result of `op`. Returns the offered contributions to
    /// request.
    pub fn request(&mut self, op: OpHandle) -> Vec<OpHandle> {
        let entry = self.entry_mut(op);
        entry.is_wanted = true;
        std::mem::take(&mut entry.offered)
            .into_iter()
            .map(|member| OpHandle { member, ..op })
            .collect()
    }

    /// Returns the contributions of the collective if it is complete, and its state otherwise. The
    /// rank then computes with them, whatever it posted in the meantime, such as a prefetch.
    pub fn poll(&mut self, op: OpHandle) -> Poll<Parts<P>> {
        let entry = self.entry(op);
        match entry.parts.clone() {
            Some(parts) => {
                if !entry.is_internal {
                    let rank = self.ranks(op.group)[op.member];
                    let id = self.id(Wait::All(op));
                    self.ranks[rank].last = Some(id);
                }
                Poll::Ready(parts)
            }
            None if self.failure().is_some() => Poll::Failed,
            None => Poll::Pending,
        }
    }

    /// Returns true if the result of `op` is available, or only offered contributions are missing.
    pub fn is_complete(&self, op: OpHandle) -> bool {
        let entry = self.entry(op);
        // A member that has not posted has not offered anything, nor has one whose contribution is
        // in flight.
        let are_offered =
            || !entry.is_wanted && self.without_data(op).count() == entry.offered.len();
        self.is_over(Wait::All(op)) || are_offered()
    }

    /// Returns the global rank that contributed last to a complete collective.
    pub fn last(&self, op: OpHandle) -> usize {
        self.ranks(op.group)[self.entry(op).last]
    }

    /// Returns the signature of a posted call whose contribution has not arrived.
    pub fn signature(&self, op: OpHandle) -> Option<&F> {
        let post = self.find_entry(op)?.posts.get(op.member)?.as_ref();
        post.filter(|(_, part)| part.is_none())
            .map(|(signature, _)| signature)
    }

    /// Releases a handle: its rank has taken the result or does not need it. After the last
    /// release, the entry is freed.
    pub fn release(&mut self, op: OpHandle) {
        let g = &mut self.groups[op.group.0];
        let entry = &mut g.entries[(op.seq - g.base) as usize];
        entry.unreleased -= 1;
        if entry.unreleased == 0 {
            self.freed.push(entry.take_parts());
            entry.posts = Vec::new();
            self.declined.extend(
                entry
                    .offered
                    .drain(..)
                    .map(|member| OpHandle { member, ..op }),
            );
        }
        while g.entries.front().is_some_and(|entry| entry.unreleased == 0) {
            g.entries.pop_front();
            g.base += 1;
        }
    }

    /// Takes the freed contributions, which the caller drops outside the lock.
    #[must_use]
    pub fn take_freed(&mut self) -> Vec<Parts<P>> {
        std::mem::take(&mut self.freed)
    }

    /// Takes the offers that no local rank will request, for which the other processes must be
    /// notified.
    #[must_use]
    pub fn take_declined(&mut self) -> Vec<OpHandle> {
        std::mem::take(&mut self.declined)
    }

    /// Records the first failure and ignores later ones. Returns the first failure as far as this
    /// process knows it.
    pub fn fail(&mut self, failure: Failure) -> Failure {
        if let Some(first) = self.arbiter.find(failure.clone()) {
            self.decide(first);
        }
        self.arbiter.known().cloned().unwrap_or(failure)
    }

    /// Fails the world with `failure`, which is the first.
    pub fn decide(&mut self, failure: Failure) {
        if self.failure().is_some() {
            return;
        }
        self.waits_at_failure = (0..self.ranks.len())
            .map(|rank| self.describe(rank))
            .collect();
        self.arbiter.decide(failure);
        let entries = self.groups.iter_mut().flat_map(|group| &mut group.entries);
        self.freed.extend(
            entries
                .filter(|entry| entry.parts.is_none())
                .map(MatchEntry::take_parts),
        );
        self.free_messages();
    }

    /// Makes this process decide which failure is the first, because the process that decided is
    /// lost.
    pub fn decide_here(&mut self) {
        if let Some(found) = self.arbiter.decide_here() {
            self.decide(found);
        }
    }

    /// Records that the program of a rank has ended. Returns false if that was recorded before.
    pub fn returned(&mut self, rank: usize) -> bool {
        if std::mem::replace(&mut self.ranks[rank].returned, true) {
            return false;
        }
        self.groups
            .iter_mut()
            .filter(|group| group.ranks.contains(&rank))
            .for_each(|group| group.returned += 1);
        true
    }

    /// Returns the ranks whose programs have not ended.
    pub fn running(&self) -> Vec<usize> {
        (0..self.ranks.len())
            .filter(|rank| !self.ranks[*rank].returned)
            .collect()
    }

    /// Returns true if `rank`, of another process, has posted a collective without its
    /// contribution, and a local rank has not taken the result; or if it has sent a message without
    /// its data, which a local rank may receive.
    pub fn owes(&self, rank: usize) -> bool {
        self.groups.iter().any(|g| {
            let Some(member) = g.ranks.iter().position(|other| *other == rank) else {
                return false;
            };
            let mut entries = g.entries.iter();
            let mut queues = g.ranks.iter().zip(&g.queues);
            entries.any(|entry| entry.unreleased > 0 && entry.awaits(member))
                || queues
                    .any(|(to, queue)| !self.ranks[*to].returned && queue.awaits_data_of(member))
        })
    }

    /// Returns the last call that the rank of `member` has posted, or whose result it has taken
    /// since.
    pub fn last_call(&self, group: GroupKey, member: usize) -> Option<CollectiveId> {
        self.ranks[self.ranks(group)[member]].last.clone()
    }

    /// Returns the global ranks that have not posted the collective.
    fn absent(&self, op: OpHandle) -> impl Iterator<Item = usize> {
        self.members(op, Option::is_none)
    }

    /// Returns the global ranks whose contributions have not arrived.
    fn without_data(&self, op: OpHandle) -> impl Iterator<Item = usize> {
        self.members(op, |post| {
            post.as_ref().is_none_or(|(_, part)| part.is_none())
        })
    }

    /// Returns the global ranks of an incomplete collective for whose calls `which` returns true.
    fn members(
        &self,
        op: OpHandle,
        which: impl Fn(&Option<(F, Option<P>)>) -> bool,
    ) -> impl Iterator<Item = usize> {
        let entry = self.entry(op);
        let posts = if entry.absent == 0 {
            &[]
        } else {
            &entry.posts[..]
        };
        self.ranks(op.group)
            .iter()
            .zip(posts)
            .filter(move |(_, post)| which(post))
            .map(|(rank, _)| *rank)
    }

    fn entry(&self, op: OpHandle) -> &MatchEntry<F, P> {
        self.find_entry(op)
            .expect("the handle has not been released")
    }

    fn entry_mut(&mut self, op: OpHandle) -> &mut MatchEntry<F, P> {
        let g = &mut self.groups[op.group.0];
        &mut g.entries[(op.seq - g.base) as usize]
    }

    /// Returns the entry of `op`. There is none before the first rank has posted, nor after the
    /// collective is over.
    fn find_entry(&self, op: OpHandle) -> Option<&MatchEntry<F, P>> {
        let g = &self.groups[op.group.0];
        g.entries.get(op.seq.checked_sub(g.base)? as usize)
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
    /// Identifies the call number `seq` with this signature.
    fn id(&self, seq: u64, signature: &F) -> CollectiveId {
        CollectiveId {
            op: signature.op(),
            seq,
            label: signature.label(),
            ranks: self.ranks.clone(),
        }
    }

    fn signature(&self, seq: u64, member: usize) -> &F {
        &self.entries[(seq - self.base) as usize].posts[member]
            .as_ref()
            .expect("the member has posted")
            .0
    }

    fn mismatch(&self, seq: u64, culprit: usize, other: usize) -> CommError {
        let [found, expected] = [culprit, other].map(|member| self.signature(seq, member));
        CommError::Mismatch {
            rank: self.ranks[culprit],
            other: self.ranks[other],
            during: self.id(seq, expected),
            differs: found.difference(expected).unwrap_or_default(),
        }
    }

    /// Returns the error if the ranks hold different values where they must be identical. Compares
    /// once all ranks have posted.
    fn diverged(&self, seq: u64) -> Option<CommError> {
        let entry = &self.entries[(seq - self.base) as usize];
        if entry.expected > 0 {
            return None;
        }
        let divergence =
            F::divergence(entry.posts.iter().flatten().map(|(signature, _)| signature))?;
        Some(divergence.error(&self.ranks, self.id(seq, self.signature(seq, entry.first))))
    }
}

#[cfg(test)]
#[path = "match_table_tests.rs"] // needed where the rendezvous model includes this file
mod tests;

#[cfg(test)]
#[path = "match_table_data_tests.rs"] // needed where the rendezvous model includes this file
mod data_tests;

#[cfg(test)]
#[path = "match_table_waits_tests.rs"] // needed where the rendezvous model includes this file
mod waits_tests;
