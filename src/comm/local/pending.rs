//! The two kinds of [`Work`](crate::comm::Work) of a thread rank.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::LocalWorld;
use super::board::Ticket;
use super::data::Deposit;
use crate::comm::{Call, CommError, Ledger, Op, Pending};

/// A result that is there already.
pub(super) struct Ready<T>(pub Result<T, CommError>);

impl<T: Send> Pending<T> for Ready<T> {
    fn is_complete(&self) -> bool {
        true
    }

    fn wait(self: Box<Self>) -> Result<T, CommError> {
        self.0
    }
}

/// A place in a collective; gives it up when dropped.
pub(super) struct Seat {
    pub world: Arc<LocalWorld>,
    pub ticket: Option<Ticket>,
}

impl Seat {
    fn take(&mut self) -> Ticket {
        self.ticket.take().expect("a seat is left once")
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        if let Some(ticket) = self.ticket.take() {
            self.world.rendezvous.release(ticket);
        }
    }
}

/// What the ledger counts for a collective.
pub(super) struct Charge {
    pub op: Op,
    pub ranks: usize,
    pub bytes: u64,
    pub call: Call,
}

impl Charge {
    pub fn record(&self, ledger: &Ledger) {
        ledger.record(self.op, self.ranks, self.bytes, &self.call);
    }
}

/// A collective that this rank has joined, and how it makes its result from the deposits.
pub(super) struct Joined<F> {
    pub seat: Seat,
    /// Global rank.
    pub rank: usize,
    pub deadline: Duration,
    pub ledger: Arc<Ledger>,
    pub charge: Charge,
    pub finish: F,
}

impl<T, F> Pending<T> for Joined<F>
where
    F: FnOnce(&[Deposit]) -> T + Send,
{
    fn is_complete(&self) -> bool {
        self.seat.ticket.is_none_or(|ticket| self.seat.world.rendezvous.is_complete(ticket))
    }

    fn wait(mut self: Box<Self>) -> Result<T, CommError> {
        let world = self.seat.world.clone();
        world.check_thread(self.rank, self.charge.op, &self.charge.call)?;
        if self.charge.call.ahead {
            self.charge.record(&self.ledger);
        }
        let start = Instant::now();
        let deposits = world.rendezvous.wait(self.seat.take(), self.deadline)?;
        let met = Instant::now();
        let value = (self.finish)(&deposits);
        self.ledger.spend(met - start, met.elapsed());
        Ok(value)
    }
}
