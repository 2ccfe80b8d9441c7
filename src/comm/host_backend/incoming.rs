//! Messages of other processes: they [post calls](HostBackend::receive) on behalf of remote ranks
//! and report failures.

use std::sync::{Arc, Weak};

use super::HostBackend;
use crate::comm::backend::{Backend, CallSignature, Failure};
use crate::comm::control::match_table::{
    CallData, DataMode, GroupKey, MessageHandle, OpHandle, P2pMessage,
};
use crate::comm::control::wait_for_graph::WaitForEdge;
use crate::comm::data::contribution::Contribution;
use crate::comm::data::payload_check::Recipients;
use crate::comm::data::result_buffer::{self, ContiguousLayout, ResultBuffer};
use crate::comm::transport::RecvBuffer;
use crate::comm::transport::header::{
    ControlMessage, MessageId, PayloadDesc, RemoteGroupId, SentSignature,
};
use crate::comm::{CommError, Op, RankReport};

/// Target of received payloads.
#[derive(Debug, Clone, Copy)]
pub(super) enum PayloadTarget {
    Collective(OpHandle),
    Message(MessageHandle),
}

impl HostBackend {
    /// Handles a message of process `from`. Returns the target of its payloads.
    ///
    /// Never blocks, because the calling thread carries all communication.
    pub(super) fn receive(&self, from: usize, message: ControlMessage) -> Option<PayloadTarget> {
        if self.remote().refuses(from) {
            return None;
        }
        self.handle(from, message).unwrap_or_else(|problem| {
            self.reject(from, problem);
            None
        })
    }

    /// Returns the regions of a result into which payloads with this description are received:
    /// large ones, in the result of the only local rank of the group, if its layout is known.
    pub(super) fn regions(
        &self,
        target: PayloadTarget,
        contents: &PayloadDesc,
    ) -> Option<Vec<Box<dyn RecvBuffer>>> {
        let PayloadTarget::Collective(op) = target else {
            return None;
        };
        let bytes: usize = contents
            .tensors
            .iter()
            .map(|meta| meta.shape.num_elements() * meta.dtype.size())
            .sum();
        if bytes < result_buffer::WORTH {
            return None;
        }
        let (signature, ranks) = self
            .rendezvous
            .read(|table| Some((table.signature(op)?.clone(), table.ranks(op.group).clone())))?;
        if self.local_members(&ranks).count() != 1 {
            return None;
        }
        // The signature of an all-gather determines the layout. For an all-to-all, the local rank
        // provides it when it calls.
        let is_gathered = contents.recipients.is_empty() && signature.op == Op::AllGather;
        self.result_buffer(op, || {
            is_gathered
                .then(|| ContiguousLayout::of_full(&signature.tensors, ranks.len()))
                .flatten()
        })?
        .regions(op.member, &contents.tensors)
    }

    /// Returns the result buffer of the collective `op` for the only local rank of the group. If
    /// there is none yet, creates it with `layouts`, for as long as it is alive.
    pub(super) fn result_buffer(
        &self,
        op: OpHandle,
        layouts: impl FnOnce() -> Option<Vec<ContiguousLayout>>,
    ) -> Option<Arc<ResultBuffer>> {
        let key = (op.group, op.seq);
        let mut known = self.remote().result_buffers.lock();
        if let Some(buffer) = known.get(&key).and_then(Weak::upgrade) {
            return Some(buffer);
        }
        let buffer = ResultBuffer::new(layouts()?, &self.remote().memory);
        known.retain(|_, other| other.strong_count() > 0);
        known.insert(key, Arc::downgrade(&buffer));
        Some(buffer)
    }

    /// Delivers received payloads to the collective or message that waits for them.
    pub(super) fn deliver(&self, target: PayloadTarget, contribution: Contribution) {
        match target {
            PayloadTarget::Collective(op) => {
                let ranks = self.rendezvous.read(|table| table.ranks(op.group).clone());
                let is_for_one =
                    !contribution.recipients.is_empty() || self.local_members(&ranks).count() == 1;
                let contribution = match is_for_one {
                    true => contribution.exclusive(),
                    false => contribution,
                };
                self.provide_data(op, contribution);
            }
            PayloadTarget::Message(message) => self
                .rendezvous
                .provide_message(message, contribution.exclusive()),
        }
    }

    /// Adds the contribution of `op`. If that completes the collective, the completion thread
    /// completes its requests.
    pub(super) fn provide_data(&self, op: OpHandle, contribution: Contribution) {
        if self.rendezvous.provide_data(op, contribution) {
            self.completion.complete(op);
        }
    }

    /// Fails the world because process `from` has sent an invalid message.
    pub(super) fn reject(&self, from: usize, problem: String) {
        let rank = self.remote().ranks_of(from).start;
        self.rendezvous
            .find(Failure::Collective(CommError::Protocol { rank, problem }));
    }

    /// Handles the loss of the connection to `process`.
    pub(super) fn lost(&self, process: usize, problem: &str) {
        let remote = self.remote();
        self.membership.lost(process);
        if process == remote.first() {
            self.rendezvous.decide_here();
        }
        let running = self.rendezvous.read(|table| table.running());
        let interrupted: Vec<_> = remote
            .ranks_of(process)
            .filter(|rank| running.contains(rank))
            .collect();
        // A rank may return before it has contributed to a collective that it dropped. A local rank
        // may still wait for that, or for the process's part of an exchange.
        let is_owed = || {
            remote.local_ranks().any(|rank| running.contains(&rank))
                && (self.planes.exchange()
                    || self
                        .rendezvous
                        .read(|table| remote.ranks_of(process).any(|rank| table.owes(rank))))
        };
        self.exchanges_lost(process);
        if interrupted.is_empty() && !is_owed() {
            return;
        }
        self.lose(remote.ranks_of(process).start, interrupted, |rank| {
            CommError::Disconnected {
                rank,
                problem: problem.into(),
            }
        });
    }

    /// Fails the world with `error` of rank `first`, and continues without these ranks, which will
    /// not report.
    fn lose(
        &self,
        first: usize,
        ranks: impl IntoIterator<Item = usize>,
        error: impl Fn(usize) -> CommError,
    ) {
        self.rendezvous.find(Failure::Collective(error(first)));
        for rank in ranks {
            let report = RankReport {
                rank,
                activity: self.activity(rank),
                error: Some(error(rank).into()),
                at: None,
            };
            self.remote().lose(report);
            self.exited(rank);
        }
    }

    /// Compares the number of ranks in each process with that of process `from`. If they differ,
    /// the launch fails in both processes, and neither waits for ranks that the other does not
    /// have.
    fn compare_ranks(&self, from: usize, each: usize) {
        let remote = self.remote();
        let ranks = remote.ranks_of(from);
        if ranks.len() == each {
            return;
        }
        remote.refuse(from);
        self.membership.lost(from);
        if from == remote.first() {
            self.rendezvous.decide_here();
        }
        let process = remote.here();
        let processes = self.size / ranks.len().max(1);
        let size = self.size;
        let other_ranks = processes * each;
        self.lose(ranks.start, ranks.clone(), |rank| CommError::UnequalRanks {
            rank,
            process,
            ranks: size,
            other: from,
            other_ranks,
        });
    }

    fn handle(
        &self,
        from: usize,
        message: ControlMessage,
    ) -> Result<Option<PayloadTarget>, String> {
        let remote = self.remote();
        match message {
            ControlMessage::Joined {
                channel,
                seq,
                signature,
                mode,
                contents,
            } => {
                let id = (from, channel.number);
                let (group, member) = self.channel_of(from, channel)?;
                let signature = self.complete(id, group, signature)?;
                if mode == DataMode::Eager {
                    self.check_data(&contents, &signature, OpHandle { group, member, seq })?;
                }
                let posted = self
                    .rendezvous
                    .post(group, member, signature, CallData::Remote(mode));
                let Ok((op, is_needed)) = posted else {
                    return Ok(None);
                };
                if op.seq != seq {
                    return Err(format!(
                        "it sent call {seq} of a group where call {} is next",
                        op.seq
                    ));
                }
                if is_needed {
                    remote.answer(vec![op], true);
                }
                Ok((mode == DataMode::Eager).then_some(PayloadTarget::Collective(op)))
            }
            ControlMessage::Pull {
                channel,
                seq,
                wanted,
            } => {
                if let Some(data) = remote.answered(from, channel, seq, wanted)? {
                    self.send_data(from, channel, seq, data);
                }
                Ok(None)
            }
            ControlMessage::Data {
                channel,
                seq,
                contents,
            } => {
                let (group, member) = self.channel_of(
                    from,
                    RemoteGroupId {
                        number: channel,
                        introduction: None,
                    },
                )?;
                let op = OpHandle { group, member, seq };
                // There is no signature any more if no rank needs the data.
                if let Some(signature) = self.rendezvous.read(|table| table.signature(op).cloned())
                {
                    self.check_data(&contents, &signature, op)?;
                }
                Ok(Some(PayloadTarget::Collective(op)))
            }
            ControlMessage::Sent {
                channel,
                to,
                tag,
                signature,
                contents,
                exchanged,
            } => {
                let process = from;
                let (group, from) = self.channel_of(from, channel)?;
                let size = self.rendezvous.read(|table| table.ranks(group).len());
                if to >= size {
                    return Err(format!(
                        "it sent a message to member {to} of a group of {size}"
                    ));
                }
                if exchanged.is_some() && !self.planes.exchange() {
                    return Err("it exchanges a message, which no rank of this process does".into());
                }
                let has_data = || match exchanged {
                    None => contents.is_of_message(&signature),
                    // No allocation has more bytes.
                    Some(_) => contents.tensors.is_empty() && signature.bytes() < 1 << 48,
                };
                if !signature.fits(size) || !has_data() {
                    return Err("it sent a message whose data is not that of its signature".into());
                }
                let message = P2pMessage {
                    from,
                    tag,
                    signature,
                    part: None,
                };
                let Ok(message) = self.rendezvous.send(group, to, message) else {
                    return Ok(None);
                };
                let Some(number) = exchanged else {
                    return Ok(Some(PayloadTarget::Message(message)));
                };
                if self.message_sent(message, MessageId { process, number })? {
                    self.start_exchanges_in_background();
                }
                Ok(None)
            }
            ControlMessage::RankExited { report, exchanges } => {
                let rank = report.rank;
                if !remote.ranks_of(from).contains(&rank) {
                    return Err(format!(
                        "it reported the exit of rank {rank} of another process"
                    ));
                }
                if exchanges {
                    self.note_exchanging(from);
                }
                remote.exited(report);
                self.exited(rank);
                Ok(None)
            }
            ControlMessage::Failed { failure, decided } => {
                match decided {
                    true => self.rendezvous.decide(failure),
                    false => drop(self.rendezvous.find(failure)),
                }
                Ok(None)
            }
            ControlMessage::Membership(message) => {
                self.membership.hear(from, message).map(|()| None)
            }
            ControlMessage::Waits(edge) => self.handle_edge(from, edge).map(|()| None),
            ControlMessage::ExchangeReported {
                channel,
                seq,
                report,
            } => {
                let id = (from, channel.number);
                let (group, _) = self.channel_of(from, channel)?;
                self.receive_exchange_report(id, group, seq, report)?;
                Ok(None)
            }
            ControlMessage::ExchangeOrdered {
                owner,
                channel,
                seq,
                is_started,
            } => {
                self.receive_exchange_order(from, (owner, channel), seq, is_started)?;
                Ok(None)
            }
            ControlMessage::MessageTaken(id) => {
                if id.process >= remote.processes() {
                    return Err(format!(
                        "it received a message of process {}, which does not exist",
                        id.process
                    ));
                }
                self.receive_message_report(from, id)?;
                Ok(None)
            }
            ControlMessage::MessageOrdered(id) => {
                self.receive_message_order(from, id)?;
                Ok(None)
            }
            ControlMessage::ExchangesEnded => {
                self.exchanges_ended(from);
                Ok(None)
            }
            ControlMessage::Launched { each } => {
                self.compare_ranks(from, each);
                Ok(None)
            }
        }
    }

    /// Handles a deadlock detection message of process `from`.
    fn handle_edge(&self, from: usize, edge: WaitForEdge) -> Result<(), String> {
        let remote = self.remote();
        let (WaitForEdge::Needs { rank, other, .. }
        | WaitForEdge::Waiting { rank, other, .. }
        | WaitForEdge::WaitsFor { rank, other, .. }) = edge;
        if rank.max(other) >= remote.size() {
            return Err(format!(
                "it sent a wait of a rank that does not exist: {edge:?}"
            ));
        }
        let deadlock = match edge {
            WaitForEdge::Needs {
                rank,
                number,
                other,
            } => {
                if let Some(in_wait) = self.rendezvous.read(|table| table.wait_of(other)) {
                    let waiting = WaitForEdge::Waiting {
                        rank,
                        number,
                        other,
                        in_wait,
                    };
                    remote.notify_process(from, ControlMessage::Waits(waiting));
                }
                None
            }
            WaitForEdge::Waiting {
                rank,
                number,
                other,
                in_wait,
            } => {
                let during = self
                    .rendezvous
                    .read(|table| table.still_needs(rank, number, other));
                during.and_then(|during| {
                    remote.waits_for(WaitForEdge::WaitsFor {
                        rank,
                        number,
                        during,
                        other,
                        in_wait,
                    })
                })
            }
            waits_for @ WaitForEdge::WaitsFor { .. } if remote.decides() => {
                remote.waits_for(waits_for)
            }
            WaitForEdge::WaitsFor { .. } => None,
        };
        deadlock.map(|deadlock| self.rendezvous.find(deadlock));
        Ok(())
    }

    /// Returns the signature of a call on a channel of another process.
    fn complete(
        &self,
        channel: (usize, usize),
        group: GroupKey,
        sent: SentSignature,
    ) -> Result<CallSignature, String> {
        let signature = self
            .remote()
            .with_signatures(channel, |known| sent.complete(known));
        let signature = signature.ok_or("it has not sent the signature of its call")?;
        match self.rendezvous.read(|table| table.ranks(group).len()) {
            ranks if signature.fits(ranks) => Ok(signature),
            ranks => Err(format!(
                "it called with a signature that does not fit a group of {ranks}"
            )),
        }
    }

    /// Checks that `contents` is the data of the call `op` for the local ranks.
    fn check_data(
        &self,
        contents: &PayloadDesc,
        signature: &CallSignature,
        op: OpHandle,
    ) -> Result<(), String> {
        let ranks = self.rendezvous.read(|table| table.ranks(op.group).clone());
        let members: Vec<_> = self.local_members(&ranks).collect();
        if contents.is_of_call(
            signature,
            op.member,
            &Recipients {
                ranks: ranks.len(),
                members: &members,
            },
        ) {
            return Ok(());
        }
        Err(format!(
            "it sent data for members {:?} of {} tensors in call {} of a group, {}, which are not those of its signature",
            contents.recipients,
            contents.tensors.len(),
            op.seq,
            signature.op
        ))
    }

    /// Returns the group of a channel of another process, and the group rank of the caller.
    fn channel_of(&self, from: usize, channel: RemoteGroupId) -> Result<(GroupKey, usize), String> {
        self.remote().channel(from, channel, |ranks, name| {
            self.rendezvous.group(ranks, name)
        })
    }

    /// Returns the group ranks of the local ranks of a group.
    pub(super) fn local_members(&self, ranks: &[usize]) -> impl Iterator<Item = usize> {
        (0..ranks.len()).filter(move |member| self.local_ranks.contains(&ranks[*member]))
    }
}
