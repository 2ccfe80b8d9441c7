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
//! are called at once; between them no rank need wait: whoever finds a first half complete, if nobody waits for it, has
//! its part reduced by a thread of the process's own.

use std::sync::Arc;
use std::time::{Duration, Instant};

use burn::backend::{DispatchTensor, TensorMetadata};
use burn::tensor::{Device, Shape};
use parking_lot::Mutex;

use super::LocalEngine;
use super::board::Ticket;
use super::channel::LocalChannel;
use super::data::{Deposit, Exchange};
use super::outlet::{Outlet, Share, When};
use super::pending::{Joined, Seat};
use super::rendezvous::Met;
use crate::comm::engine::{CutPrint, Pending, Post, Posted, Print, TensorPrint, Waited, reshaped};
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
pub(super) type Open = Arc<Mutex<Option<First>>>;

impl LocalChannel {
    /// [`all_reduce`](crate::comm::engine::Channel::all_reduce) in a group of several processes.
    pub(super) fn all_reduce_in_halves(
        &self,
        outlet: &Outlet,
        post: Post,
        tensors: Vec<DispatchTensor>,
        op: ReduceOp,
    ) -> Posted<Vec<DispatchTensor>> {
        let shapes: Vec<_> = tensors.iter().map(DispatchTensor::shape).collect();
        let lengths: Vec<_> = shapes.iter().map(Shape::num_elements).collect();
        let cuts: Vec<_> = lengths.iter().map(|len| (0, Cut::Chunks(*len))).collect();
        let rows = tensors.into_iter().zip(&lengths).map(|(tensor, len)| reshaped(tensor, Shape::from([*len])));
        let deposit = Deposit::new(rows.collect());
        self.note(&deposit);
        let part = |(tensor, (dim, cut)): (&DispatchTensor, &(usize, Cut))| {
            let (shape, dtype) = (tensor.shape(), tensor.dtype());
            TensorPrint { shape, dtype, cut: Some(CutPrint::new(*dim, cut)), to: None }
        };
        let parts: Vec<_> = deposit.tensors.iter().zip(&cuts).map(part).collect();
        let print = Print { tensors: parts.into(), ..post.print.clone() };
        let shares = outlet.shares(&deposit, Share::Parts(&cuts));

        let (member, rendezvous) = (self.member.group.rank(), &self.engine.rendezvous);
        let (ticket, second, second_outlet) = {
            // Both at once: the n-th first half belongs to the n-th second one.
            let mut second = self.second.lock();
            let (key, second_outlet) = second.get_or_insert_with(|| self.second_halves());
            let ticket = outlet
                .joined(post.print, shares, When::Now, |print| rendezvous.join(self.key, member, print, deposit))?;
            let nothing = second_outlet.nothing();
            let joined =
                second_outlet.joined(print, nothing, When::Later, |print| rendezvous.join_late(*key, member, print))?;
            (ticket, joined, second_outlet.clone())
        };
        for ticket in [ticket, second] {
            self.engine.ask(rendezvous.want(ticket));
        }

        let device = self.member.device.clone();
        let first = First { ticket, second, outlet: second_outlet, op, lengths, device: device.clone() };
        let first = self.engine.open(first);
        let finish = move |deposits: &[Deposit]| {
            let wholes = Exchange { deposits, member, device: &device }.joined(shapes.len());
            wholes.into_iter().zip(shapes).map(|(whole, shape)| reshaped(whole, shape)).collect()
        };
        let second = Joined { seat: Seat::new(self.engine.clone(), second, false), finish };
        Ok(Box::new(Halves { first, engine: self.engine.clone(), second: Box::new(second) }))
    }
}

impl First {
    /// Waits for the other ranks' parts of the first half, and brings this rank's to the second.
    fn see_to(self, engine: &LocalEngine, deadline: Duration) -> Result<(), CommError> {
        let Self { ticket, second, outlet, op, lengths, device } = self;
        let Met { parts, .. } = engine.rendezvous.wait(ticket, deadline)?;
        let exchange = Exchange { deposits: &parts, member: ticket.member, device: &device };
        let reduced = |(index, len): (usize, &usize)| exchange.reduce_part(index, 0, &Cut::Chunks(*len), op);
        let deposit = Deposit::new(lengths.iter().enumerate().map(reduced).collect());
        outlet.bring(second.seq, &deposit);
        engine.rendezvous.fill(second, deposit);
        Ok(())
    }
}

impl LocalEngine {
    /// Keeps a first half until it is complete, or waited for.
    fn open(&self, first: First) -> Open {
        let others = self.others.as_ref().expect("there are halves among processes");
        let (ticket, open) = (first.ticket, Arc::new(Mutex::new(Some(first))));
        others.keep_half((ticket.group, ticket.seq), open.clone());
        // The ticket is valid as long as nobody has taken it.
        let taken = open.lock();
        let is_complete = taken.is_some() && self.rendezvous.is_complete(ticket);
        drop(taken);
        if is_complete {
            self.reduce_for(ticket);
        }
        open
    }

    /// Has the parts reduced that ranks here owe, now that the first half is complete.
    pub(super) fn reduce_for(&self, first: Ticket) {
        let Some(others) = &self.others else { return };
        let opens = others.take_halves((first.group, first.seq));
        let firsts: Vec<_> = opens.into_iter().filter_map(|open| open.lock().take()).collect();
        if firsts.is_empty() {
            return;
        }
        let engine = self.this.upgrade().expect("whoever calls has it");
        // Neither the rank's thread, which goes on, nor the courier's, which carries.
        std::thread::spawn(move || {
            // What fails is the launch, of which all are told.
            firsts.into_iter().for_each(|first| _ = first.see_to(&engine, Duration::ZERO));
        });
    }
}

/// An all-reduce that this rank has joined.
pub(super) struct Halves<T> {
    pub first: Open,
    pub engine: Arc<LocalEngine>,
    pub second: Box<dyn Pending<T>>,
}

impl<T> Pending<T> for Halves<T> {
    fn is_complete(&self) -> bool {
        self.second.is_complete()
    }

    fn wait(self: Box<Self>, deadline: Duration) -> Result<Waited<T>, CommError> {
        let start = Instant::now();
        let first = self.first.lock().take();
        if let Some(first) = first {
            first.see_to(&self.engine, deadline)?;
        }
        self.second.wait(deadline.saturating_sub(start.elapsed()))
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
