//! An all-reduce among processes, in two halves: every rank reduces its part for all, and the parts are gathered.
//!
//! ```text
//! rank 0, in process 0            rank 1, in process 1
//! tensor  a b        --b-->       tensor  c d             the parts of others go to them
//!         a+c        <-c--                b+d             each rank reduces its own part
//!         a+c b+d    <-b+d--  --a+c-->    a+c b+d         which goes to all
//! ```
//!
//! A process sends less than twice its tensors, however many there are, where whole tensors would go to each. Both halves
//! are called at once; between them no rank need wait: a first half that is complete while its rank does something else is
//! seen to by the engine's own [`Hands`](super::hands::Hands).

use std::sync::Arc;
use std::time::{Duration, Instant};

use burn::tensor::Device;
use parking_lot::Mutex;

use super::LocalEngine;
use super::board::{GroupKey, Ticket};
use super::data::{Deposit, Exchange};
use super::hands::Owed;
use super::outlet::Outlet;
use super::rendezvous::Met;
use crate::comm::engine::{Pending, Waited};
use crate::comm::{CommError, ReduceOp};
use crate::placement::Cut;

/// What is copied in the time that a second message takes, in bytes.
const MESSAGE: u64 = 1 << 20;

/// Whether an all-reduce of so many `bytes`, of `ranks` ranks in `processes` processes, takes less time in halves: as what
/// a process sends and adds less shows.
pub(super) fn pay(bytes: u64, ranks: usize, processes: usize) -> bool {
    let (bytes, n, p) = (u128::from(bytes), ranks as u128, processes as u128);
    // Of whole tensors a process sends `n / p` to each other; in halves, a part of `1 / n` of these for each rank there,
    // and of its own sums. It adds half as much or less.
    let less_sent = bytes * (p - 1) * (n * p - n - p) / (p * p);
    less_sent + bytes / 2 > u128::from(MESSAGE)
}

/// A rank's first half, until its part is reduced.
#[derive(Debug)]
pub(super) struct First {
    pub ticket: Ticket,
    /// The second half, to which the rank owes its part.
    pub second: Ticket,
    pub outlet: Arc<Outlet>,
    pub op: ReduceOp,
    /// Elements of the tensors.
    pub lengths: Vec<usize>,
    pub device: Device,
}

/// A first half that somebody is to see to: who takes it does.
#[derive(Debug)]
pub(super) struct Open {
    group: GroupKey,
    member: usize,
    first: Mutex<Option<First>>,
}

impl Open {
    pub fn new(first: First) -> Arc<Self> {
        let Ticket { group, member, .. } = first.ticket;
        Arc::new(Self { group, member, first: Mutex::new(Some(first)) })
    }

    fn take(&self) -> Option<First> {
        self.first.lock().take()
    }

    /// Whether all ranks' parts of it are there, and nobody has taken it.
    pub fn is_complete(&self, engine: &LocalEngine) -> bool {
        // As long as nobody has, the ticket is valid.
        self.first.lock().as_ref().is_some_and(|first| engine.rendezvous.is_complete(first.ticket))
    }
}

impl First {
    /// Waits for the other ranks' parts of the first half, and brings this rank's to the second.
    fn see_to(self, engine: &LocalEngine, deadline: Duration) -> Result<Waited<()>, CommError> {
        let Self { ticket, second, outlet, op, lengths, device } = self;
        let Met { parts, last } = engine.rendezvous.wait(ticket, deadline)?;
        let reduced = Waited::timed(|| {
            let exchange = Exchange { deposits: &parts, member: ticket.member, device: &device };
            let reduced = |(index, len): (usize, &usize)| exchange.reduce_part(index, 0, &Cut::Chunks(*len), op);
            let deposit = Deposit::new(lengths.iter().enumerate().map(reduced).collect());
            outlet.bring(second.seq, &deposit);
            engine.rendezvous.fill(second, deposit);
        });
        Ok(Waited { last: Some(last), ..reduced })
    }
}

impl Owed for Open {
    fn rank(&self, engine: &LocalEngine) -> usize {
        engine.rendezvous.ranks(self.group)[self.member]
    }

    fn is_open(&self) -> bool {
        self.first.lock().is_some()
    }

    fn bring(&self, engine: &LocalEngine) {
        // What fails is the launch, of which all are told.
        self.take().map(|first| first.see_to(engine, Duration::ZERO));
    }
}

/// An all-reduce that this rank has joined.
pub(super) struct Halves<T> {
    pub first: Arc<Open>,
    pub engine: Arc<LocalEngine>,
    pub second: Box<dyn Pending<T>>,
}

impl<T> Pending<T> for Halves<T> {
    fn is_complete(&self) -> bool {
        self.second.is_complete()
    }

    fn wait(self: Box<Self>, deadline: Duration) -> Result<Waited<T>, CommError> {
        let start = Instant::now();
        let first = self.first.take().map(|first| first.see_to(&self.engine, deadline)).transpose()?;
        let second = self.second.wait(deadline.saturating_sub(start.elapsed()))?;
        Ok(match first {
            Some(first) => Waited { moving: first.moving + second.moving, last: first.last, ..second },
            None => second,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::pay;

    const KIB: u64 = 1 << 10;

    #[test]
    fn halves_pay_for_large_tensors_and_many_processes() {
        let least = |ranks, processes| (1..1 << 14).find(|kib| pay(kib * KIB, ranks, processes));
        assert_eq!(least(2, 2), Some(2049));
        assert_eq!(least(4, 2), Some(1025));
        assert_eq!(least(4, 4), Some(513));
        assert_eq!(least(64, 64), Some(17));
        assert!(pay(1 << 44, 1 << 20, 1 << 20));
    }
}
