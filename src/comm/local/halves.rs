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
//! are called at once; between them no rank need wait: the first half is left [`Open`].

use std::sync::Arc;
use std::time::{Duration, Instant};

use burn::tensor::Device;

use super::LocalEngine;
use super::board::Ticket;
use super::data::{Deposit, Exchange};
use super::open::{Left, Open};
use super::outlet::Outlet;
use super::rendezvous::Met;
use crate::comm::courier::Taken;
use crate::comm::engine::{Pending, TensorPrint, Waited};
use crate::comm::process::layout::Layout;
use crate::comm::{Carried, CommError, ReduceOp};
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
    pub engine: Arc<LocalEngine>,
    pub ticket: Ticket,
    /// The second half, to which the rank owes its part.
    pub second: Ticket,
    pub outlet: Arc<Outlet>,
    /// Noted when other processes are told.
    pub taken: Taken,
    pub op: ReduceOp,
    /// The tensors as rows of all elements, cut over the ranks.
    pub wholes: Arc<[TensorPrint]>,
    pub device: Device,
}

impl Pending<()> for First {
    fn is_complete(&self) -> bool {
        self.engine.rendezvous.is_complete(self.ticket)
    }

    /// Waits for the other ranks' parts of the first half, and brings this rank's to the second.
    fn wait(self: Box<Self>, deadline: Duration) -> Result<Waited<()>, CommError> {
        let Self { engine, ticket, second, outlet, taken, op, wholes, device } = *self;
        let Met { parts, last } = engine.rendezvous.wait(ticket, deadline)?;
        let reduced = Waited::timed(|| {
            let exchange = Exchange { deposits: &parts, member: ticket.member, device: &device, wholes: None };
            let cuts = wholes.iter().map(|print| Cut::Chunks(print.shape.num_elements()));
            let reduced = cuts.enumerate().map(|(index, cut)| exchange.reduce_part(index, 0, &cut, op));
            let deposit = Deposit::new(reduced.collect());
            outlet.bring(second.seq, &deposit);
            // While the others' parts are on their way.
            let layouts = || Layout::of_wholes(&wholes, parts.len());
            let bytes = wholes.iter().map(TensorPrint::bytes).sum();
            let there = outlet.lands(bytes).then(|| engine.wholes(second, layouts)).flatten();
            let deposit = match there {
                Some(there) => deposit.put(second.member, there),
                None => deposit,
            };
            engine.fill_and_finish(second, deposit.there(None));
        });
        Ok(Waited { last: Some(last), carried: Deposit::carried(&parts, Some(&taken)), ..reduced })
    }
}

/// An all-reduce that this rank has joined.
pub(super) struct Halves<T> {
    /// Given up by nobody: the others need it.
    pub first: Arc<Open<()>>,
    pub second: Left<T>,
}

impl<T: Send> Pending<T> for Halves<T> {
    fn is_complete(&self) -> bool {
        self.second.is_complete()
    }

    fn wait(self: Box<Self>, deadline: Duration) -> Result<Waited<T>, CommError> {
        let start = Instant::now();
        // Both at once: what completes the second half then wakes nobody else for it.
        let own = self.second.0.take();
        let first = self.first.wait(deadline)?;
        let second = match own {
            Some(second) => second.wait(deadline.saturating_sub(start.elapsed()))?,
            None => self.second.0.taken_by_hands()?,
        };
        let carried = |(first, second): (Carried, Carried)| Carried { complete: second.complete, ..first };
        let carried = first.carried.zip(second.carried).map(carried);
        Ok(Waited { moving: first.moving + second.moving, last: first.last, carried, ..second })
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
