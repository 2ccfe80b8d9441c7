//! [`RecvRequest`]: a receive that a rank has posted, until it has the message.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::HostBackend;
use crate::comm::CommError;
use crate::comm::backend::{Completed, GroupMember, ReceivedTensors, Request};
use crate::comm::control::match_table::{OpHandle, RecvHandle, Wait};
use crate::comm::data::contribution::Contribution;
use crate::comm::data::plane::DataPlane;
use crate::comm::data::{PlaneContribution, read_in_order};

/// A receive that this rank has posted. Dropping it releases the message.
pub(super) struct RecvRequest {
    pub backend: Arc<HostBackend>,
    pub plane: Arc<dyn DataPlane>,
    pub handle: Option<RecvHandle>,
    pub member: GroupMember,
}

impl Request<ReceivedTensors> for RecvRequest {
    fn is_complete(&self) -> bool {
        self.handle.is_none_or(|handle| {
            self.backend
                .rendezvous
                .read(|table| table.is_over(Wait::Message(handle)))
        })
    }

    fn wait(
        mut self: Box<Self>,
        deadline: Duration,
    ) -> Result<Completed<ReceivedTensors>, CommError> {
        let handle = self
            .handle
            .take()
            .expect("the receive handle is taken once");
        let start = Instant::now();
        // For errors of an exchange. The handle is not valid any more when the message is taken.
        let id = self.plane.exchanges().then(|| {
            let rendezvous = &self.backend.rendezvous;
            rendezvous.read(|table| table.id(Wait::Message(handle)))
        });
        let message = self.backend.rendezvous.wait_for_message(handle, deadline)?;
        let part = match message.part.plane {
            PlaneContribution::Exchanged(exchanged) => exchanged
                .take(deadline.saturating_sub(start.elapsed()))
                .map_err(|error| {
                    let rank = self.member.rank();
                    self.backend.exchange_error(rank, &*self.plane, &error, id)
                })?,
            _ => vec![message.part],
        };
        let received = Completed::timed(|| {
            // Like a broadcast whose root is the sender, in a group of the sender alone.
            let op = OpHandle {
                group: handle.group,
                member: 0,
                seq: 0,
            };
            let inputs = self.backend.inputs(&part, op, &self.member.device);
            let tensors = read_in_order(&part, None, || self.plane.broadcast(&inputs, 0));
            ReceivedTensors {
                from: message.from,
                tensors,
            }
        });
        // A receiver sends no message of its own.
        let transfer = Contribution::timing(&part, None);
        Ok(Completed {
            last: Some(self.member.group.ranks()[message.from]),
            transfer,
            ..received
        })
    }
}

impl Drop for RecvRequest {
    fn drop(&mut self) {
        if let Some(handle) = self.handle.take() {
            self.backend.rendezvous.release_receive(handle);
        }
    }
}
