//! [`Inbox`]: the envelopes and receives of one rank.

use std::sync::Arc;

use burn::tensor::TensorData;
use burn_dtensor::comm::CommError;
use burn_dtensor::comm::backend::CallSignature;
use parking_lot::{Condvar, Mutex};
use serde::{Deserialize, Serialize};

/// A group's ranks, and the channel's name.
pub type Key = (Arc<[usize]>, Arc<str>);

/// The tensors that one rank sends another in a call.
#[derive(Debug, Serialize, Deserialize)]
pub struct Envelope {
    pub channel: Key,
    pub about: About,
    /// Group rank of the sender.
    pub from: usize,
    pub signature: Arc<CallSignature>,
    pub tensors: Vec<TensorData>,
}

/// The call that an envelope belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub enum About {
    /// The collective with this sequence number.
    Call(u64),
    /// A message, with its tag.
    Message(u32),
}

/// A posted receive, with its message once that has arrived.
#[derive(Debug)]
pub struct Receive {
    pub channel: Key,
    pub number: u64,
    pub from: Option<usize>,
    pub tag: u32,
    pub message: Option<Envelope>,
}

#[derive(Debug, Default)]
pub struct Inbox {
    pub desk: Mutex<Desk>,
    /// Notified when an envelope arrives, and when a rank exits or the world fails.
    pub bell: Condvar,
}

#[derive(Debug, Default)]
pub struct Desk {
    /// In the order in which they arrived.
    envelopes: Vec<Envelope>,
    /// In the order in which they were posted.
    receives: Vec<Receive>,
}

/// The result of a look into an inbox.
pub enum Seen<T> {
    There(T),
    /// Envelopes of these global ranks are missing.
    Awaited(Vec<usize>),
    Wrong(CommError),
}

impl Envelope {
    /// Returns true if the envelope can have been sent on its channel, as must be checked for one
    /// of another process.
    pub fn fits(&self, size: usize) -> bool {
        let ranks = &self.channel.0;
        self.from < ranks.len()
            && ranks.iter().all(|rank| *rank < size)
            && self.signature.fits(ranks.len())
    }

    fn is(&self, channel: &Key, number: u64) -> bool {
        self.about == About::Call(number) && self.channel == *channel
    }
}

impl Desk {
    pub fn put(&mut self, envelope: Envelope) {
        self.envelopes.push(envelope);
        self.sort();
    }

    pub fn receive(&mut self, receive: Receive) {
        self.receives.push(receive);
        self.sort();
    }

    /// Gives every receive the first message that it accepts, in the order in which the receives
    /// were posted.
    fn sort(&mut self) {
        for receive in self
            .receives
            .iter_mut()
            .filter(|receive| receive.message.is_none())
        {
            let at = self
                .envelopes
                .iter()
                .position(|envelope| receive.takes(envelope));
            receive.message = at.map(|at| self.envelopes.remove(at));
        }
    }

    /// Returns the envelopes of a collective that have arrived.
    pub fn of_call<'a>(
        &'a self,
        channel: &'a Key,
        number: u64,
    ) -> impl Iterator<Item = &'a Envelope> {
        self.envelopes
            .iter()
            .filter(move |envelope| envelope.is(channel, number))
    }

    pub fn take_call(&mut self, channel: &Key, number: u64) -> Vec<Envelope> {
        self.envelopes
            .extract_if(.., |envelope| envelope.is(channel, number))
            .collect()
    }

    pub fn has_message(&self, channel: &Key, number: u64) -> bool {
        self.receives
            .iter()
            .any(|receive| receive.is(channel, number) && receive.message.is_some())
    }

    /// Removes a receive whose message has arrived, and returns the message.
    pub fn take_message(&mut self, channel: &Key, number: u64) -> Option<Envelope> {
        let at = self
            .receives
            .iter()
            .position(|receive| receive.is(channel, number) && receive.message.is_some())?;
        self.receives.remove(at).message
    }
}

impl Receive {
    fn is(&self, channel: &Key, number: u64) -> bool {
        self.number == number && self.channel == *channel
    }

    fn takes(&self, envelope: &Envelope) -> bool {
        envelope.about == About::Message(self.tag)
            && envelope.channel == self.channel
            && self.from.is_none_or(|from| from == envelope.from)
    }
}
