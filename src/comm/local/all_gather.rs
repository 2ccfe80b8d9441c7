//! All-gather into [shared memory](super::shared_memory), as one rank calls it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use burn::backend::DispatchTensor;

use super::channel::HostGroupBackend;
use super::contribution::{CollectiveInputs, Contribution};
use super::deferred_gather::{self, DeferredGather};
use super::match_table::OpHandle;
use super::remote_group::{DataMode, RecipientData, RemoteGroup};
use super::rendezvous::Matched;
use super::requests::{CollectiveRequest, OpHandleGuard};
use super::shared_memory::SharedMemoryResult;
use super::shared_request::{Left, SharedRequest};
use super::two_phase_all_reduce::TwoPhaseAllReduce;
use crate::comm::backend::{CallContext, CallSignature, Completed, PostResult, Request};
use crate::comm::process::contiguous_layout::ContiguousLayout;
use crate::comm::process::header::SharedMemoryMessage;
use crate::comm::process::result_buffer;
use crate::comm::transport::SendStamp;
use crate::comm::{CommError, TransferTiming};

/// First phase of a shared-memory gather. Once all ranks have started, it writes this rank's shards to the shared
/// result.
struct SharedMemoryGather {
    seat: OpHandleGuard,
    second: OpHandle,
    /// Remote ranks of the group on which the second phase is posted.
    later: Arc<RemoteGroup>,
    /// Records when the call of the first phase was sent.
    taken: SendStamp,
    results: Arc<SharedMemoryResult>,
    parts: Vec<DispatchTensor>,
}

impl Request<()> for SharedMemoryGather {
    fn is_complete(&self) -> bool {
        self.seat.is_complete()
    }

    fn wait(self: Box<Self>, deadline: Duration) -> Result<Completed<()>, CommError> {
        let Self { mut seat, second, later, taken, results, parts } = *self;
        let (ticket, engine) = (seat.take(), &seat.engine);
        let Matched { parts: said, last } = engine.rendezvous.wait(ticket, deadline)?;
        let is_unwanted = said.iter().all(|deposit| deposit.common == Some(SharedMemoryMessage::Unwanted {}));
        let full_tensors = if is_unwanted { None } else { Some(results.find(engine, ticket, &said)?) };
        // The messages of the first phase have moved no data.
        let begun = Instant::now();
        let placed = Completed::timed(|| {
            let Some(full_tensors) = full_tensors else { return };
            // SAFETY: the region is in memory, and no other rank uses it.
            unsafe { full_tensors.put(ticket.member, &parts, || engine.carry()) };
            let shares = match full_tensors.are_common() {
                true => later.nothing(),
                false => later.shares(&Contribution::new(parts), RecipientData::Full),
            };
            later.bring(second.seq, shares);
            engine.carry();
            engine.fill_and_finish(second, Contribution::of_result_buffer(full_tensors).there(None));
        });
        let carried = Contribution::carried(&said, Some(&taken)).map(|carried| TransferTiming { begun, ..carried });
        Ok(Completed { last: Some(last), carried, ..placed })
    }
}

impl HostGroupBackend {
    /// Returns true if the gather uses shared memory. The answer is the same on all ranks.
    pub(super) fn gathers_in_common(&self, print: &CallSignature) -> bool {
        let ranks = self.member.group.size();
        result_buffer::pay(print.bytes(), ranks) && ContiguousLayout::of_full(&print.tensors, ranks).is_some()
    }

    /// Posts an [`all_gather`](crate::comm::backend::GroupBackend::all_gather) into memory that the ranks of the
    /// group share.
    pub(super) fn all_gather_in_common(
        &self,
        outlet: &Arc<RemoteGroup>,
        post: CallContext,
        parts: Vec<DispatchTensor>,
    ) -> PostResult<Vec<DispatchTensor>> {
        let (engine, rendezvous, is_deferred) = (&self.engine, &self.engine.rendezvous, post.is_deferred);
        let (member, ranks) = (self.member.group.rank(), self.member.group.size());
        let deposit = Contribution::new(parts);
        self.note(&deposit);
        let parts = deposit.tensors;
        let device = self.member.home(&parts);
        let layouts =
            ContiguousLayout::of_full(&post.print.tensors, ranks).expect("the caller has checked the layouts");
        let results = SharedMemoryResult::new(outlet, layouts);
        // All other properties are compared in the first phase.
        let agreed = CallSignature {
            tensors: Arc::new([]),
            names: None,
            global_tensor: None,
            operand_shapes: None,
            digests: None,
            ..post.print.clone()
        };

        let mut second = self.second.lock();
        let (key, later) = second.get_or_insert_with(|| self.second_halves());
        let (first, taken) = match is_deferred {
            true => {
                let join = |print| rendezvous.post_deferred(self.key, member, print);
                outlet.joined(post.print, outlet.nothing(), DataMode::Deferred, join)?
            }
            false => {
                let (shares, deposit) = deferred_gather::said(outlet, results.wanted(member));
                let join = |print| rendezvous.post(self.key, member, print, deposit);
                outlet.joined(post.print, shares, DataMode::Eager, join)?
            }
        };
        let deferred = is_deferred.then(|| DeferredGather::new(engine, first, outlet, &results));

        let join = |print| rendezvous.join_late(*key, member, print);
        let joined = later.joined(agreed, later.nothing(), DataMode::Deferred, join);
        let (second, _) = joined.inspect_err(|_| rendezvous.release(first))?;
        let later = later.clone();
        let finish = {
            let results = results.clone();
            move |exchange: &CollectiveInputs| {
                let full_tensors = results.found();
                exchange.land(&full_tensors);
                // SAFETY: all ranks have written their shards, or the shards were copied here.
                unsafe { full_tensors.take(exchange.device) }
            }
        };
        let seat = |ticket| OpHandleGuard::new(engine.clone(), ticket, false);
        let gathered = CollectiveRequest { seat: seat(second), own: None, taken: None, device, finish };
        let seconds = vec![Left(SharedRequest::new(self.member.rank(), Box::new(gathered)))];
        let placing = SharedMemoryGather { seat: seat(first), second, later, taken, results, parts };
        let firsts = vec![engine.leave_open(first, Box::new(placing))];
        let finish = |mut gathered: Vec<Vec<DispatchTensor>>| gathered.remove(0);
        Ok(Box::new(TwoPhaseAllReduce { deferred, firsts, seconds, finish }))
    }
}
