//! The [`MatchTable`] among several processes: it also holds calls of ranks of other processes, and another process
//! may decide which failure is the first. See its invariants 6 and 7.

use std::sync::Arc;

use super::match_entry::{MatchEntry, Wanted};
use super::{
    CollectiveId, CommError, Failure, GroupKey, MatchTable, OpHandle, RankState, Signature, StalledWait, Wait,
};

impl<F: Signature, P> MatchTable<F, P> {
    /// Like [`post`](Self::post), for a rank of another process whose contribution [arrives
    /// later](Self::provide_data).
    pub fn post_remote(&mut self, group: GroupKey, member: usize, print: F) -> Result<OpHandle, CommError> {
        let (ticket, _) = self.join_with(group, member, print, None)?;
        self.release(ticket);
        Ok(ticket)
    }

    /// Like [`post`](Self::post), for a local rank that [contributes later](Self::provide_data). The collective is
    /// an internal part of the rank's last call, so that call stays the one that is reported.
    pub fn join_late(&mut self, group: GroupKey, member: usize, print: F) -> Result<OpHandle, CommError> {
        let last = self.last_call(group, member);
        let (ticket, _) = self.join_with(group, member, print, None)?;
        let rank = self.groups[group.0].ranks[member];
        self.ranks[rank].last = last;
        self.slot_mut(ticket).is_internal = true;
        Ok(ticket)
    }

    /// Returns true if `rank`, of another process, has posted a collective without its contribution, and a local
    /// rank has not taken the result.
    pub fn owes(&self, rank: usize) -> bool {
        self.groups.iter().any(|g| {
            let member = g.ranks.iter().position(|other| *other == rank);
            let owed = |member| g.slots.iter().any(|slot| slot.unreleased > 0 && slot.awaits(member));
            member.is_some_and(owed)
        })
    }

    /// Returns the description of a stalled wait, with which other processes search for a deadlock. Returns `None`
    /// if a waiting rank may call on another thread, because no deadlock can be proved then.
    pub fn long_wait(&self, wait: Wait) -> Option<StalledWait> {
        if self.multithreaded || self.is_over(wait) {
            return None;
        }
        let rank = self.rank(wait);
        let needs = self.needs(wait).map(|other| (other, self.wait_of(other))).collect();
        Some(StalledWait { rank, number: self.ranks[rank].begun, during: self.id(wait), needs })
    }

    /// Returns the number of the wait that a rank is in.
    pub fn wait_of(&self, rank: usize) -> Option<u64> {
        let RankState { waits, begun, .. } = &self.ranks[rank];
        (!waits.is_empty()).then_some(*begun)
    }

    /// Returns the call that `rank` waits in, if it is still in wait `number` and needs `other`.
    pub fn still_needs(&self, rank: usize, number: u64, other: usize) -> Option<CollectiveId> {
        let wait = *self.ranks[rank].waits.last().filter(|_| self.ranks[rank].begun == number)?;
        (!self.is_over(wait) && self.needs(wait).any(|needed| needed == other)).then(|| self.id(wait))
    }

    /// Like [`post_remote`](Self::post_remote), for a contribution that is sent only on demand. Returns true if a
    /// rank already needs it.
    pub fn post_remote_on_demand(
        &mut self,
        group: GroupKey,
        member: usize,
        print: F,
    ) -> Result<(OpHandle, bool), CommError> {
        let (ticket, _) = self.join_with(group, member, print, None)?;
        let slot = self.slot_mut(ticket);
        let asked = slot.wanted != Wanted::Later;
        if !asked {
            slot.offered.push(member);
        }
        self.release(ticket);
        Ok((ticket, asked))
    }

    /// Marks the result of `ticket` as needed now. Returns the offers to request.
    pub fn want(&mut self, ticket: OpHandle) -> Vec<OpHandle> {
        self.ask(ticket, Wanted::Now)
    }

    /// Like [`want`](Self::want), but also marks the latest deferred call before it, unless the result was marked
    /// before. Backward needs the results of the calls that forward deferred from last to first. While it uses one,
    /// the next is in flight.
    pub fn want_and_next(&mut self, ticket: OpHandle) -> Vec<OpHandle> {
        if self.slot(ticket).wanted == Wanted::Now {
            return Vec::new();
        }
        let mut offers = self.ask(ticket, Wanted::Now);
        let g = &self.groups[ticket.group.0];
        let mut before = g.slots.iter().take((ticket.seq - g.base) as usize);
        if let Some(at) = before.rposition(|slot| slot.wanted == Wanted::Later && slot.unreleased > 0) {
            let seq = g.base + at as u64;
            offers.extend(self.ask(OpHandle { seq, ..ticket }, Wanted::Next));
        }
        offers
    }

    fn ask(&mut self, ticket: OpHandle, wanted: Wanted) -> Vec<OpHandle> {
        let slot = self.slot_mut(ticket);
        slot.wanted = wanted;
        std::mem::take(&mut slot.offered).into_iter().map(|member| OpHandle { member, ..ticket }).collect()
    }

    /// Returns true if the result of `ticket` is available, or only offered contributions are missing.
    pub fn is_complete(&self, ticket: OpHandle) -> bool {
        let slot = self.slot(ticket);
        // A member that has not posted has not offered anything, nor has one whose contribution is in flight.
        let is_all_offered =
            || slot.wanted == Wanted::Later && self.without_deposit(ticket).count() == slot.offered.len();
        self.is_over(Wait::All(ticket)) || is_all_offered()
    }

    /// Returns the signature of a posted call whose contribution has not arrived.
    pub fn print(&self, ticket: OpHandle) -> Option<&F> {
        let joined = self.kept(ticket)?.joined.get(ticket.member)?.as_ref();
        joined.filter(|(_, part)| part.is_none()).map(|(print, _)| print)
    }

    /// Returns the entry of `ticket`. There is none before the first rank has posted, nor after the collective is
    /// over.
    fn kept(&self, ticket: OpHandle) -> Option<&MatchEntry<F, P>> {
        let g = &self.groups[ticket.group.0];
        g.slots.get(ticket.seq.checked_sub(g.base)? as usize)
    }

    /// Adds the contribution of a call that was posted without one. Returns true if the collective is now complete.
    pub fn provide_data(&mut self, ticket: OpHandle, part: P) -> bool {
        let is_awaited = self.failure.is_none() && self.kept(ticket).is_some_and(|slot| slot.awaits(ticket.member));
        if !is_awaited {
            // No rank takes it any more.
            self.freed.push(Arc::from([part]));
            return false;
        }
        self.slot_mut(ticket).put(ticket.member, part);
        self.complete(ticket)
    }

    /// Takes the offers that no local rank will request, for which the other processes must be notified.
    #[must_use]
    pub fn take_declined(&mut self) -> Vec<OpHandle> {
        std::mem::take(&mut self.declined)
    }

    /// Leaves it to another process to decide which failure is the first.
    pub fn defer(&mut self) {
        self.defers = true;
    }

    /// Returns true if this process has found a failure and does not know yet which failure is the first.
    pub fn is_undecided(&self) -> bool {
        self.failure.is_none() && self.found.is_some()
    }

    /// Makes this process decide which failure is the first, because the process that decided is lost. The other
    /// processes may not have received what was sent to that one, so they are notified in any case.
    pub fn decide_here(&mut self) {
        self.defers = false;
        if let Some(found) = self.found.clone() {
            self.decide(found);
        }
        self.untold = self.failure.is_some();
    }

    /// Returns the failure that this process has found, unless the other processes have been notified.
    pub fn untold(&mut self) -> Option<Failure> {
        let failure = self.failure.as_ref().or(self.found.as_ref())?;
        std::mem::replace(&mut self.untold, false).then(|| failure.clone())
    }
}
