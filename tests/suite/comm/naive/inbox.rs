//! [`Inbox`]: what has come for one rank.

use std::sync::Arc;

use burn::tensor::TensorData;
use burn_dtensor::comm::CommError;
use burn_dtensor::comm::backend::CallSignature;
use parking_lot::{Condvar, Mutex};

/// A group's ranks, and the channel's name.
pub type Key = (Arc<[usize]>, &'static str);

/// What one rank sends another.
#[derive(Debug)]
pub struct Envelope {
    pub channel: Key,
    pub about: About,
    /// The sender's place in the group.
    pub from: usize,
    pub print: Arc<CallSignature>,
    pub tensors: Vec<TensorData>,
}

/// What an envelope belongs to.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum About {
    /// The collective of this number.
    Call(u64),
    /// A message, with its tag.
    Message(u32),
}

/// A receive, whose message may have come.
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
    /// Rung when something has come.
    pub bell: Condvar,
}

#[derive(Debug, Default)]
pub struct Desk {
    /// In the order in which they came.
    envelopes: Vec<Envelope>,
    /// In the order in which they were posted.
    receives: Vec<Receive>,
}

/// What a rank finds that looks for something.
pub enum Seen<T> {
    There(T),
    /// Of these global ranks.
    Awaited(Vec<usize>),
    Wrong(CommError),
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

    /// Every receive gets the first message that it takes, the first receive first.
    fn sort(&mut self) {
        for receive in self.receives.iter_mut().filter(|receive| receive.message.is_none()) {
            let at = self.envelopes.iter().position(|envelope| receive.takes(envelope));
            receive.message = at.map(|at| self.envelopes.remove(at));
        }
    }

    /// What has come of a collective.
    pub fn of_call<'a>(&'a self, channel: &'a Key, number: u64) -> impl Iterator<Item = &'a Envelope> {
        self.envelopes.iter().filter(move |envelope| envelope.is(channel, number))
    }

    pub fn take_call(&mut self, channel: &Key, number: u64) -> Vec<Envelope> {
        self.envelopes.extract_if(.., |envelope| envelope.is(channel, number)).collect()
    }

    pub fn has_message(&self, channel: &Key, number: u64) -> bool {
        self.receives.iter().any(|receive| receive.is(channel, number) && receive.message.is_some())
    }

    /// The message of a receive, which is gone then.
    pub fn take_message(&mut self, channel: &Key, number: u64) -> Option<Envelope> {
        let at = self.receives.iter().position(|receive| receive.is(channel, number) && receive.message.is_some())?;
        self.receives.remove(at).message
    }
}

impl Envelope {
    fn is(&self, channel: &Key, number: u64) -> bool {
        self.about == About::Call(number) && self.channel == *channel
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
