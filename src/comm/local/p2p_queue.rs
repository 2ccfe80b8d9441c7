//! [`P2pQueue`]: messages in flight to one member of a group, and the receives that wait for them. Pure state, like
//! the [`MatchTable`].
//!
//! Invariants, cited by number in the tests:
//! 1. Messages of one sender and one tag are received in the order in which they were sent.
//! 2. A message goes to the first posted receive that accepts it. A receive takes the first sent message that it
//!    accepts, also after its handle was released.
//! 3. Sending never blocks. The queue owns a message until a receive takes it or the world ends.
//! 4. A message from another process is announced, which is all that counts in 1 and 2. It has not arrived until
//!    its data has.

#[path = "p2p_queue_remote.rs"] // needed where the rendezvous model includes this file
mod remote;

use std::collections::VecDeque;
use std::sync::Arc;

use super::{Failure, GroupKey, MatchTable, Poll, Signature};
use crate::comm::{CollectiveId, CommError};

pub(crate) use remote::RemoteMessageHandle;

/// Handle of one receive of a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct RecvHandle {
    pub group: GroupKey,
    /// Group rank of the receiver.
    pub member: usize,
    /// Number of the call, counted over the sends and receives of the member.
    number: u64,
}

/// Message of one member of a group to another.
pub(crate) struct P2pMessage<F, P> {
    /// Group rank of the sender.
    pub from: usize,
    pub tag: u32,
    pub print: F,
    pub part: P,
}

/// Messages and receives of one member of a group.
pub(super) struct P2pQueue<F, P> {
    /// Number of sends and receives of the member so far.
    calls: u64,
    /// Number of messages announced to the member so far.
    announced: u64,
    /// Messages that no receive has taken, oldest first.
    letters: VecDeque<Posted<F, P>>,
    /// Receives that are not complete, oldest first.
    receives: VecDeque<Receive<F, P>>,
}

/// A message whose data may arrive later.
struct Posted<F, P> {
    letter: P2pMessage<F, Option<P>>,
    /// Number of an announced message.
    number: Option<u64>,
}

struct Receive<F, P> {
    number: u64,
    /// Sender; `None` accepts any.
    from: Option<usize>,
    tag: u32,
    print: F,
    letter: Option<Posted<F, P>>,
    /// Number of waits that began before the message and its data had arrived.
    waits: usize,
    given_up: bool,
}

impl<F, P> Default for P2pQueue<F, P> {
    fn default() -> Self {
        Self { calls: 0, announced: 0, letters: VecDeque::new(), receives: VecDeque::new() }
    }
}

impl<F, P> From<P2pMessage<F, P>> for Posted<F, P> {
    fn from(P2pMessage { from, tag, print, part }: P2pMessage<F, P>) -> Self {
        Self { letter: P2pMessage { from, tag, print, part: Some(part) }, number: None }
    }
}

impl<F, P> Receive<F, P> {
    fn takes(&self, Posted { letter, .. }: &Posted<F, P>) -> bool {
        self.tag == letter.tag && self.from.is_none_or(|from| from == letter.from)
    }

    fn has_arrived(&self) -> bool {
        self.letter.as_ref().is_some_and(|posted| posted.letter.part.is_some())
    }
}

impl<F, P> P2pQueue<F, P> {
    /// Counts a call and returns its number.
    fn call(&mut self) -> u64 {
        self.calls += 1;
        self.calls - 1
    }

    /// Delivers `letter` to the first receive that accepts it, and queues it if there is none. Returns the index of
    /// the receive among those that wait; `None` if the message was queued.
    fn deliver(&mut self, letter: Posted<F, P>) -> Option<usize> {
        let at = self.receives.iter().position(|receive| receive.letter.is_none() && receive.takes(&letter));
        match at {
            Some(at) => self.receives[at].letter = Some(letter),
            None => self.letters.push_back(letter),
        }
        at
    }

    /// Adds a receive, which takes the first queued message that it accepts. Returns its index.
    fn receive(&mut self, mut receive: Receive<F, P>) -> usize {
        let letter = self.letters.iter().position(|letter| receive.takes(letter));
        receive.letter = letter.and_then(|at| self.letters.remove(at));
        self.receives.push_back(receive);
        self.receives.len() - 1
    }

    #[cfg(test)]
    pub fn is_empty(&self) -> bool {
        self.letters.is_empty() && self.receives.is_empty()
    }

    fn find(&self, number: u64) -> &Receive<F, P> {
        &self.receives[self.place(number)]
    }

    fn place(&self, number: u64) -> usize {
        self.receives.partition_point(|receive| receive.number < number)
    }

    /// Removes a receive and returns its message, if that has arrived.
    fn take(&mut self, at: usize) -> Option<P2pMessage<F, P>> {
        if !self.receives[at].has_arrived() {
            return None;
        }
        let P2pMessage { from, tag, print, part } = self.receives.remove(at)?.letter?.letter;
        Some(P2pMessage { from, tag, print, part: part? })
    }
}

impl<F: Signature, P> MatchTable<F, P> {
    /// Sends a message to member `to` of the group. Returns true if a rank may be waiting for it.
    pub fn send(&mut self, group: GroupKey, to: usize, letter: P2pMessage<F, P>) -> Result<bool, CommError> {
        let id = self.message_id(group, letter.from, &letter.print);
        if let Err(error) = self.enter(group, letter.from, id) {
            self.freed.push(Arc::from([letter.part]));
            return Err(error);
        }
        let Some(at) = self.groups[group.0].mail[to].deliver(letter.into()) else { return Ok(false) };
        self.check_letter(group, to, at)?;
        self.arrived(group, to, at);
        Ok(true)
    }

    /// Completes receive `at` of member `to`, whose message and data have arrived.
    fn arrived(&mut self, group: GroupKey, to: usize, at: usize) {
        let mail = &mut self.groups[group.0].mail[to];
        self.waits -= mail.receives[at].waits;
        if mail.receives[at].given_up {
            let letter = mail.take(at);
            self.freed.extend(letter.map(|letter| Arc::from([letter.part])));
        }
    }

    /// Posts a receive of `member` for a message from `from`, or from any member if that is `None`.
    pub fn receive(
        &mut self,
        group: GroupKey,
        member: usize,
        from: Option<usize>,
        tag: u32,
        print: F,
    ) -> Result<RecvHandle, CommError> {
        let id = self.message_id(group, member, &print);
        let number = id.seq;
        self.enter(group, member, id)?;
        let mail = &mut self.groups[group.0].mail[member];
        let at = mail.receive(Receive { number, from, tag, print, letter: None, waits: 0, given_up: false });
        self.check_letter(group, member, at)?;
        Ok(RecvHandle { group, member, number })
    }

    /// Returns the message of `claim` if it has arrived. Afterwards the handle is no longer valid.
    pub fn arrival(&mut self, claim: RecvHandle) -> Poll<P2pMessage<F, P>> {
        let mail = &mut self.groups[claim.group.0].mail[claim.member];
        match mail.take(mail.place(claim.number)) {
            Some(letter) => Poll::Ready(letter),
            None if self.failure.is_some() => Poll::Failed,
            None => Poll::Pending,
        }
    }

    /// Counts a wait for `claim`. Returns true if the message has not arrived.
    pub(super) fn await_letter(&mut self, claim: RecvHandle) -> bool {
        let mail = &mut self.groups[claim.group.0].mail[claim.member];
        let at = mail.place(claim.number);
        let receive = &mut mail.receives[at];
        let pending = !receive.has_arrived();
        receive.waits += usize::from(pending);
        pending
    }

    pub(super) fn has_arrived(&self, claim: RecvHandle) -> bool {
        self.groups[claim.group.0].mail[claim.member].find(claim.number).has_arrived()
    }

    /// Releases the handle of a receive. Its message is freed when it arrives.
    pub fn give_up(&mut self, claim: RecvHandle) {
        let mail = &mut self.groups[claim.group.0].mail[claim.member];
        let at = mail.place(claim.number);
        match mail.take(at) {
            Some(letter) => self.freed.push(Arc::from([letter.part])),
            None => mail.receives[at].given_up = true,
        }
    }

    /// Frees the messages that no receive will take.
    pub(super) fn free_letters(&mut self) {
        let mails = self.groups.iter_mut().flat_map(|group| &mut group.mail);
        let parts = mails.flat_map(|mail| mail.letters.drain(..)).filter_map(|posted| posted.letter.part);
        self.freed.extend(parts.map(|part| Arc::from([part])));
    }

    /// Returns the call of the receive `claim`, as its rank made it.
    pub(super) fn claim_id(&self, claim: RecvHandle) -> CollectiveId {
        let group = &self.groups[claim.group.0];
        group.message(claim.number, &group.mail[claim.member].find(claim.number).print)
    }

    /// Returns the ranks of which one must still send the message of `claim`.
    pub(super) fn senders(&self, claim: RecvHandle) -> &[usize] {
        let group = &self.groups[claim.group.0];
        let receive = group.mail[claim.member].find(claim.number);
        match receive.from {
            _ if receive.letter.is_some() => &[],
            Some(from) => &group.ranks[from..from + 1],
            None => &group.ranks,
        }
    }

    /// Returns the rank whose message `claim` has taken, while its data is in flight.
    pub(super) fn sender(&self, claim: RecvHandle) -> Option<usize> {
        let group = &self.groups[claim.group.0];
        let receive = group.mail[claim.member].find(claim.number);
        let posted = receive.letter.as_ref().filter(|_| !receive.has_arrived())?;
        Some(group.ranks[posted.letter.from])
    }

    /// Counts the next message or receive of `member`, and returns its identification.
    fn message_id(&mut self, group: GroupKey, member: usize, print: &F) -> CollectiveId {
        let group = &mut self.groups[group.0];
        if group.mail.is_empty() {
            group.mail.resize_with(group.ranks.len(), P2pQueue::default);
        }
        let seq = group.mail[member].call();
        group.message(seq, print)
    }

    /// Fails the world if the message of receive `at` of member `to` does not match its signature.
    fn check_letter(&mut self, key: GroupKey, to: usize, at: usize) -> Result<(), CommError> {
        let group = &mut self.groups[key.0];
        let receive = &group.mail[to].receives[at];
        let Some(Posted { letter, .. }) = &receive.letter else { return Ok(()) };
        let Some(differs) = receive.print.refusal(&letter.print) else { return Ok(()) };
        let error = CommError::Mismatch {
            rank: group.ranks[to],
            other: group.ranks[letter.from],
            during: group.message(receive.number, &receive.print),
            differs,
        };
        let part = group.mail[to].receives[at].letter.take().and_then(|posted| posted.letter.part);
        self.freed.extend(part.map(|part| Arc::from([part])));
        self.fail(Failure::Collective(error.clone()));
        Err(error)
    }
}

impl<F: Signature, P> super::GroupState<F, P> {
    fn message(&self, seq: u64, print: &F) -> CollectiveId {
        CollectiveId { op: print.op(), seq, label: print.label(), ranks: self.ranks.clone() }
    }
}

#[cfg(test)]
#[path = "p2p_queue_tests.rs"] // needed where the rendezvous model includes this file
mod tests;
