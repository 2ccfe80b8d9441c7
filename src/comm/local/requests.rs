//! Requests that a rank waits for: collectives ([`CollectiveRequest`]), receives ([`RecvRequest`]) and sends
//! ([`SendRequest`]).

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

/// Guard of a collective's handle, which it releases when dropped.
#[derive(Debug)]
pub(super) struct OpHandleGuard {
    pub engine: Arc<HostBackend>,
    ticket: Option<OpHandle>,
    /// True if the contributions of ranks of other processes have not been requested yet.
    is_deferred: bool,
}

impl OpHandleGuard {
    pub fn new(engine: Arc<HostBackend>, ticket: OpHandle, is_deferred: bool) -> Self {
        Self { engine, ticket: Some(ticket), is_deferred }
    }

    /// Takes the handle, which the caller must release.
    pub fn take(&mut self) -> OpHandle {
        self.ticket.take().expect("the handle is taken once")
    }

    /// Returns true if the contributions of all ranks have arrived.
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

/// Shards that a rank writes to its own [`ResultBuffer`], into which remote shards are received.
pub(super) struct OwnShards {
    parts: Box<dyn FnOnce() -> Vec<DispatchTensor> + Send>,
    /// Layouts for the result buffer, until it is created.
    layouts: Option<Box<dyn FnOnce() -> Option<Vec<ContiguousLayout>> + Send>>,
    result_buffer: Option<Arc<ResultBuffer>>,
}

impl OwnShards {
    /// Stores functions that compute the shards and the layouts. `layouts` returns `None` if a result buffer is not
    /// possible.
    pub fn new(
        parts: impl FnOnce() -> Vec<DispatchTensor> + Send + 'static,
        layouts: impl FnOnce() -> Option<Vec<ContiguousLayout>> + Send + 'static,
    ) -> Self {
        Self { parts: Box::new(parts), layouts: Some(Box::new(layouts)), result_buffer: None }
    }

    /// Creates the result buffer of the collective `ticket`, so that remote data is received into it from now on.
    pub fn await_others(&mut self, engine: &HostBackend, ticket: OpHandle) {
        if let Some(layouts) = self.layouts.take() {
            self.result_buffer = engine.result_buffer(ticket, layouts);
        }
    }

    /// Writes these shards to the result buffer of the collective `ticket`, and returns it.
    fn put(mut self, engine: &HostBackend, ticket: OpHandle) -> Option<Arc<ResultBuffer>> {
        self.await_others(engine, ticket);
        let full_tensors = self.result_buffer?;
        // Calls `carry` during the copy, so that messages posted before are sent first and remote data is received
        // meanwhile.
        // SAFETY: the region is in memory, and no other thread uses it.
        unsafe { full_tensors.put(ticket.member, &(self.parts)(), || engine.carry()) };
        Some(full_tensors)
    }
}

/// A collective that this rank has posted. `finish` builds the result from the contributions and from the result
/// buffer with this rank's own shards.
pub(super) struct CollectiveRequest<F> {
    pub seat: OpHandleGuard,
    pub own: Option<OwnShards>,
    /// Records when the call was sent to other processes, if there are any.
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
        // While the remote shards are in flight.
        let put = Completed::timed(|| own.and_then(|own| own.put(&seat.engine, ticket)));
        let Matched { parts, last } = seat.engine.rendezvous.wait(ticket, deadline)?;
        let exchange = CollectiveInputs::new(&parts, &seat.engine, ticket, &device);
        let exchange = CollectiveInputs { result_buffer: put.value.as_deref(), ..exchange };
        let finished = Completed::timed(|| finish(&exchange));
        let moving = put.moving + finished.moving.saturating_sub(exchange.waited.get());
        // Without other processes, every rank would search all contributions for nothing.
        let carried = seat.engine.others.as_ref().and_then(|_| Contribution::carried(&parts, taken.as_ref()));
        Ok(Completed { moving, last: Some(last), carried, ..finished })
    }
}

/// A sent message, which the backend owns. The request is complete at once.
pub(super) struct SendRequest;

impl Request<()> for SendRequest {
    fn is_complete(&self) -> bool {
        true
    }

    fn wait(self: Box<Self>, _deadline: Duration) -> Result<Completed<()>, CommError> {
        Ok(Completed::timed(|| ()))
    }
}

/// A receive that this rank has posted. Dropping it releases the message.
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
        let claim = self.claim.take().expect("the receive handle is taken once");
        let letter = self.engine.rendezvous.wait_for_message(claim, deadline)?;
        let received = Completed::timed(|| {
            let deposits = std::slice::from_ref(&letter.part);
            // Like a broadcast whose root is the sender, in a group of the sender alone.
            let root = OpHandle { group: claim.group, member: 0, seq: 0 };
            let exchange = CollectiveInputs::new(deposits, &self.engine, root, &self.member.device);
            ReceivedTensors { from: letter.from, tensors: exchange.of_root(0) }
        });
        // A receiver sends no message of its own.
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
