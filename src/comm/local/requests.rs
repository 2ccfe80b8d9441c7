//! Requests that a thread rank waits for: of collectives ([`CollectiveRequest`]) and of received messages
//! ([`RecvRequest`]).

use std::sync::Arc;
use std::time::Duration;

use burn::backend::DispatchTensor;
use burn::tensor::Device;

use super::HostBackend;
use super::contribution::{CollectiveInputs, Contribution};
use super::match_table::{OpHandle, RecvHandle};
use super::rendezvous::Matched;
use crate::comm::CommError;
use crate::comm::backend::{Completed, GroupMember, ReceivedTensors, Request};
use crate::comm::process::contiguous_layout::ContiguousLayout;
use crate::comm::process::result_buffer::ResultBuffer;
use crate::comm::transport::SendStamp;

/// A place in a collective; gives it up when dropped.
#[derive(Debug)]
pub(super) struct OpHandleGuard {
    pub engine: Arc<HostBackend>,
    ticket: Option<OpHandle>,
    /// What ranks of other processes have is not asked for yet.
    is_deferred: bool,
}

impl OpHandleGuard {
    pub fn new(engine: Arc<HostBackend>, ticket: OpHandle, is_deferred: bool) -> Self {
        Self { engine, ticket: Some(ticket), is_deferred }
    }

    /// The place, which is given up by nobody from now on.
    pub fn take(&mut self) -> OpHandle {
        self.ticket.take().expect("a seat is left once")
    }

    /// Whether all others have brought what is waited for.
    pub fn is_complete(&self) -> bool {
        self.ticket.is_none_or(|ticket| self.engine.rendezvous.is_complete(ticket))
    }
}

impl Drop for OpHandleGuard {
    fn drop(&mut self) {
        if let Some(ticket) = self.ticket.take() {
            self.engine.rendezvous.release(ticket);
        }
    }
}

/// A rank's own parts of [`ResultBuffer`], in which the others' land.
pub(super) struct OwnShards {
    parts: Box<dyn FnOnce() -> Vec<DispatchTensor> + Send>,
    /// Until there are the wholes.
    layouts: Option<Box<dyn FnOnce() -> Option<Vec<ContiguousLayout>> + Send>>,
    result_buffer: Option<Arc<ResultBuffer>>,
}

impl OwnShards {
    /// Of wholes of these layouts, if these are such that there may be some.
    pub fn new(
        parts: impl FnOnce() -> Vec<DispatchTensor> + Send + 'static,
        layouts: impl FnOnce() -> Option<Vec<ContiguousLayout>> + Send + 'static,
    ) -> Self {
        Self { parts: Box::new(parts), layouts: Some(Box::new(layouts)), result_buffer: None }
    }

    /// Has what others send land in the wholes of the collective of `ticket` from now on.
    pub fn await_others(&mut self, engine: &HostBackend, ticket: OpHandle) {
        if let Some(layouts) = self.layouts.take() {
            self.result_buffer = engine.result_buffer(ticket, layouts);
        }
    }

    /// The wholes of the collective of `ticket`, with these parts.
    fn put(mut self, engine: &HostBackend, ticket: OpHandle) -> Option<Arc<ResultBuffer>> {
        self.await_others(engine, ticket);
        let full_tensors = self.result_buffer?;
        // What was just said here is on its way first, and what others send lands meanwhile.
        // SAFETY: they are here, and nobody else has them.
        unsafe { full_tensors.put(ticket.member, &(self.parts)(), || engine.carry()) };
        Some(full_tensors)
    }
}

/// A collective that this rank has joined, and how it makes its result from the deposits, and from the wholes with its
/// own parts.
pub(super) struct CollectiveRequest<F> {
    pub seat: OpHandleGuard,
    pub own: Option<OwnShards>,
    /// Noted when other processes are told, if there are some.
    pub taken: Option<SendStamp>,
    pub device: Device,
    pub finish: F,
}

impl<T, F> Request<T> for CollectiveRequest<F>
where
    F: FnOnce(&CollectiveInputs) -> T + Send,
{
    fn is_complete(&self) -> bool {
        self.seat.is_complete()
    }

    fn start(&mut self) {
        let OpHandleGuard { engine, ticket, is_deferred } = &mut self.seat;
        if let (Some(ticket), true) = (*ticket, *is_deferred) {
            *is_deferred = false;
            engine.ask(engine.rendezvous.want(ticket));
        }
    }

    fn wait(self: Box<Self>, deadline: Duration) -> Result<Completed<T>, CommError> {
        let Self { mut seat, own, taken, device, finish } = *self;
        let ticket = seat.take();
        if seat.is_deferred {
            seat.engine.ask(seat.engine.rendezvous.want_and_next(ticket));
        }
        // While the others' parts are on their way.
        let put = Completed::timed(|| own.and_then(|own| own.put(&seat.engine, ticket)));
        let Matched { parts, last } = seat.engine.rendezvous.wait(ticket, deadline)?;
        let exchange = CollectiveInputs::new(&parts, &seat.engine, ticket, &device);
        let exchange = CollectiveInputs { result_buffer: put.value.as_deref(), ..exchange };
        let finished = Completed::timed(|| finish(&exchange));
        let moving = put.moving + finished.moving.saturating_sub(exchange.waited.get());
        // Where there are no other processes, every rank would look through the deposits of all, for nothing.
        let carried = seat.engine.others.as_ref().and_then(|_| Contribution::carried(&parts, taken.as_ref()));
        Ok(Completed { moving, last: Some(last), carried, ..finished })
    }
}

/// A message that is on its way: the engine has it.
pub(super) struct SendRequest;

impl Request<()> for SendRequest {
    fn is_complete(&self) -> bool {
        true
    }

    fn wait(self: Box<Self>, _deadline: Duration) -> Result<Completed<()>, CommError> {
        Ok(Completed::timed(|| ()))
    }
}

/// A message that this rank receives; gives it up when dropped.
pub(super) struct RecvRequest {
    engine: Arc<HostBackend>,
    claim: Option<RecvHandle>,
    member: GroupMember,
}

impl RecvRequest {
    pub fn new(engine: Arc<HostBackend>, claim: RecvHandle, member: GroupMember) -> Self {
        Self { engine, claim: Some(claim), member }
    }
}

impl Request<ReceivedTensors> for RecvRequest {
    fn is_complete(&self) -> bool {
        self.claim.is_none_or(|claim| self.engine.rendezvous.has_arrived(claim))
    }

    fn wait(mut self: Box<Self>, deadline: Duration) -> Result<Completed<ReceivedTensors>, CommError> {
        let claim = self.claim.take().expect("a message is waited for once");
        let letter = self.engine.rendezvous.wait_for_message(claim, deadline)?;
        let received = Completed::timed(|| {
            let deposits = std::slice::from_ref(&letter.part);
            // As from the root of a group that is the sender alone.
            let root = OpHandle { group: claim.group, member: 0, seq: 0 };
            let exchange = CollectiveInputs::new(deposits, &self.engine, root, &self.member.device);
            ReceivedTensors { from: letter.from, tensors: exchange.of_root(0) }
        });
        // Who receives tells nobody.
        let carried = Contribution::carried(std::slice::from_ref(&letter.part), None);
        Ok(Completed { last: Some(self.member.group.ranks()[letter.from]), carried, ..received })
    }
}

impl Drop for RecvRequest {
    fn drop(&mut self) {
        if let Some(claim) = self.claim.take() {
            self.engine.rendezvous.give_up(claim);
        }
    }
}
