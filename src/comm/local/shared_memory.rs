//! Results of an all-gather in [memory that ranks of one host share](crate::memory::shared_memory). Each rank
//! copies its shard once, into the memory of all ranks, and the full tensor exists once per host.
//!
//! ```text
//! rank 0, in process 0                 rank 1, in process 1
//! allocates memory   ---address--->    maps it
//! writes its shard   <---start-----    writes its shard
//!                    ----done------>
//!                    <---done------
//! a b                                  a b                      the same memory
//! ```
//!
//! The [call](super::all_gather) is posted as two collectives, like an all-reduce in [two
//! phases](super::two_phase_all_reduce). In the first, each rank announces that it starts, and the first rank of
//! the group sends the address of the memory. When the first is complete, each rank writes its shard, on its own
//! thread or the completion thread. The second is complete when all ranks have. If the system has no shared memory
//! available, shards are sent.

use std::sync::Arc;

use parking_lot::Mutex;

use super::HostBackend;
use super::contribution::Contribution;
use super::match_table::OpHandle;
use super::remote_group::RemoteGroup;
use crate::comm::CommError;
use crate::comm::backend::{Backend, Failure};
use crate::comm::process::contiguous_layout::ContiguousLayout;
use crate::comm::process::header::SharedMemoryMessage;
use crate::comm::process::result_buffer::ResultBuffer;
use crate::memory::shared_memory::{SWITCH, SharedMemoryBlock, SharedMemoryHandle};

/// Group rank that allocates the memory.
const OWNER: usize = 0;

/// Result of a collective in memory that ranks share.
#[derive(Debug)]
pub(super) struct SharedMemoryResult {
    outlet: Arc<RemoteGroup>,
    layouts: Vec<ContiguousLayout>,
    place: Mutex<ResultLocation>,
}

/// Location of the result.
#[derive(Debug)]
enum ResultLocation {
    Unknown,
    /// This rank has allocated the memory.
    Taken(SharedMemoryBlock),
    Found(Arc<ResultBuffer>),
}

impl SharedMemoryResult {
    pub fn new(outlet: &Arc<RemoteGroup>, layouts: Vec<ContiguousLayout>) -> Arc<Self> {
        Arc::new(Self { outlet: outlet.clone(), layouts, place: Mutex::new(ResultLocation::Unknown) })
    }

    /// Returns the message with which `member` requests the result. The owner allocates memory for it. Called once.
    pub fn wanted(&self, member: usize) -> SharedMemoryMessage {
        let bytes = ResultBuffer::bytes_in_common(&self.layouts);
        let take = || self.outlet.commons().take(bytes, self.outlet.processes() as u32);
        let Some(taken) = (member == OWNER).then(take).flatten() else { return SharedMemoryMessage::Wanted {} };
        let address = taken.address();
        *self.place.lock() = ResultLocation::Taken(taken);
        SharedMemoryMessage::At { address }
    }

    /// Locates the result from the messages `said` of the call `ticket`. If no rank has shared memory, allocates
    /// private memory.
    pub fn find(
        &self,
        engine: &HostBackend,
        ticket: OpHandle,
        said: &[Contribution],
    ) -> Result<Arc<ResultBuffer>, CommError> {
        let mut place = self.place.lock();
        let there = || said.iter().find_map(|deposit| deposit.common.and_then(SharedMemoryMessage::address));
        let common = match std::mem::replace(&mut *place, ResultLocation::Unknown) {
            ResultLocation::Found(full_tensors) => {
                *place = ResultLocation::Found(full_tensors.clone());
                return Ok(full_tensors);
            }
            ResultLocation::Taken(common) => Some(common),
            ResultLocation::Unknown => there().map(|address| self.map(engine, ticket, address)).transpose()?,
        };
        let full_tensors = match common {
            Some(common) => ResultBuffer::in_common(self.layouts.clone(), common),
            None => ResultBuffer::new(self.layouts.clone(), &engine.others().memory),
        };
        *place = ResultLocation::Found(full_tensors.clone());
        Ok(full_tensors)
    }

    fn map(
        &self,
        engine: &HostBackend,
        ticket: OpHandle,
        address: SharedMemoryHandle,
    ) -> Result<SharedMemoryBlock, CommError> {
        self.outlet.commons().map(address, ResultBuffer::bytes_in_common(&self.layouts)).map_err(|error| {
            let rank = engine.rendezvous.ranks(ticket.group)[OWNER];
            let problem = format!(
                "shared memory of that process cannot be mapped: {error}. Set {SWITCH}=0 to send the data instead"
            );
            engine.fail(Failure::Collective(CommError::Disconnected { rank, problem }))
        })
    }

    /// Returns the result buffer, which [`find`](Self::find) has located.
    pub fn found(&self) -> Arc<ResultBuffer> {
        match &*self.place.lock() {
            ResultLocation::Found(full_tensors) => full_tensors.clone(),
            _ => unreachable!("a rank locates the result before it contributes"),
        }
    }
}
