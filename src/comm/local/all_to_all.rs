//! How a rank calls an all-to-all of rows among ranks that have memory in common: each takes some for its result, and the
//! others put there what they have for it, in one copy.
//!
//! ```text
//! rank 0, in process 0                  rank 1, in process 1
//! takes memory       ---where--->
//!                    <---where---       takes memory
//! puts rows into 1's                    puts rows into 0's
//!                    ----put---->
//! puts its own       <---put-----       puts its own
//! ```
//!
//! It is two collectives, as an all-gather [in common](super::in_common) is. Of a pair both know how many bytes go from one to
//! the other, and so decide alike: fewer than are [`WORTH`] it are sent with the first. A rank that neither gives
//! nor takes more has its result by then; to the second it brings nothing, at once.

use std::slice;
use std::sync::Arc;
use std::time::{Duration, Instant};

use burn::backend::{DispatchTensor, TensorMetadata};

use super::LocalEngine;
use super::board::Ticket;
use super::channel::LocalChannel;
use super::data::{Deposit, Exchange};
use super::halves::Halves;
use super::in_common;
use super::open::{Left, Open};
use super::outlet::{Outlet, When};
use super::pending::{Joined, Seat};
use super::rendezvous::Met;
use crate::comm::courier::Taken;
use crate::comm::engine::{Pending, Post, Posted, Print, Waited};
use crate::comm::process::header::InCommon;
use crate::comm::process::layout::Layout;
use crate::comm::process::wholes::Wholes;
use crate::comm::{Carried, CommError};

/// Fewer bytes are sent before it is said where they belong.
const WORTH: usize = 1 << 20;

/// Whether so many bytes are put where they are wanted, and not sent.
fn are_put(bytes: usize) -> bool {
    bytes >= WORTH
}

/// What a rank has for every member of its group, itself too.
#[derive(Debug, Clone)]
struct Given(Arc<[DispatchTensor]>);

impl Given {
    /// The part for another member, if it is [put](are_put) there.
    fn put(&self, member: usize) -> Option<&DispatchTensor> {
        Some(&self.0[member]).filter(|part| are_put(part.shape().num_elements() * part.dtype().size()))
    }

    /// The same, if it is sent.
    fn sent(&self, member: usize) -> Option<&DispatchTensor> {
        self.put(member).is_none().then(|| &self.0[member])
    }
}

/// Gives the others their parts, once all have said where.
struct Giving {
    seat: Seat,
    second: Ticket,
    outlet: Arc<Outlet>,
    /// Where the second half is called.
    later: Arc<Outlet>,
    /// Noted when other processes are told of the first.
    taken: Taken,
    given: Given,
    /// This rank's result.
    wholes: Arc<Wholes>,
}

impl Pending<()> for Giving {
    fn is_complete(&self) -> bool {
        self.seat.is_complete()
    }

    fn wait(self: Box<Self>, deadline: Duration) -> Result<Waited<()>, CommError> {
        let Self { mut seat, second, outlet, later, taken, given, wholes } = *self;
        let (ticket, engine) = (seat.take(), &seat.engine);
        let Met { parts: said, last } = engine.rendezvous.wait(ticket, deadline)?;
        let me = ticket.member;
        let place = |(member, deposit): (usize, &Deposit)| {
            let part = given.put(member).filter(|_| member != me);
            part.map_or(Ok(None), |part| Place::find(engine, &outlet, Ticket { member, ..ticket }, deposit, part))
        };
        let places = said.iter().enumerate().map(place).collect::<Result<Vec<_>, _>>()?;
        // What was said has moved little.
        let begun = Instant::now();
        let put = Waited::timed(|| {
            for (place, part) in places.iter().zip(&given.0[..]) {
                place.iter().for_each(|place| place.put(part, || engine.carry()));
            }
            // To who has no memory in common they are sent.
            let sent = |member: usize| (given.put(member).filter(|_| places[member].is_none()), None);
            later.bring(second.seq, later.to_each(sent));
            engine.carry();
            // SAFETY: it is here, and nobody else has it.
            unsafe { wholes.put(me, slice::from_ref(&given.0[me]), || engine.carry()) };
            land(&wholes, &said, me);
            engine.fill_and_finish(second, Deposit::of_wholes(wholes).there(None));
        });
        let carried = Deposit::carried(&said, Some(&taken)).map(|carried| Carried { begun, ..carried });
        Ok(Waited { last: Some(last), carried, ..put })
    }
}

/// Has what was sent to `member`, with one of the halves, be in its result.
fn land(wholes: &Wholes, deposits: &[Deposit], member: usize) {
    for (from, deposit) in deposits.iter().enumerate().filter(|(from, _)| *from != member) {
        let parts = deposit.parts_for(member);
        if !parts.is_empty() {
            // SAFETY: who has sent it does not put it there, nor did it land, and each half is looked through once.
            unsafe { wholes.put(from, parts, || ()) };
        }
    }
}

/// Where another rank has this one's part of its result.
struct Place(Arc<Wholes>);

impl Place {
    /// What the member of `ticket` has said of it.
    fn find(
        engine: &LocalEngine,
        outlet: &Outlet,
        ticket: Ticket,
        said: &Deposit,
        part: &DispatchTensor,
    ) -> Result<Option<Self>, CommError> {
        let Some(InCommon::Place { address, bytes, start }) = said.common else { return Ok(None) };
        let common = in_common::map(engine, outlet, ticket, address, bytes)?;
        let (dtype, count) = (part.dtype(), part.shape().num_elements());
        let [before, all] = [start, bytes].map(|bytes| bytes / dtype.size());
        // Of three: what comes before, the part, and the rest.
        let layout = Layout::of_row(all, dtype, [before, count, all - before - count]);
        Ok(Some(Self(Wholes::in_common(vec![layout], common))))
    }

    fn put(&self, part: &DispatchTensor, meanwhile: impl Fn()) {
        // SAFETY: it is this rank's alone to write, and it was told of it for that.
        unsafe { self.0.put(1, slice::from_ref(part), meanwhile) }
    }
}

impl LocalChannel {
    /// [`exchange_rows`](crate::comm::engine::Channel::exchange_rows) of the `deposit`, which is of `tensor`, where the ranks of
    /// the group may have memory in common.
    pub(super) fn exchange_in_common(
        &self,
        outlet: &Arc<Outlet>,
        post: Post,
        deposit: Deposit,
        tensor: &DispatchTensor,
        taken: &[usize],
    ) -> Posted<DispatchTensor> {
        let (engine, rendezvous) = (&self.engine, &self.engine.rendezvous);
        let (me, ranks) = (self.member.group.rank(), self.member.group.size());
        let mut shape = tensor.shape();
        shape[0] = taken.iter().sum();
        let layout = Layout::new(shape, tensor.dtype(), 0, taken.iter().copied()).expect("rows are in one piece");
        let given = Given((0..ranks).map(|member| deposit.parts_for(member)[0].clone()).collect());
        let others = (0..ranks).filter(|member| *member != me);
        let givers = others.clone().filter(|member| are_put(layout.bytes(*member))).count() as u32;
        // What else is agreed on is by the first half.
        let agreed = Print { pairs: None, names: None, whole: None, terms: None, digests: None, ..post.print.clone() };

        let mut second = self.second.lock();
        let (key, later) = second.get_or_insert_with(|| self.second_halves());
        if givers == 0 && others.clone().all(|member| given.put(member).is_none()) {
            let joined = self.exchange_by_sending(post, deposit, tensor, taken)?;
            let nothing = Deposit::new(Vec::new()).there(None);
            let join = |print| rendezvous.join(*key, me, print, nothing);
            let (second, _) = later.joined(agreed, later.nothing(), When::Now, join)?;
            rendezvous.release(second);
            return Ok(joined);
        }

        self.note(&deposit);
        let device = self.member.home(&deposit.tensors);
        let bytes = Wholes::bytes_in_common(slice::from_ref(&layout));
        let common = (givers > 0).then(|| outlet.commons().take(bytes, 1 + givers)).flatten();
        let place = |member: usize| {
            let common = common.as_ref().filter(|_| are_put(layout.bytes(member)))?;
            Some(InCommon::Place { address: common.address(), bytes, start: layout.edges[member] })
        };
        let shares = outlet.to_each(|member| (given.sent(member), place(member)));
        let said = Deposit::new(Vec::new()).there(None);
        let join = |print| rendezvous.join(self.key, me, print, said);
        let (first, taken) = outlet.joined(post.print, shares, When::Now, join)?;
        engine.ask(rendezvous.want(first));

        let join = |print| rendezvous.join_late(*key, me, print);
        let joined = later.joined(agreed, later.nothing(), When::Later, join);
        let (second, _) = joined.inspect_err(|_| rendezvous.release(first))?;
        let wholes = match common {
            Some(common) => Wholes::in_common(vec![layout], common),
            None => {
                let wholes = Wholes::new(vec![layout], &engine.others().memory);
                engine.place(second, &wholes);
                wholes
            }
        };
        let finish = {
            let wholes = wholes.clone();
            move |exchange: &Exchange| {
                land(&wholes, exchange.deposits, exchange.ticket.member);
                // SAFETY: all parts have been put there, or were sent, and have landed.
                unsafe { wholes.take(exchange.device) }
            }
        };
        let seat = |ticket| Seat::new(engine.clone(), ticket, false);
        let exchanged = Joined { seat: seat(second), own: None, taken: None, device, finish };
        let seconds = vec![Left(Open::new(self.member.rank(), Box::new(exchanged)))];
        let (outlet, later) = (outlet.clone(), later.clone());
        let giving = Giving { seat: seat(first), second, outlet, later, taken, given, wholes };
        let firsts = vec![engine.leave_open(first, Box::new(giving))];
        let finish = |mut wholes: Vec<Vec<DispatchTensor>>| wholes.remove(0).remove(0);
        Ok(Box::new(Halves { ahead: None, firsts, seconds, finish }))
    }
}
