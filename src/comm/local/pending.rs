//! [`Joined`]: a collective that a thread rank has joined.

use std::sync::Arc;
use std::time::Duration;

use super::LocalEngine;
use super::board::Ticket;
use super::data::Deposit;
use super::rendezvous::Met;
use crate::comm::CommError;
use crate::comm::engine::{Pending, Waited};

/// A place in a collective; gives it up when dropped.
pub(super) struct Seat {
    engine: Arc<LocalEngine>,
    ticket: Option<Ticket>,
}

impl Seat {
    pub fn new(engine: Arc<LocalEngine>, ticket: Ticket) -> Self {
        Self { engine, ticket: Some(ticket) }
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
        let Met { parts, last } = seat.engine.rendezvous.wait(ticket, deadline)?;
        Ok(Waited { last: Some(last), ..Waited::timed(|| finish(&parts)) })
    }
}
