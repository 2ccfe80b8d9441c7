//! All-reduce in [two phases](super::two_phase_all_reduce), as one rank calls it.

use std::sync::Arc;

use burn::backend::{DispatchTensor, TensorMetadata};
use burn::tensor::Shape;

use super::channel::HostGroupBackend;
use super::contribution::{CollectiveInputs, Contribution};
use super::match_table::OpHandle;
use super::remote_group::{DataMode, RecipientData, RemoteGroup};
use super::requests::{CollectiveRequest, OpHandleGuard};
use super::segments::Segment;
use super::shared_request::{Left, SharedRequest};
use super::two_phase_all_reduce::{DeferredContribution, ReduceScatterPhase, TwoPhaseAllReduce};
use crate::comm::backend::{CallContext, CallSignature, PostResult, reshaped};
use crate::comm::process::contiguous_layout::ContiguousLayout;
use crate::comm::process::result_buffer::{self, ResultBuffer};
use crate::comm::transport::SendStamp;
use crate::comm::{CommError, ReduceOp};

/// Number of bytes of a segment that each rank reduces.
const SEGMENT: usize = 2 << 20;

/// Number of first phases that are in flight at once.
const SEGMENTS_IN_FLIGHT: usize = 2;

/// Phases of an all-reduce that a rank has posted.
struct Joinings {
    /// Handles of the first and the second phase of each segment.
    tickets: Vec<(OpHandle, OpHandle)>,
    /// Records when the call of the first phase was sent.
    taken: SendStamp,
    /// Remote ranks of the group on which all phases except the first are posted.
    later: Arc<RemoteGroup>,
}

impl HostGroupBackend {
    /// Posts an [`all_reduce`](crate::comm::backend::GroupBackend::all_reduce) in a group of several processes.
    pub(super) fn all_reduce_in_halves(
        &self,
        outlet: &Arc<RemoteGroup>,
        post: CallContext,
        tensors: Vec<DispatchTensor>,
        op: ReduceOp,
    ) -> PostResult<Vec<DispatchTensor>> {
        let (ranks, bytes) = (self.member.group.size(), post.print.bytes());
        let shapes: Vec<_> = tensors.iter().map(DispatchTensor::shape).collect();
        let row = |(tensor, shape): (DispatchTensor, &Shape)| reshaped(tensor, Shape::from([shape.num_elements()]));
        let rows: Arc<[_]> = Contribution::new(tensors.into_iter().zip(&shapes).map(row).collect()).tensors.into();
        // All ranks must use the same segments. Only if each rank is alone in its process, all ranks know that they
        // can.
        let segments = match outlet.processes() == ranks && result_buffer::pay(bytes, ranks) {
            true => Segment::several(&rows, SEGMENT * ranks),
            false => vec![Segment::of_all(&rows)],
        };
        let (device, engine) = (self.member.home(&rows), &self.engine);
        let layout = |row: &DispatchTensor| ContiguousLayout::of_row(row.shape().num_elements(), row.dtype(), []);
        let layouts = || rows.iter().map(layout).collect();
        let Joinings { tickets, taken, later } = self.join_halves(outlet, post, &rows, &segments)?;
        let full = outlet.lands(bytes).then(|| ResultBuffer::new(layouts(), &engine.others().memory));
        let owed =
            |segment: &Segment, ticket| DeferredContribution { ticket, rows: rows.clone(), segment: segment.clone() };
        let pairs = segments.iter().zip(tickets);
        let mut rest = pairs.clone().skip(1).map(|(segment, (ticket, _))| owed(segment, ticket));
        let begun: Vec<_> = rest.by_ref().take(SEGMENTS_IN_FLIGHT - 1).collect();
        let (mut firsts, mut seconds, mut taken) = (Vec::new(), Vec::new(), Some(taken));
        for (segment, (ticket, second)) in pairs {
            let sums = full.as_ref().map(|full| full.window(segment.ranges(), ranks));
            if let Some(window) = &sums {
                engine.place(second, window);
            }
            seconds.push(Left(self.second_half(second, segment.ranges().len(), sums.clone(), &rows)));
            let (seat, outlet, device) =
                (OpHandleGuard::new(engine.clone(), ticket, false), later.clone(), device.clone());
            let (taken, shardings, next) = (taken.take(), segment.shardings(), rest.next());
            firsts
                .push((ticket, ReduceScatterPhase { seat, second, outlet, taken, op, shardings, sums, device, next }));
        }
        let leave_open = |(ticket, first)| engine.leave_open(ticket, Box::new(first));
        let firsts = firsts.into_iter().map(leave_open).collect();
        begun.into_iter().for_each(|owed| owed.bring(engine, &later));
        let finish = move |mut parts: Vec<Vec<DispatchTensor>>| {
            // SAFETY: the windows cover the buffer, and all shards received in them are complete.
            let full_tensors = full.map_or_else(|| parts.remove(0), |full| unsafe { full.take(&device) });
            full_tensors.into_iter().zip(shapes).map(|(full, shape)| reshaped(full, shape)).collect::<Vec<_>>()
        };
        Ok(Box::new(TwoPhaseAllReduce { firsts, seconds, finish }))
    }

    /// Posts both phases of every segment of `rows`, the first phase of the first segment with its data. All are
    /// posted at once, so that calls match the calls of the other ranks in order.
    fn join_halves(
        &self,
        outlet: &RemoteGroup,
        post: CallContext,
        rows: &[DispatchTensor],
        segments: &[Segment],
    ) -> Result<Joinings, CommError> {
        let deposit = Contribution::new(segments[0].segments_of(rows)).there(None);
        self.note(&deposit);
        let shares = outlet.shares(&deposit, RecipientData::Parts(&segments[0].shardings()));
        // All other properties are compared in the first phase of the first segment.
        let agreed = CallSignature {
            names: None,
            global_tensor: None,
            operand_shapes: None,
            digests: None,
            ..post.print.clone()
        };
        let prints = segments.iter().map(|segment| CallSignature { tensors: segment.prints(rows), ..agreed.clone() });
        // Both phases of each segment, except the one that is posted with its data.
        let late: Vec<_> = prints.flat_map(|print| [print.clone(), print]).skip(1).collect();

        let mut second = self.second.lock();
        let (key, later) = second.get_or_insert_with(|| self.second_halves());
        let (member, rendezvous) = (self.member.group.rank(), &self.engine.rendezvous);
        let join = |print| rendezvous.post(self.key, member, print, deposit);
        let (ticket, taken) = outlet.joined(post.print, shares, DataMode::Eager, join)?;
        let mut tickets = vec![ticket];
        for print in late {
            let join = |print| rendezvous.join_late(*key, member, print);
            match later.joined(print, later.nothing(), DataMode::Deferred, join) {
                Ok((ticket, _)) => tickets.push(ticket),
                Err(error) => {
                    tickets.into_iter().for_each(|ticket| rendezvous.release(ticket));
                    return Err(error);
                }
            }
        }
        let tickets = tickets.chunks_exact(2).map(|pair| (pair[0], pair[1])).collect();
        Ok(Joinings { tickets, taken, later: later.clone() })
    }

    /// Returns the request of a second phase. Its result is `count` rows, or nothing if they are in a result
    /// buffer.
    fn second_half(
        &self,
        ticket: OpHandle,
        count: usize,
        sums: Option<Arc<ResultBuffer>>,
        rows: &[DispatchTensor],
    ) -> Arc<SharedRequest<Vec<DispatchTensor>>> {
        let device = self.member.home(rows);
        let bytes = rows.iter().map(|row| (row.shape().num_elements() * row.dtype().size()) as u64).sum();
        let is_open = sums.is_none() && self.is_worth_hands(bytes, &device);
        let finish = move |exchange: &CollectiveInputs| match sums {
            Some(window) => {
                exchange.land(&window);
                Vec::new()
            }
            None => exchange.joined(count),
        };
        let seat = OpHandleGuard::new(self.engine.clone(), ticket, false);
        let joined = Box::new(CollectiveRequest { seat, own: None, taken: None, device, finish });
        if is_open { self.engine.leave_open(ticket, joined) } else { SharedRequest::new(self.member.rank(), joined) }
    }
}
