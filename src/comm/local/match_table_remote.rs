//! The [`MatchTable`] among several processes: ranks of others join it, and it may be another that decides which
//! failure is the first. Its invariants 6 and 7.

use std::sync::Arc;

use super::match_entry::{MatchEntry, Wanted};
use super::{
    CollectiveId, CommError, Failure, GroupKey, MatchTable, OpHandle, RankState, Signature, StalledWait, Wait,
};

impl<F: Signature, P> MatchTable<F, P> {
    /// [`join`](Self::post)s for a rank of another process, whose deposit [comes later](Self::provide_data).
    pub fn post_remote(&mut self, group: GroupKey, member: usize, print: F) -> Result<OpHandle, CommError> {
        let (ticket, _) = self.join_with(group, member, print, None)?;
        self.release(ticket);
        Ok(ticket)
    }

    /// [`join`](Self::post)s for a rank of this process, whose deposit [comes later](Self::provide_data): a part of the
    /// call that it has made last, and not another.
    pub fn join_late(&mut self, group: GroupKey, member: usize, print: F) -> Result<OpHandle, CommError> {
        let last = self.last_call(group, member);
        let (ticket, _) = self.join_with(group, member, print, None)?;
        let rank = self.groups[group.0].ranks[member];
        self.ranks[rank].last = last;
        Ok(ticket)
    }

    /// [`join`](Self::post)s for a rank of this process, whose deposit [comes](Self::provide_data) once it wants the
    /// result, or another [asks](Self::ask_for) for it.
    pub fn post_deferred(&mut self, group: GroupKey, member: usize, print: F) -> Result<OpHandle, CommError> {
        let (ticket, _) = self.join_with(group, member, print, None)?;
        Ok(ticket)
    }

    /// A rank of another process wants the result of `ticket`.
    pub fn ask_for(&mut self, ticket: OpHandle) {
        if self.kept(ticket).is_some() {
            self.slot_mut(ticket).wanted = Wanted::Now;
        }
    }

    /// Whether one does, or has. The caller has not released it.
    pub fn is_asked_for(&self, ticket: OpHandle) -> bool {
        self.slot(ticket).wanted != Wanted::Later
    }

    /// Whether all ranks have called the collective of `ticket`, whatever they have brought.
    pub fn have_all_called(&self, ticket: OpHandle) -> bool {
        self.kept(ticket).is_none_or(|slot| slot.expected == 0)
    }

    /// Whether `rank`, of another process, has called a collective whose result a rank here has yet to take, and not brought
    /// its deposit.
    pub fn owes(&self, rank: usize) -> bool {
        self.groups.iter().any(|g| {
            let member = g.ranks.iter().position(|other| *other == rank);
            let owed = |member| g.slots.iter().any(|slot| slot.unreleased > 0 && slot.awaits(member));
            member.is_some_and(owed)
        })
    }

    /// What is to be found out of a wait that takes long: whether ranks of other processes wait for this one. Where a rank
    /// that waits may call, nothing is claimed.
    pub fn long_wait(&self, wait: Wait) -> Option<StalledWait> {
        if self.multithreaded || self.is_over(wait) {
            return None;
        }
        let rank = self.rank(wait);
        let needs = self.needs(wait).map(|other| (other, self.wait_of(other))).collect();
        Some(StalledWait { rank, number: self.ranks[rank].begun, during: self.id(wait), needs })
    }

    /// The number of the wait that a rank is in.
    pub fn wait_of(&self, rank: usize) -> Option<u64> {
        let RankState { waits, begun, .. } = &self.ranks[rank];
        (!waits.is_empty()).then_some(*begun)
    }

    /// What `rank` waits in, if it is still in its wait of this number, and needs `other`.
    pub fn still_needs(&self, rank: usize, number: u64, other: usize) -> Option<CollectiveId> {
        let wait = *self.ranks[rank].waits.last().filter(|_| self.ranks[rank].begun == number)?;
        (!self.is_over(wait) && self.needs(wait).any(|needed| needed == other)).then(|| self.id(wait))
    }

    /// [`post_remote`](Self::post_remote)s a rank whose deposit comes only if it is asked for. True: it is.
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

    /// The result of `ticket` is wanted now. Returns the offers to ask for.
    pub fn want(&mut self, ticket: OpHandle) -> Vec<OpHandle> {
        self.ask(ticket, Wanted::Now)
    }

    /// The same; once, also of the call before it that is not wanted yet. Backward wants the results of what forward has
    /// called ahead from the last to the first: while it is at one, the next is on its way.
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

    /// Whether the result of `ticket` is there, or nothing more than to be asked for.
    pub fn is_complete(&self, ticket: OpHandle) -> bool {
        let slot = self.slot(ticket);
        // Who has not joined has offered nothing, nor has who has sent what is on its way.
        let is_all_offered =
            || slot.wanted == Wanted::Later && self.without_deposit(ticket).count() == slot.offered.len();
        self.is_over(Wait::All(ticket)) || is_all_offered()
    }

    /// What a rank that was announced has called, while its deposit is awaited.
    pub fn print(&self, ticket: OpHandle) -> Option<&F> {
        let joined = self.kept(ticket)?.joined.get(ticket.member)?.as_ref();
        joined.filter(|(_, part)| part.is_none()).map(|(print, _)| print)
    }

    /// Whether the member of `ticket` has made the call, which others have.
    pub fn has_joined(&self, ticket: OpHandle) -> bool {
        self.kept(ticket).is_none_or(|slot| slot.joined.get(ticket.member).is_none_or(Option::is_some))
    }

    /// The slot of `ticket`: of a collective that is over nothing is kept, nor before anybody has called it.
    fn kept(&self, ticket: OpHandle) -> Option<&MatchEntry<F, P>> {
        let g = &self.groups[ticket.group.0];
        g.slots.get(ticket.seq.checked_sub(g.base)? as usize)
    }

    /// Adds the deposit of a rank that was announced, or joined for later. True: now complete.
    pub fn provide_data(&mut self, ticket: OpHandle, part: P) -> bool {
        let is_awaited = self.failure.is_none() && self.kept(ticket).is_some_and(|slot| slot.awaits(ticket.member));
        if !is_awaited {
            // Nobody takes it any more.
            self.freed.push(Arc::from([part]));
            return false;
        }
        self.slot_mut(ticket).put(ticket.member, part);
        self.complete(ticket)
    }

    /// Offers that nobody will ask for.
    #[must_use]
    pub fn take_declined(&mut self) -> Vec<OpHandle> {
        std::mem::take(&mut self.declined)
    }

    /// Leaves it to another process to decide which failure is the first.
    pub fn defer(&mut self) {
        self.defers = true;
    }

    /// Whether a failure has been found here of which it is not decided whether it is the first.
    pub fn is_undecided(&self) -> bool {
        self.failure.is_none() && self.found.is_some()
    }

    /// Decides so itself, since nobody else does. What was known, and told to who is gone, others may not know.
    pub fn decide_here(&mut self) {
        self.defers = false;
        if let Some(found) = self.found.clone() {
            self.decide(found);
        }
        self.untold = self.failure.is_some();
    }

    /// The failure that was found here, if other processes do not know it yet.
    pub fn untold(&mut self) -> Option<Failure> {
        let failure = self.failure.as_ref().or(self.found.as_ref())?;
        std::mem::replace(&mut self.untold, false).then(|| failure.clone())
    }
}
