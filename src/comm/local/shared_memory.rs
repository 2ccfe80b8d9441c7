//! Results of ranks of one host in [memory that they have in common](crate::memory::shared_memory): of an all-gather
//! each rank puts its part where all have it, in one copy, and the whole is there once.
//!
//! ```text
//! rank 0, in process 0              rank 1, in process 1
//! takes memory     ---where--->     maps it
//! puts its part    <-- begins --    puts its part
//!                  ----put---->
//!                  <---put-----
//! a b                               a b                      the same memory
//! ```
//!
//! It is [called](super::all_gather) as two collectives, as an all-reduce is [in halves](super::two_phase_all_reduce).
//! To the first, ranks bring that they begin, and the first of the group where there is memory; once it is complete,
//! each puts its part, the rank or the engine's hands, and the second is complete when all have. Where the system has
//! no memory, parts are sent.

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

/// The member that takes memory.
const OWNER: usize = 0;

/// Results that ranks have in common.
#[derive(Debug)]
pub(super) struct SharedMemoryResult {
    outlet: Arc<RemoteGroup>,
    layouts: Vec<ContiguousLayout>,
    place: Mutex<ResultLocation>,
}

/// Where they are.
#[derive(Debug)]
enum ResultLocation {
    Unknown,
    /// This rank has taken memory.
    Taken(SharedMemoryBlock),
    Found(Arc<ResultBuffer>),
}

impl SharedMemoryResult {
    pub fn new(outlet: &Arc<RemoteGroup>, layouts: Vec<ContiguousLayout>) -> Arc<Self> {
        Arc::new(Self { outlet: outlet.clone(), layouts, place: Mutex::new(ResultLocation::Unknown) })
    }

    /// What `member` says that wants them; one takes memory. Said once.
    pub fn wanted(&self, member: usize) -> SharedMemoryMessage {
        let bytes = ResultBuffer::bytes_in_common(&self.layouts);
        let take = || self.outlet.commons().take(bytes, self.outlet.processes() as u32);
        let Some(taken) = (member == OWNER).then(take).flatten() else { return SharedMemoryMessage::Wanted {} };
        let address = taken.address();
        *self.place.lock() = ResultLocation::Taken(taken);
        SharedMemoryMessage::At { address }
    }

    /// Where they are by what ranks have `said` in the call of `ticket`; in memory of this rank's own, if there is none in
    /// common.
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
                "memory in common with it cannot be mapped: {error}; {SWITCH}=0 has ranks send what they gather"
            );
            engine.fail(Failure::Collective(CommError::Disconnected { rank, problem }))
        })
    }

    /// Where they were [found](Self::find).
    pub fn found(&self) -> Arc<ResultBuffer> {
        match &*self.place.lock() {
            ResultLocation::Found(full_tensors) => full_tensors.clone(),
            _ => unreachable!("a rank finds them before it brings its part"),
        }
    }
}
