//! [`P2pQueue`]: messages in flight to one member of a group, and the receives that wait for them. Pure state, like
//! the [`MatchTable`].
//!
//! Invariants, cited by number in the tests:
//! 1. Messages of one sender and one tag are received in the order in which they were sent.
//! 2. A message goes to the first posted receive that accepts it. A receive takes the first sent
//!    message that it accepts, also after its handle was released.
//! 3. Sending never blocks. The queue owns a message until a receive takes it or the world ends; its
//!    tensors stay with the sender's process if the two ranks exchange them.
//! 4. A message may be sent before its data arrives, as by a rank of another process. Sending is
//!    all that counts in 1 and 2; the message has not arrived until its data has.

use std::collections::VecDeque;
use std::sync::Arc;

use super::{Failure, GroupKey, MatchTable, Poll, Signature};
use crate::comm::{CollectiveId, CommError};

/// Handle of one receive of a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct RecvHandle {
    pub group: GroupKey,
    /// Group rank of the receiver.
    pub member: usize,
    /// Number of the call, counted over the sends and receives of the member.
    number: u64,
}

/// Handle of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct MessageHandle {
    pub group: GroupKey,
    /// Group rank of the recipient.
    pub to: usize,
    /// Number of the message, counted over those to the recipient.
    number: u64,
}

/// Message of one member of a group to another.
pub(crate) struct P2pMessage<F, P> {
    /// Group rank of the sender.
    pub from: usize,
    pub tag: u32,
    pub signature: F,
    pub part: P,
}

/// Messages and receives of one member of a group.
pub(super) struct P2pQueue<F, P> {
    /// Number of sends and receives of the member so far.
    calls: u64,
    /// Number of messages to the member so far.
    sent: u64,
    /// Messages that no receive has taken, oldest first.
    messages: VecDeque<QueuedMessage<F, P>>,
    /// Receives that are not complete, oldest first.
    receives: VecDeque<Receive<F, P>>,
}

/// A message with its number. Its data may arrive later.
type QueuedMessage<F, P> = (u64, P2pMessage<F, Option<P>>);

struct Receive<F, P> {
    number: u64,
    /// Sender; `None` accepts any.
    from: Option<usize>,
    tag: u32,
    signature: F,
    message: Option<QueuedMessage<F, P>>,
    /// Number of waits that began before the message and its data had arrived.
    waits: usize,
    /// True if its rank does not need the message.
    is_released: bool,
}

impl<F, P> Default for P2pQueue<F, P> {
    fn default() -> Self {
        Self {
            calls: 0,
            sent: 0,
            messages: VecDeque::new(),
            receives: VecDeque::new(),
        }
    }
}

impl<F, P> Receive<F, P> {
    fn takes(&self, (_, message): &QueuedMessage<F, P>) -> bool {
        self.tag == message.tag && self.from.is_none_or(|from| from == message.from)
    }

    fn has_arrived(&self) -> bool {
        self.message
            .as_ref()
            .is_some_and(|(_, message)| message.part.is_some())
    }
}

impl<F, P> P2pQueue<F, P> {
    /// Counts a call and returns its number.
    fn call(&mut self) -> u64 {
        self.calls += 1;
        self.calls - 1
    }

    /// Delivers `message` to the first receive that accepts it, and queues it if there is none.
    /// Returns its number, and the index of the receive.
    fn deliver(&mut self, message: P2pMessage<F, Option<P>>) -> (u64, Option<usize>) {
        self.sent += 1;
        let message = (self.sent, message);
        let at = self
            .receives
            .iter()
            .position(|receive| receive.message.is_none() && receive.takes(&message));
        match at {
            Some(at) => self.receives[at].message = Some(message),
            None => self.messages.push_back(message),
        }
        (self.sent, at)
    }

    /// Adds a receive, which takes the first queued message that it accepts. Returns its index.
    fn receive(&mut self, mut receive: Receive<F, P>) -> usize {
        let message = self
            .messages
            .iter()
            .position(|message| receive.takes(message));
        receive.message = message.and_then(|at| self.messages.remove(at));
        self.receives.push_back(receive);
        self.receives.len() - 1
    }

    /// Adds the data of message `number`. Returns the index of the receive that has taken the
    /// message, if one has, and the data as an error if it is not needed.
    fn provide(&mut self, number: u64, part: P) -> Result<Option<usize>, P> {
        let is_it = |(other, _): &QueuedMessage<F, P>| *other == number;
        let taken = self
            .receives
            .iter()
            .position(|receive| receive.message.as_ref().is_some_and(is_it));
        let message = match taken {
            Some(at) => self.receives[at].message.as_mut(),
            None => self.messages.iter_mut().find(|message| is_it(message)),
        };
        let Some((_, message)) = message else {
            return Err(part);
        };
        message.part = Some(part);
        Ok(taken)
    }

    /// Returns true if the data of a message of member `from` has not arrived, and the message may
    /// be received.
    pub(super) fn awaits_data_of(&self, from: usize) -> bool {
        let receives = self.receives.iter().filter(|receive| !receive.is_released);
        let mut messages = receives
            .filter_map(|receive| receive.message.as_ref())
            .chain(&self.messages);
        messages.any(|(_, message)| message.from == from && message.part.is_none())
    }

    #[cfg(test)]
    pub fn is_empty(&self) -> bool {
        self.messages.is_empty() && self.receives.is_empty()
    }

    fn index(&self, number: u64) -> usize {
        self.receives
            .partition_point(|receive| receive.number < number)
    }

    /// Removes a receive and returns its message, if that has arrived.
    fn take(&mut self, at: usize) -> Option<P2pMessage<F, P>> {
        if !self.receives[at].has_arrived() {
            return None;
        }
        let (
            _,
            P2pMessage {
                from,
                tag,
                signature,
                part,
            },
        ) = self.receives.remove(at)?.message?;
        Some(P2pMessage {
            from,
            tag,
            signature,
            part: part?,
        })
    }
}

impl<F: Signature, P> MatchTable<F, P> {
    /// Sends a message to member `to` of the group; its data may be [provided
    /// later](Self::provide_message). Returns true if a rank may be waiting for it.
    pub fn send(
        &mut self,
        group: GroupKey,
        to: usize,
        message: P2pMessage<F, Option<P>>,
    ) -> Result<(MessageHandle, bool), CommError> {
        let (rank, id) = self.message_id(group, message.from, &message.signature);
        if let Err(error) = self.enter(rank, id) {
            self.freed
                .extend(message.part.map(|part| Arc::from([part])));
            return Err(error);
        }
        let has_data = message.part.is_some();
        let (number, receive) = self.groups[group.0].queues[to].deliver(message);
        if let Some(at) = receive {
            self.check_message(group, to, at)?;
            if has_data {
                self.arrived(group, to, at);
            }
        }
        Ok((
            MessageHandle { group, to, number },
            has_data && receive.is_some(),
        ))
    }

    /// Counts a message that a rank here sends to another process. Fails as if it were sent to a
    /// rank here.
    pub fn send_elsewhere(
        &mut self,
        group: GroupKey,
        from: usize,
        signature: &F,
    ) -> Result<(), CommError> {
        let (rank, id) = self.message_id(group, from, signature);
        self.enter(rank, id)
    }

    /// Adds the data of a message that was sent without. Returns true if a rank may be waiting for
    /// it.
    pub fn provide_message(&mut self, message: MessageHandle, part: P) -> bool {
        let MessageHandle { group, to, number } = message;
        let provided = self.groups[group.0].queues[to].provide(number, part);
        if let Ok(Some(at)) = provided {
            self.arrived(group, to, at);
            return true;
        }
        self.freed
            .extend(provided.err().map(|part| Arc::from([part])));
        false
    }

    /// Completes receive `at` of member `to`, whose message and data have arrived.
    fn arrived(&mut self, group: GroupKey, to: usize, at: usize) {
        let queue = &mut self.groups[group.0].queues[to];
        self.waits -= queue.receives[at].waits;
        if queue.receives[at].is_released {
            let message = queue.take(at);
            self.freed
                .extend(message.map(|message| Arc::from([message.part])));
        }
    }

    /// Posts a receive of `member` for a message from `from`, or from any member if that is `None`.
    pub fn receive(
        &mut self,
        group: GroupKey,
        member: usize,
        from: Option<usize>,
        tag: u32,
        signature: F,
    ) -> Result<RecvHandle, CommError> {
        let (rank, id) = self.message_id(group, member, &signature);
        let number = id.seq;
        self.enter(rank, id)?;
        let receive = Receive {
            number,
            from,
            tag,
            signature,
            message: None,
            waits: 0,
            is_released: false,
        };
        let at = self.groups[group.0].queues[member].receive(receive);
        self.check_message(group, member, at)?;
        Ok(RecvHandle {
            group,
            member,
            number,
        })
    }

    /// Returns the message of `receive` if it has arrived. Afterwards the handle is no longer
    /// valid.
    pub fn poll_message(&mut self, receive: RecvHandle) -> Poll<P2pMessage<F, P>> {
        let queue = &mut self.groups[receive.group.0].queues[receive.member];
        match queue.take(queue.index(receive.number)) {
            Some(message) => Poll::Ready(message),
            None if self.failure().is_some() => Poll::Failed,
            None => Poll::Pending,
        }
    }

    /// Counts a wait for `receive`. Returns true if the message has not arrived.
    pub(super) fn await_message(&mut self, receive: RecvHandle) -> bool {
        let queue = &mut self.groups[receive.group.0].queues[receive.member];
        let at = queue.index(receive.number);
        let is_pending = !queue.receives[at].has_arrived();
        queue.receives[at].waits += usize::from(is_pending);
        is_pending
    }

    pub(super) fn has_arrived(&self, receive: RecvHandle) -> bool {
        self.find_receive(receive).has_arrived()
    }

    /// Releases the handle of a receive. Its message is freed when it arrives.
    pub fn release_receive(&mut self, receive: RecvHandle) {
        let queue = &mut self.groups[receive.group.0].queues[receive.member];
        let at = queue.index(receive.number);
        match queue.take(at) {
            Some(message) => self.freed.push(Arc::from([message.part])),
            None => queue.receives[at].is_released = true,
        }
    }

    /// Frees the messages that no receive will take.
    pub(super) fn free_messages(&mut self) {
        let queues = self.groups.iter_mut().flat_map(|group| &mut group.queues);
        let parts = queues
            .flat_map(|queue| queue.messages.drain(..))
            .filter_map(|(_, message)| message.part);
        self.freed.extend(parts.map(|part| Arc::from([part])));
    }

    /// Returns the call of the receive, as its rank made it.
    pub(super) fn receive_id(&self, receive: RecvHandle) -> CollectiveId {
        self.groups[receive.group.0].id(receive.number, &self.find_receive(receive).signature)
    }

    /// Returns the ranks of which one must still send the message of `receive`.
    pub(super) fn senders(&self, receive: RecvHandle) -> &[usize] {
        let ranks = self.ranks(receive.group);
        let Receive { from, message, .. } = self.find_receive(receive);
        match from {
            _ if message.is_some() => &[],
            Some(from) => &ranks[*from..from + 1],
            None => ranks,
        }
    }

    /// Returns the rank whose message `receive` has taken, while its data is in flight.
    pub(super) fn sender(&self, receive: RecvHandle) -> Option<usize> {
        let found = self.find_receive(receive);
        let (_, message) = found.message.as_ref().filter(|_| !found.has_arrived())?;
        Some(self.ranks(receive.group)[message.from])
    }

    /// Returns the message that `receive` has taken.
    pub fn taken_message(&self, receive: RecvHandle) -> Option<MessageHandle> {
        let (number, _) = self.find_receive(receive).message.as_ref()?;
        Some(MessageHandle {
            group: receive.group,
            to: receive.member,
            number: *number,
        })
    }

    /// Returns the group rank of the sender of a message that a receive has taken, and its
    /// signature.
    pub fn sent_signature(&self, message: MessageHandle) -> Option<(usize, &F)> {
        let queue = &self.groups[message.group.0].queues[message.to];
        let mut taken = queue.receives.iter().filter_map(|of| of.message.as_ref());
        let (_, taken) = taken.find(|(number, _)| *number == message.number)?;
        Some((taken.from, &taken.signature))
    }

    fn find_receive(&self, receive: RecvHandle) -> &Receive<F, P> {
        let queue = &self.groups[receive.group.0].queues[receive.member];
        &queue.receives[queue.index(receive.number)]
    }

    /// Counts the next message or receive of `member`. Returns the rank of the member and the call.
    fn message_id(
        &mut self,
        group: GroupKey,
        member: usize,
        signature: &F,
    ) -> (usize, CollectiveId) {
        let group = &mut self.groups[group.0];
        if group.queues.is_empty() {
            group
                .queues
                .resize_with(group.ranks.len(), P2pQueue::default);
        }
        let seq = group.queues[member].call();
        (group.ranks[member], group.id(seq, signature))
    }

    /// Fails the world if the message of receive `at` of member `to` does not match its signature.
    fn check_message(&mut self, key: GroupKey, to: usize, at: usize) -> Result<(), CommError> {
        let group = &mut self.groups[key.0];
        let receive = &group.queues[to].receives[at];
        let Some((_, message)) = &receive.message else {
            return Ok(());
        };
        let Some(differs) = receive.signature.refusal(&message.signature) else {
            return Ok(());
        };
        let rank = group.ranks[to];
        let other = group.ranks[message.from];
        let error = CommError::Mismatch {
            rank,
            other,
            during: group.id(receive.number, &receive.signature),
            differs,
        };
        let part = group.queues[to].receives[at]
            .message
            .take()
            .and_then(|(_, message)| message.part);
        self.freed.extend(part.map(|part| Arc::from([part])));
        self.fail(Failure::Collective(error.clone()));
        Err(error)
    }
}

#[cfg(test)]
#[path = "p2p_queue_tests.rs"] // needed where the rendezvous model includes this file
mod tests;
