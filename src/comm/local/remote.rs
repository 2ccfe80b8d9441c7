//! Messages of other processes: they [post calls](HostBackend::hear) on behalf of remote ranks and report failures.

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use super::HostBackend;
use super::contribution::Contribution;
use super::match_table::{GroupKey, OpHandle, P2pMessage, RemoteMessageHandle};
use super::peer_processes::{CollectiveKey, Ended, PeerProcesses};
use super::wait_for_graph::WaitForEdge;
use crate::comm::backend::{Backend, CallSignature, Failure};
use crate::comm::process::contiguous_layout::ContiguousLayout;
use crate::comm::process::header::{
    ControlMessage, DataMode, PayloadDesc, RemoteGroupId, RemoteGroupInfo, SentSignature,
};
use crate::comm::process::payload_check::Recipients;
use crate::comm::process::result_buffer::{self, ResultBuffer};
use crate::comm::transport::RecvBuffer;
use crate::comm::{CommError, Op, RankReport};

/// Target of received payloads.
#[derive(Debug, Clone, Copy)]
pub(in crate::comm) enum PayloadTarget {
    Collective(OpHandle),
    Message(RemoteMessageHandle),
}

impl HostBackend {
    /// Handles a message of process `from`. Returns the target of its payloads.
    ///
    /// Never blocks, because the calling thread carries all communication.
    pub(in crate::comm) fn hear(&self, from: usize, word: ControlMessage) -> Option<PayloadTarget> {
        self.heard(from, word).unwrap_or_else(|problem| {
            self.misunderstood(from, problem);
            None
        })
    }

    /// Returns the regions of a result into which payloads with this description are received: large ones, in the
    /// result of the only local rank of the group, if its layout is known.
    pub(in crate::comm) fn regions(
        &self,
        place: PayloadTarget,
        contents: &PayloadDesc,
    ) -> Option<Vec<Box<dyn RecvBuffer>>> {
        let PayloadTarget::Collective(ticket) = place else { return None };
        let bytes: usize = contents.tensors.iter().map(|meta| meta.shape.num_elements() * meta.dtype.size()).sum();
        if bytes < result_buffer::WORTH {
            return None;
        }
        let print = self.rendezvous.print(ticket)?;
        let ranks = self.rendezvous.ranks(ticket.group);
        if ranks.iter().filter(|rank| self.here.contains(rank)).count() != 1 {
            return None;
        }
        // The signature of an all-gather determines the layout. For an all-to-all, the local rank provides it when it
        // calls.
        let is_gathered = contents.addressees.is_empty() && print.op == Op::AllGather;
        let layouts = || is_gathered.then(|| ContiguousLayout::of_full(&print.tensors, ranks.len())).flatten();
        self.result_buffer(ticket, layouts)?.regions(ticket.member, &contents.tensors)
    }

    /// Returns the result buffer of the collective `ticket` for the only local rank of the group. If there is none
    /// yet, creates it with `layouts`.
    pub(super) fn result_buffer(
        &self,
        ticket: OpHandle,
        layouts: impl FnOnce() -> Option<Vec<ContiguousLayout>>,
    ) -> Option<Arc<ResultBuffer>> {
        let (call, mut known) = ((ticket.group, ticket.seq), self.others().result_buffers.lock());
        if let Some(full_tensors) = known.get(&call).and_then(Weak::upgrade) {
            return Some(full_tensors);
        }
        let full_tensors = ResultBuffer::new(layouts()?, &self.others().memory);
        keep(&mut known, call, &full_tensors);
        Some(full_tensors)
    }

    /// Makes `full_tensors` the buffer into which remote contributions to the collective `ticket` are received.
    pub(super) fn place(&self, ticket: OpHandle, full_tensors: &Arc<ResultBuffer>) {
        keep(&mut self.others().result_buffers.lock(), (ticket.group, ticket.seq), full_tensors);
    }

    /// Delivers received payloads to the collective or message that waits for them.
    pub(in crate::comm) fn fill(&self, place: PayloadTarget, deposit: Contribution) {
        match place {
            PayloadTarget::Collective(ticket) => {
                let is_here = |rank: &usize| self.here.contains(rank);
                let ranks = self.rendezvous.ranks(ticket.group);
                let is_for_one = ranks.iter().filter(|rank| is_here(rank)).count() == 1;
                self.fill_and_finish(ticket, if is_for_one { deposit.for_one() } else { deposit });
            }
            PayloadTarget::Message(announced) => self.rendezvous.fill_letter(announced, deposit.for_one()),
        }
    }

    /// Adds the contribution of `ticket`. If that completes the collective, the completion thread completes its
    /// requests.
    pub(super) fn fill_and_finish(&self, ticket: OpHandle, deposit: Contribution) {
        if self.rendezvous.provide_data(ticket, deposit) {
            let this = self.this.upgrade().expect("the caller has a reference to the backend");
            self.others().completion.complete(ticket, &this);
        }
    }

    /// Fails the world because process `from` has sent an invalid message.
    pub(in crate::comm) fn misunderstood(&self, from: usize, problem: String) {
        let rank = self.others().of(from).start;
        self.rendezvous.find(Failure::Collective(CommError::Protocol { rank, problem }));
    }

    /// Handles the loss of the connection to `process`.
    pub(in crate::comm) fn lost(&self, process: usize, problem: &str) {
        let others = self.others();
        self.membership.lost(process);
        if process == others.first() {
            others.lose_first();
            self.rendezvous.decide_here();
        }
        let has_returned = |rank: &usize| self.rendezvous.has_returned(*rank);
        let interrupted: Vec<_> = others.of(process).filter(|rank| !has_returned(rank)).collect();
        // A rank may return before it has contributed to a collective that it dropped. A local rank may still wait
        // for that.
        let is_owed =
            || !others.here().all(|rank| has_returned(&rank)) && others.of(process).any(|r| self.rendezvous.owes(r));
        if interrupted.is_empty() && !is_owed() {
            return;
        }
        let error = CommError::Disconnected { rank: others.of(process).start, problem: problem.into() };
        self.rendezvous.find(Failure::Collective(error));
        for rank in interrupted {
            let error = CommError::Disconnected { rank, problem: problem.into() };
            let report = RankReport { rank, doing: self.activity(rank), error: Some(error.into()), at: None };
            others.lose(report);
            self.left(rank);
        }
    }

    pub(super) fn others(&self) -> &PeerProcesses {
        self.others.as_deref().expect("only a backend with other processes receives messages")
    }

    fn heard(&self, from: usize, word: ControlMessage) -> Result<Option<PayloadTarget>, String> {
        let others = self.others();
        match word {
            ControlMessage::Joined { channel, seq, print, when, contents } => {
                let number = channel.number;
                let (group, member) = self.channel(from, channel)?;
                let print = self.print((from, number), group, print)?;
                if when == DataMode::Eager {
                    self.check_data(&contents, &print, OpHandle { group, member, seq })?;
                }
                let announced = match when {
                    DataMode::Eager | DataMode::Deferred => {
                        self.rendezvous.post_remote(group, member, print).map(|ticket| (ticket, false))
                    }
                    DataMode::OnDemand => self.rendezvous.post_remote_on_demand(group, member, print),
                };
                let Ok((ticket, asked)) = announced else { return Ok(None) };
                if ticket.seq != seq {
                    return Err(format!("it sent call {seq} of a group where call {} is next", ticket.seq));
                }
                if asked {
                    others.answer(vec![ticket], true);
                }
                Ok((when == DataMode::Eager).then_some(PayloadTarget::Collective(ticket)))
            }
            ControlMessage::Pull { channel, seq, wanted } => {
                let offered = others.offered.lock().remove(&(from, channel, seq));
                let Some((contents, payloads)) = offered else {
                    return Err(format!("it requested data that was not offered in call {seq} of channel {channel}"));
                };
                if wanted {
                    others.send(from, ControlMessage::Data { channel, seq, contents }, payloads);
                }
                Ok(None)
            }
            ControlMessage::Data { channel, seq, contents } => {
                let (group, member) = self.channel(from, RemoteGroupId { number: channel, introduction: None })?;
                let ticket = OpHandle { group, member, seq };
                // There is no signature any more if no rank needs the data, and that of the second of two phases does not
                // determine it.
                if let Some(print) = self.rendezvous.print(ticket).filter(|print| print.op != Op::AllReduce) {
                    self.check_data(&contents, &print, ticket)?;
                }
                Ok(Some(PayloadTarget::Collective(ticket)))
            }
            ControlMessage::Sent { channel, to, tag, print, contents } => {
                let (group, from) = self.channel(from, channel)?;
                let size = self.rendezvous.ranks(group).len();
                if to >= size {
                    return Err(format!("it sent a message to member {to} of a group of {size}"));
                }
                if !print.fits(size) || !contents.is_of_message(&print) {
                    return Err("it sent a message whose data is not that of its signature".into());
                }
                let letter = P2pMessage { from, tag, print, part: () };
                Ok(self.rendezvous.announce_letter(group, to, letter).ok().map(PayloadTarget::Message))
            }
            ControlMessage::RankExited(report) => {
                let rank = report.rank;
                if !others.of(from).contains(&rank) {
                    return Err(format!("it reported the exit of rank {rank} of another process"));
                }
                // The report of a rank whose process was lost does not count any more.
                others.ended.lock().entry(rank).or_insert(Ended::Said(report));
                self.left(rank);
                Ok(None)
            }
            ControlMessage::Failed { failure, decided } => {
                self.rendezvous.hear(failure, decided);
                Ok(None)
            }
            ControlMessage::Membership(notice) => self.membership.hear(from, notice).map(|()| None),
            ControlMessage::Waits(chain) => self.hear_of_waiting(from, chain).map(|()| None),
        }
    }

    /// Handles a deadlock detection message of process `from`.
    fn hear_of_waiting(&self, from: usize, chain: WaitForEdge) -> Result<(), String> {
        let others = self.others();
        let (WaitForEdge::Needs { rank, other, .. }
        | WaitForEdge::Waiting { rank, other, .. }
        | WaitForEdge::WaitsFor { rank, other, .. }) = &chain;
        if [*rank, *other].iter().any(|rank| *rank >= others.size()) {
            return Err(format!("it sent a wait of a rank that does not exist: {chain:?}"));
        }
        match chain {
            WaitForEdge::Needs { rank, number, other } => {
                if let Some(in_wait) = self.rendezvous.wait_of(other) {
                    let waiting = WaitForEdge::Waiting { rank, number, other, in_wait };
                    others.send(from, ControlMessage::Waits(waiting), Vec::new());
                }
            }
            WaitForEdge::Waiting { rank, number, other, in_wait } => {
                if let Some(during) = self.rendezvous.still_needs(rank, number, other) {
                    let deadlock = others.waits_for(WaitForEdge::WaitsFor { rank, number, during, other, in_wait });
                    deadlock.map(|deadlock| self.rendezvous.find(deadlock));
                }
            }
            waits_for @ WaitForEdge::WaitsFor { .. } => {
                if others.decides() {
                    others.waits_for(waits_for).map(|deadlock| self.rendezvous.find(deadlock));
                }
            }
        }
        Ok(())
    }

    /// Returns the signature of a call on a channel of another process.
    fn print(&self, channel: (usize, usize), group: GroupKey, sent: SentSignature) -> Result<CallSignature, String> {
        let mut channels = self.others().channels.lock();
        let known = channels.prints.entry(channel).or_default();
        let print = sent.complete(known).ok_or("it has not sent the signature of its call")?;
        match self.rendezvous.ranks(group).len() {
            ranks if print.fits(ranks) => Ok(print),
            ranks => Err(format!("it called with a signature that does not fit a group of {ranks}")),
        }
    }

    /// Checks that `contents` is the data of the call `ticket` for the local ranks.
    fn check_data(&self, contents: &PayloadDesc, print: &CallSignature, ticket: OpHandle) -> Result<(), String> {
        let ranks = self.rendezvous.ranks(ticket.group);
        let members: Vec<_> = (0..ranks.len()).filter(|member| self.here.contains(&ranks[*member])).collect();
        let to = Recipients { ranks: ranks.len(), members: &members };
        if contents.is_of_call(print, ticket.member, &to) {
            return Ok(());
        }
        Err(format!(
            "it sent data for members {:?} of {} tensors in call {} of a group, {}, which are not those of its signature",
            contents.addressees,
            contents.tensors.len(),
            ticket.seq,
            print.op
        ))
    }

    /// Returns the group of a channel of another process, and the group rank of the caller.
    fn channel(&self, from: usize, channel: RemoteGroupId) -> Result<(GroupKey, usize), String> {
        let (others, RemoteGroupId { number, introduction }) = (self.others(), channel);
        let mut channels = others.channels.lock();
        let Some(RemoteGroupInfo { ranks, name, member }) = introduction else {
            return channels
                .places
                .get(&(from, number))
                .copied()
                .ok_or_else(|| format!("it has not introduced channel {number}"));
        };
        let is_known = |rank: &usize| *rank < others.size();
        if !ranks.iter().all(is_known) || !ranks.get(member).is_some_and(|rank| others.of(from).contains(rank)) {
            return Err(format!("it called as invalid member {member} of a group of ranks {ranks:?}"));
        }
        let place = (self.rendezvous.group(&ranks, name), member);
        channels.places.insert((from, number), place);
        channels.numbers.insert(place, (from, number));
        Ok(place)
    }
}

/// Registers the result buffer of a collective, for as long as it is alive.
fn keep(known: &mut HashMap<CollectiveKey, Weak<ResultBuffer>>, call: CollectiveKey, full_tensors: &Arc<ResultBuffer>) {
    known.retain(|_, other| other.strong_count() > 0);
    known.insert(call, Arc::downgrade(full_tensors));
}
