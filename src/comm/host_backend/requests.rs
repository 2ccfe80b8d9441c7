//! Requests that a rank waits for: collectives ([`CollectiveRequest`]) and receives ([`RecvRequest`]).

use std::sync::Arc;
use std::time::Duration;

use burn::backend::DispatchTensor;
use burn::tensor::Device;

use super::HostBackend;
use crate::comm::CommError;
use crate::comm::backend::{Completed, GroupMember, ReceivedTensors, Request};
use crate::comm::control::match_table::{OpHandle, RecvHandle, Wait};
use crate::comm::control::rendezvous::Matched;
use crate::comm::data::contiguous_layout::ContiguousLayout;
use crate::comm::data::contribution::Contribution;
use crate::comm::data::inputs::CollectiveInputs;
use crate::comm::data::result_buffer::ResultBuffer;
use crate::comm::transport::SendStamp;

/// Guard of a collective's handle, which it releases when dropped.
pub(super) struct OpHandleGuard {
    pub backend: Arc<HostBackend>,
    handle: Option<OpHandle>,
}

impl OpHandleGuard {
    pub fn new(backend: Arc<HostBackend>, handle: OpHandle) -> Self {
        Self { backend, handle: Some(handle) }
    }

    /// Returns the handle, which was not taken.
    pub fn handle(&self) -> OpHandle {
        self.handle.expect("the handle is not taken")
    }

    /// Takes the handle, which the caller must release.
    pub fn take(&mut self) -> OpHandle {
        self.handle.take().expect("the handle is taken once")
    }

    /// Returns true if the contributions of all ranks have arrived.
    pub fn is_complete(&self) -> bool {
        self.handle.is_none_or(|handle| self.backend.rendezvous.read(|table| table.is_complete(handle)))
    }
}

impl Drop for OpHandleGuard {
    fn drop(&mut self) {
        if let Some(handle) = self.handle.take() {
            self.backend.rendezvous.release(handle);
        }
    }
}

/// Shards that a rank writes to its own [`ResultBuffer`], into which remote shards are received.
pub(super) struct OwnShards {
    tensors: Vec<DispatchTensor>,
    /// Layouts of the result buffer.
    layouts: Vec<ContiguousLayout>,
    buffer: Option<Arc<ResultBuffer>>,
}

impl OwnShards {
    pub fn new(tensors: Vec<DispatchTensor>, layouts: Vec<ContiguousLayout>) -> Self {
        Self { tensors, layouts, buffer: None }
    }

    /// Creates the result buffer of the collective `op`, so that remote data is received into it from now on.
    pub fn create_buffer(&mut self, backend: &HostBackend, op: OpHandle) {
        self.buffer = backend.result_buffer(op, || Some(self.layouts.clone()));
    }

    /// Writes these shards to the result buffer of the collective `op`, and returns it.
    fn put(mut self, backend: &HostBackend, op: OpHandle) -> Option<Arc<ResultBuffer>> {
        if self.buffer.is_none() {
            self.create_buffer(backend, op);
        }
        let buffer = self.buffer?;
        // Makes progress during the copy, so that messages posted before are sent first and remote data is received
        // meanwhile.
        // SAFETY: the region is in memory, and no other thread uses it.
        unsafe { buffer.put(op.member, &self.tensors, || backend.progress()) };
        Some(buffer)
    }
}

/// A collective that this rank has posted. `finish` builds the result from the contributions and from the result
/// buffer with this rank's own shards.
pub(super) struct CollectiveRequest<F> {
    pub handle: OpHandleGuard,
    /// True if the contributions of ranks of other processes have not been requested yet.
    pub is_deferred: bool,
    pub own: Option<OwnShards>,
    /// Records when the call was sent to other processes, if there are any.
    pub sent: Option<SendStamp>,
    pub device: Device,
    pub finish: F,
}

impl<T, F> Request<T> for CollectiveRequest<F>
where
    F: FnOnce(&CollectiveInputs) -> T + Send,
{
    fn is_complete(&self) -> bool {
        self.handle.is_complete()
    }

    fn start(&mut self) {
        let OpHandleGuard { backend, handle } = &self.handle;
        if let (Some(op), true) = (*handle, std::mem::replace(&mut self.is_deferred, false)) {
            backend.pull(backend.rendezvous.read(|table| table.request(op, false)));
        }
    }

    fn wait(self: Box<Self>, deadline: Duration) -> Result<Completed<T>, CommError> {
        let Self { mut handle, is_deferred, own, sent, device, finish } = *self;
        let (op, backend) = (handle.take(), &handle.backend);
        if is_deferred {
            backend.pull(backend.rendezvous.read(|table| table.request(op, true)));
        }
        // While the remote shards are in flight.
        let put = Completed::timed(|| own.and_then(|own| own.put(backend, op)));
        let Matched { parts, last } = backend.rendezvous.wait(op, deadline)?;
        let inputs = CollectiveInputs { result_buffer: put.value.as_deref(), ..backend.inputs(&parts, op, &device) };
        let finished = Completed::timed(|| finish(&inputs));
        let moving = put.moving + finished.moving.saturating_sub(inputs.waited.get());
        // Without other processes, every rank would search all contributions for nothing.
        let carried = backend.remote.as_ref().and_then(|_| Contribution::timing(&parts, sent.as_ref()));
        Ok(Completed { moving, last: Some(last), carried, ..finished })
    }
}

/// A receive that this rank has posted. Dropping it releases the message.
pub(super) struct RecvRequest {
    pub backend: Arc<HostBackend>,
    pub handle: Option<RecvHandle>,
    pub member: GroupMember,
}

impl Request<ReceivedTensors> for RecvRequest {
    fn is_complete(&self) -> bool {
        self.handle.is_none_or(|handle| self.backend.rendezvous.read(|table| table.is_over(Wait::Message(handle))))
    }

    fn wait(mut self: Box<Self>, deadline: Duration) -> Result<Completed<ReceivedTensors>, CommError> {
        let handle = self.handle.take().expect("the receive handle is taken once");
        let message = self.backend.rendezvous.wait_for_message(handle, deadline)?;
        let part = std::slice::from_ref(&message.part);
        let received = Completed::timed(|| {
            // Like a broadcast whose root is the sender, in a group of the sender alone.
            let op = OpHandle { group: handle.group, member: 0, seq: 0 };
            let tensors = self.backend.inputs(part, op, &self.member.device).of_root(0);
            ReceivedTensors { from: message.from, tensors }
        });
        // A receiver sends no message of its own.
        let carried = Contribution::timing(part, None);
        Ok(Completed { last: Some(self.member.group.ranks()[message.from]), carried, ..received })
    }
}

impl Drop for RecvRequest {
    fn drop(&mut self) {
        if let Some(handle) = self.handle.take() {
            self.backend.rendezvous.release_receive(handle);
        }
    }
}
