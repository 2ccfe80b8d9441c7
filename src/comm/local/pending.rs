//! What a thread rank waits for: a collective that it has [`Joined`], a message that is [`Awaited`].

use std::sync::Arc;
use std::time::Duration;

use super::LocalEngine;
use super::board::{Claim, Ticket};
use super::data::{Deposit, Exchange};
use super::rendezvous::Met;
use crate::comm::CommError;
use crate::comm::engine::{Member, Message, Pending, Waited};

/// A place in a collective; gives it up when dropped.
pub(super) struct Seat {
    engine: Arc<LocalEngine>,
    ticket: Option<Ticket>,
    /// What ranks of other processes have is not asked for yet.
    ahead: bool,
}

impl Seat {
    pub fn new(engine: Arc<LocalEngine>, ticket: Ticket, ahead: bool) -> Self {
        Self { engine, ticket: Some(ticket), ahead }
    }

    fn take(&mut self) -> Ticket {
        self.ticket.take().expect("a seat is left once")
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        if let Some(ticket) = self.ticket.take() {
            self.engine.rendezvous.release(ticket);
        }
    }
}

/// A collective that this rank has joined, and how it makes its result from the deposits.
pub(super) struct Joined<F> {
    pub seat: Seat,
    pub finish: F,
}

impl<T, F> Pending<T> for Joined<F>
where
    F: FnOnce(&[Deposit]) -> T + Send,
{
    fn is_complete(&self) -> bool {
        self.seat.ticket.is_none_or(|ticket| self.seat.engine.rendezvous.is_complete(ticket))
    }

    fn wait(self: Box<Self>, deadline: Duration) -> Result<Waited<T>, CommError> {
        let Self { mut seat, finish } = *self;
        let ticket = seat.take();
        if seat.ahead {
            seat.engine.ask(seat.engine.rendezvous.want_and_next(ticket));
        }
        let Met { parts, last } = seat.engine.rendezvous.wait(ticket, deadline)?;
        Ok(Waited { last: Some(last), ..Waited::timed(|| finish(&parts)) })
    }
}

/// A message that is on its way: the engine has it.
pub(super) struct Sent;

impl Pending<()> for Sent {
    fn is_complete(&self) -> bool {
        true
    }

    fn wait(self: Box<Self>, _deadline: Duration) -> Result<Waited<()>, CommError> {
        Ok(Waited::timed(|| ()))
    }
}

/// A message that this rank receives; gives it up when dropped.
pub(super) struct Awaited {
    engine: Arc<LocalEngine>,
    claim: Option<Claim>,
    member: Member,
}

impl Awaited {
    pub fn new(engine: Arc<LocalEngine>, claim: Claim, member: Member) -> Self {
        Self { engine, claim: Some(claim), member }
    }
}

impl Pending<Message> for Awaited {
    fn is_complete(&self) -> bool {
        self.claim.is_none_or(|claim| self.engine.rendezvous.has_arrived(claim))
    }

    fn wait(mut self: Box<Self>, deadline: Duration) -> Result<Waited<Message>, CommError> {
        let claim = self.claim.take().expect("a message is waited for once");
        let letter = self.engine.rendezvous.wait_for_message(claim, deadline)?;
        let received = Waited::timed(|| {
            let deposits = std::slice::from_ref(&letter.part);
            let exchange = Exchange { deposits, member: 0, device: &self.member.device };
            Message { from: letter.from, tensors: exchange.copies(0) }
        });
        Ok(Waited { last: Some(self.member.group.ranks()[letter.from]), ..received })
    }
}

impl Drop for Awaited {
    fn drop(&mut self) {
        if let Some(claim) = self.claim.take() {
            self.engine.rendezvous.give_up(claim);
        }
    }
}
