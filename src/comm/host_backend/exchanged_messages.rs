//! [`ExchangedMessages`]: messages whose tensors the sender and the receiver exchange by their data
//! plane.
//!
//! ```text
//! sender's process                    receiver's process                   first process
//! keeps the tensors, sends a header
//!                                     a receive takes it: reports that     puts it in the order of exchanges
//! starts to send                      starts to receive
//! ```
//!
//! A message may be received long after it was sent, or never. So its tensors are exchanged once a
//! receive has taken it, in the [order](super::exchange_order) of all exchanges of the world.
//!
//! Ranks do not connect in a message. So a message is exchanged only if its sender has the result of
//! an exchange on the same communicator, in which all its ranks have connected. Earlier ones travel
//! as bytes, or are read by handle.

use std::collections::HashMap;
use std::mem;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::slice;
use std::sync::Arc;

use burn::tensor::Device;
use parking_lot::Mutex;

use super::HostBackend;
use crate::comm::CommError;
use crate::comm::backend::{CallSignature, Failure, GroupMember};
use crate::comm::control::match_table::{
    GroupKey, MatchTable, MessageHandle, OpHandle, RecvHandle,
};
use crate::comm::data::call::{DataCall, MessagePeer};
use crate::comm::data::contribution::Contribution;
use crate::comm::data::plane::DataPlane;
use crate::comm::data::{ExchangedMessage, PlaneContribution};
use crate::comm::panic::panic_text;
use crate::comm::transport::header::{ControlMessage, MessageId};

type MessageTable = MatchTable<CallSignature, Contribution>;

/// Messages that are not started, as far as this process sends or receives them.
#[derive(Default)]
pub(super) struct ExchangedMessages(Mutex<Messages>);

#[derive(Default)]
struct Messages {
    /// Number of messages that ranks of this process have sent.
    count: u64,
    /// Messages of local ranks.
    sent: HashMap<MessageId, SentMessage>,
    /// Messages to local ranks.
    arrived: HashMap<MessageId, MessageHandle>,
    /// Those of them that no receive is known to have taken.
    untaken: HashMap<MessageHandle, MessageId>,
    /// Local ranks that have received messages, by their group and group rank.
    receivers: HashMap<(GroupKey, usize), MessageReceiver>,
    is_over: bool,
}

/// Tensors of a message that a rank is about to send.
pub(super) enum MessageBody {
    /// Read by handle, or sent as bytes.
    Tensors(Contribution),
    Exchanged(MessageId),
}

/// A message of a local rank.
pub(super) struct SentMessage {
    pub rank: usize,
    pub plane: Arc<dyn DataPlane>,
    pub device: Device,
    pub group: GroupKey,
    pub contribution: Contribution,
}

/// A local rank that receives messages.
#[derive(Clone)]
pub(super) struct MessageReceiver {
    pub plane: Arc<dyn DataPlane>,
    pub member: GroupMember,
    pub name: &'static str,
}

impl ExchangedMessages {
    /// Drops all messages: the world has failed, or the programs of its ranks have ended.
    pub fn end(&self) {
        let mut messages = self.0.lock();
        let ended = Messages {
            count: messages.count,
            is_over: true,
            ..Messages::default()
        };
        let dropped = mem::replace(&mut *messages, ended);
        drop(messages);
        // Outside the lock.
        drop(dropped);
    }
}

impl HostBackend {
    /// Keeps a message of a local rank until a receive has taken it. Called before the receiver is
    /// notified.
    pub(super) fn keep_message(&self, message: SentMessage) -> MessageId {
        let mut messages = self.exchanges.messages.0.lock();
        let id = MessageId {
            process: self.remote.as_ref().map_or(0, |remote| remote.here()),
            number: messages.count,
        };
        messages.count += 1;
        if !messages.is_over {
            messages.sent.insert(id, message);
        }
        id
    }

    /// Notes a message that was sent to a local rank. Returns true if a receive has taken it, and this
    /// call has reported that.
    ///
    /// # Errors
    /// Describes the problem if the sender's process has used the id before.
    pub(super) fn message_sent(
        &self,
        message: MessageHandle,
        id: MessageId,
    ) -> Result<bool, String> {
        let mut messages = self.exchanges.messages.0.lock();
        if messages.is_over {
            return Ok(false);
        }
        if messages.arrived.insert(id, message).is_some() {
            return Err(format!("it sent two messages of number {}", id.number));
        }
        messages.untaken.insert(message, id);
        drop(messages);
        let is_taken = |table: &mut MessageTable| table.sent_signature(message).is_some();
        Ok(self.rendezvous.read(is_taken) && self.message_taken(message))
    }

    /// Notes a local rank that receives messages. Called before its receive is posted.
    pub(super) fn add_receiver(
        &self,
        (group, member): (GroupKey, usize),
        receiver: impl FnOnce() -> MessageReceiver,
    ) {
        let mut messages = self.exchanges.messages.0.lock();
        if !messages.is_over {
            let known = messages.receivers.entry((group, member));
            known.or_insert_with(receiver);
        }
    }

    /// Handles a receive that a local rank has posted: if it has taken a message, the tensors are
    /// exchanged.
    pub(super) fn receive_posted(&self, receive: RecvHandle) {
        let taken = self.rendezvous.read(|table| table.taken_message(receive));
        if taken.is_some_and(|message| self.message_taken(message)) {
            self.start_exchanges();
        }
    }

    /// Reports a message that a receive has taken, if it is one that is exchanged and was not
    /// reported. Both the thread that notes the message and that of the receiver call this.
    fn message_taken(&self, message: MessageHandle) -> bool {
        let mut messages = self.exchanges.messages.0.lock();
        let Some(id) = messages.untaken.remove(&message) else {
            return false;
        };
        drop(messages);
        match &self.remote {
            Some(remote) if !remote.decides() => {
                let message = ControlMessage::MessageTaken(id);
                remote.notify_process(remote.first(), message);
            }
            Some(remote) => self.order_message(id, remote.here()),
            None => self.order_message(id, 0),
        }
        true
    }

    /// Handles the report of process `from` that a receive of it has taken a message.
    pub(super) fn receive_message_report(&self, from: usize, id: MessageId) -> Result<(), String> {
        if !self.remote().decides() {
            return Err("it reported a message to a process that does not order them".into());
        }
        self.order_message(id, from);
        self.start_exchanges_in_background();
        Ok(())
    }

    /// Starts the parts of local ranks in a message.
    pub(super) fn start_message(&self, id: MessageId) {
        let (sent, taken) = {
            let mut messages = self.exchanges.messages.0.lock();
            let sent = messages.sent.remove(&id);
            let taken = messages.arrived.remove(&id).map(|message| {
                let receiver = messages.receivers.get(&(message.group, message.to));
                (message, receiver.cloned())
            });
            (sent, taken)
        };
        if let Some(sent) = sent {
            self.guarded(sent.rank, || self.start_to_send(&sent));
        }
        match taken {
            Some((message, Some(receiver))) => {
                let start = || self.start_to_receive(message, &receiver);
                self.guarded(receiver.member.rank(), start);
            }
            Some((_, None)) => {
                let remote = self.remote.as_ref();
                let rank = remote.map_or(0, |remote| remote.ranks_of(id.process).start);
                let problem = "it exchanges a message with a rank that does not".into();
                self.rendezvous
                    .find(Failure::Collective(CommError::Protocol { rank, problem }));
            }
            None => {}
        }
    }

    /// Calls `start`. If it panics, `rank` fails, and the thread continues with the exchanges of
    /// others.
    fn guarded(&self, rank: usize, start: impl FnOnce()) {
        if let Err(panic) = catch_unwind(AssertUnwindSafe(start)) {
            let message = panic_text(&*panic).into();
            self.rendezvous.find(Failure::Panicked { rank, message });
        }
    }

    fn start_to_send(&self, sent: &SentMessage) {
        let part = slice::from_ref(&sent.contribution);
        let inputs = self.inputs(part, only(sent.group), &sent.device);
        // Nothing is taken, and a failure is that of the world.
        let _ = self.start_part(sent.rank, &*sent.plane, &inputs);
    }

    fn start_to_receive(&self, message: MessageHandle, receiver: &MessageReceiver) {
        let sent = self.rendezvous.read(|table| {
            let (from, signature) = table.sent_signature(message)?;
            Some((from, signature.clone()))
        });
        // After a failure it may be gone.
        let Some((from, signature)) = sent else {
            return;
        };
        let MessageReceiver {
            plane,
            member,
            name,
        } = receiver;
        let is_distributed = self.remote.is_some();
        let peer = Some(MessagePeer::From(from));
        let call = DataCall::of_message(&signature, member, name, is_distributed, peer);
        let part = [plane.contribute(&call, Vec::new(), Vec::new())];
        let inputs = self.inputs(&part, only(message.group), &member.device);
        if let Ok(take) = self.start_part(member.rank(), &**plane, &inputs) {
            let exchanged = PlaneContribution::Exchanged(ExchangedMessage::new(take));
            let exchanged = Contribution::new(Vec::new(), exchanged);
            self.rendezvous.provide_message(message, exchanged);
        }
    }
}

/// Returns the handle of a rank whose contribution is the only one.
fn only(group: GroupKey) -> OpHandle {
    OpHandle {
        group,
        member: 0,
        seq: 0,
    }
}
