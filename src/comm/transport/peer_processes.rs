//! [`PeerProcesses`]: the other processes of a launch, and the messages to them.

use std::collections::{BTreeMap, HashMap};
use std::mem;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use burn_dtensor_flight::LaunchId;
use parking_lot::Mutex;

use super::header::{
    ControlMessage, Header, KnownSignatures, PayloadDesc, RemoteGroupId, RemoteGroupInfo,
};
use super::{Message, Payload, SendStamp, Transport};
use crate::comm::backend::{CallSignature, Failure};
use crate::comm::control::match_table::{GroupKey, OpHandle, StalledWait};
use crate::comm::control::membership::{Membership, MembershipMessage, MembershipPeers};
use crate::comm::control::rendezvous::{PeerEvent, PeerNotifier};
use crate::comm::control::wait_for_graph::{WaitForEdge, WaitForGraph};
use crate::comm::{CommError, RankReport};

/// The other processes of a launch.
pub(in crate::comm) struct PeerProcesses {
    transport: Arc<dyn Transport>,
    launch: LaunchId,
    /// Ranks of each process.
    ranks: Vec<Range<usize>>,
    /// Number of channels of this process so far.
    numbers: AtomicUsize,
    channels: Mutex<Channels>,
    /// Data offered on demand, by process, channel and sequence number of the call.
    offered: Mutex<HashMap<(usize, usize, u64), PayloadData>>,
    /// Graph of the waits of ranks in several processes. The first process maintains it.
    waits: Mutex<WaitForGraph>,
    /// Outcomes of ranks of all processes that have ended.
    ended: Mutex<BTreeMap<usize, EndedRank>>,
    /// Processes that have made the launch with another number of ranks, whose messages make no
    /// sense here.
    refused: Mutex<Vec<usize>>,
}

struct EndedRank {
    report: RankReport,
    /// True if the process of the rank was lost, or its program did not end in time.
    is_lost: bool,
}

/// Tensors for another process.
#[derive(Clone, Default)]
pub(in crate::comm) struct PayloadData {
    pub contents: PayloadDesc,
    pub payloads: Vec<Payload>,
    /// Global rank whose device has the elements; `None` if they are in host memory.
    pub device_of: Option<usize>,
}

impl PayloadData {
    /// Copies the elements to the host, if they are on a device. Waits for the device.
    pub fn read(&self) {
        self.payloads
            .iter()
            .for_each(|payload| _ = (**payload).as_ref());
    }
}

/// A channel of another process: the process and a number that it has assigned.
pub(in crate::comm) type ChannelId = (usize, usize);

/// Channels of other processes, mapped to the group and the caller's group rank; and the reverse.
#[derive(Default)]
struct Channels {
    members: HashMap<ChannelId, (GroupKey, usize)>,
    ids: HashMap<(GroupKey, usize), ChannelId>,
    /// Signatures that were received on each channel.
    signatures: HashMap<ChannelId, KnownSignatures<CallSignature>>,
}

impl PeerProcesses {
    /// Creates the processes of a launch, with `counts` ranks each.
    pub fn new(transport: Arc<dyn Transport>, launch: LaunchId, counts: &[usize]) -> Self {
        let ends = counts.iter().scan(0, |end, count| {
            *end += count;
            Some(*end)
        });
        let ranks = ends
            .zip(counts)
            .map(|(end, count)| end - count..end)
            .collect();
        let numbers = AtomicUsize::default();
        let channels = Mutex::default();
        let offered = Mutex::default();
        let waits = Mutex::default();
        let ended = Mutex::default();
        let refused = Mutex::default();
        Self {
            transport,
            launch,
            ranks,
            numbers,
            channels,
            offered,
            waits,
            ended,
            refused,
        }
    }

    /// Creates the processes of the next launch, which has only the surviving `ranks`.
    pub fn of_survivors(&self, ranks: &[usize]) -> Self {
        let counts: Vec<_> = self
            .ranks
            .iter()
            .map(|range| ranks.iter().filter(|rank| range.contains(rank)).count())
            .collect();
        Self::new(self.transport.clone(), self.launch.next(), &counts)
    }

    /// Returns the id of the launch.
    pub fn launch(&self) -> LaunchId {
        self.launch
    }

    /// Returns the number of ranks of the launch.
    pub fn size(&self) -> usize {
        self.ranks.last().map_or(0, |ranks| ranks.end)
    }

    /// Returns the agreement of the launch's processes on the survivors of a failure.
    pub fn membership(self: &Arc<Self>) -> Membership {
        Membership::of_processes(&self.ranks, self.transport.process_index(), self.clone())
    }

    /// Returns the ranks of this process.
    pub fn local_ranks(&self) -> Range<usize> {
        self.ranks_of(self.transport.process_index())
    }

    /// Returns the number of processes.
    pub fn processes(&self) -> usize {
        self.ranks.len()
    }

    /// Returns the ranks of a process.
    pub fn ranks_of(&self, process: usize) -> Range<usize> {
        self.ranks[process].clone()
    }

    /// Returns the process that a rank is in.
    pub fn process_of(&self, rank: usize) -> usize {
        self.ranks.partition_point(|ranks| ranks.end <= rank)
    }

    /// Returns the process that decides which failure is the first: that of rank 0.
    pub fn first(&self) -> usize {
        self.process_of(0)
    }

    /// Returns the index of this process.
    pub fn here(&self) -> usize {
        self.transport.process_index()
    }

    /// Notifies the other processes of the launch, which has `each` ranks in every process.
    pub fn announce(&self, each: usize) {
        self.notify_all(|| ControlMessage::Launched { each });
    }

    /// Ignores all further messages of a process.
    pub fn refuse(&self, process: usize) {
        self.refused.lock().push(process);
    }

    /// Returns true if messages of the process are ignored.
    pub fn refuses(&self, process: usize) -> bool {
        self.refused.lock().contains(&process)
    }

    /// Returns true if this process decides which failure is the first.
    pub fn decides(&self) -> bool {
        self.transport.process_index() == self.first()
    }

    /// Returns a new channel number of this process.
    pub fn number(&self) -> usize {
        self.numbers.fetch_add(1, Ordering::Relaxed)
    }

    /// Sends a control message and its payloads to a process. Records in `taken` when the message
    /// is sent.
    pub fn send(
        &self,
        to: usize,
        message: ControlMessage,
        payloads: Vec<Payload>,
        taken: Option<SendStamp>,
    ) {
        self.transport.send(
            to,
            Message {
                header: Header {
                    launch: self.launch,
                    message,
                }
                .write(),
                payloads,
                taken,
            },
        );
    }

    /// Sends the data of a call that was posted without it.
    pub fn send_data(
        &self,
        to: usize,
        channel: usize,
        seq: u64,
        PayloadData {
            contents, payloads, ..
        }: PayloadData,
    ) {
        self.send(
            to,
            ControlMessage::Data {
                channel,
                seq,
                contents,
            },
            payloads,
            None,
        );
    }

    /// Sends a message without payloads.
    pub fn notify_process(&self, to: usize, message: ControlMessage) {
        self.send(to, message, Vec::new(), None);
    }

    fn notify_all(&self, message: impl Fn() -> ControlMessage) {
        self.peers()
            .for_each(|process| self.notify_process(process, message()));
    }

    /// Returns the other processes that have ranks.
    fn peers(&self) -> impl Iterator<Item = usize> {
        let here = self.transport.process_index();
        (0..self.ranks.len())
            .filter(move |process| *process != here && !self.ranks[*process].is_empty())
    }

    /// Keeps offered data until the process requests or declines it.
    pub fn offer(&self, to: usize, channel: usize, seq: u64, data: PayloadData) {
        self.offered.lock().insert((to, channel, seq), data);
    }

    /// Drops all offered data, after a failure.
    pub fn withdraw_offers(&self) {
        // Dropped outside the lock.
        let withdrawn = mem::take(&mut *self.offered.lock());
        drop(withdrawn);
    }

    /// Returns the data of an offer that process `from` has answered, if it is wanted.
    pub fn answered(
        &self,
        from: usize,
        channel: usize,
        seq: u64,
        wanted: bool,
    ) -> Result<Option<PayloadData>, String> {
        let offered = self.offered.lock().remove(&(from, channel, seq));
        let data = offered.ok_or_else(|| {
            format!("it requested data that was not offered in call {seq} of channel {channel}")
        })?;
        Ok(wanted.then_some(data))
    }

    /// Requests the offered contributions of ranks of other processes, or declines them.
    pub fn answer(&self, offers: Vec<OpHandle>, wanted: bool) {
        for OpHandle { group, member, seq } in offers {
            let id = self.channels.lock().ids.get(&(group, member)).copied();
            let (process, channel) = id.expect("the offer came on a known channel");
            self.notify_process(
                process,
                ControlMessage::Pull {
                    channel,
                    seq,
                    wanted,
                },
            );
        }
    }

    /// Returns the group of a channel of process `from`, and the group rank of the caller. `group`
    /// returns the key of a group that the process introduces.
    pub fn channel(
        &self,
        from: usize,
        channel: RemoteGroupId,
        group: impl FnOnce(&[usize], String) -> GroupKey,
    ) -> Result<(GroupKey, usize), String> {
        let id = (from, channel.number);
        let mut channels = self.channels.lock();
        let Some(RemoteGroupInfo {
            ranks,
            name,
            member,
        }) = channel.introduction
        else {
            let known = channels.members.get(&id).copied();
            return known
                .ok_or_else(|| format!("it has not introduced channel {}", channel.number));
        };
        if !ranks.iter().all(|rank| *rank < self.size())
            || !ranks
                .get(member)
                .is_some_and(|rank| self.ranks_of(from).contains(rank))
        {
            return Err(format!(
                "it called as invalid member {member} of a group of ranks {ranks:?}"
            ));
        }
        let of_group = (group(&ranks, name), member);
        channels.members.insert(id, of_group);
        channels.ids.insert(of_group, id);
        Ok(of_group)
    }

    /// Returns the group of a channel of another process, once it was introduced.
    pub fn group_of(&self, channel: ChannelId) -> Option<GroupKey> {
        let channels = self.channels.lock();
        channels.members.get(&channel).map(|(group, _)| *group)
    }

    /// Passes the signatures that were received on a channel to `complete`.
    pub fn with_signatures<T>(
        &self,
        channel: ChannelId,
        complete: impl FnOnce(&mut KnownSignatures<CallSignature>) -> T,
    ) -> T {
        complete(self.channels.lock().signatures.entry(channel).or_default())
    }

    /// Passes an edge of the wait-for graph to the first process. If this is the first process,
    /// returns a deadlock that the edge completes.
    pub fn waits_for(&self, edge: WaitForEdge) -> Option<Failure> {
        if !self.decides() {
            self.notify_process(self.first(), ControlMessage::Waits(edge));
            return None;
        }
        let WaitForEdge::WaitsFor {
            rank,
            number,
            during,
            other,
            in_wait,
        } = edge
        else {
            return None;
        };
        let waits = self
            .waits
            .lock()
            .add(rank, number, during, other, in_wait)?;
        Some(Failure::Collective(CommError::Deadlock { waits }))
    }

    /// Sends the report of a local rank that has exited to all other processes, and whether ranks here
    /// exchange tensors.
    pub fn exit(&self, report: RankReport, exchanges: bool) {
        self.notify_all(|| ControlMessage::RankExited {
            report: report.clone(),
            exchanges,
        });
        self.ended.lock().insert(
            report.rank,
            EndedRank {
                report,
                is_lost: false,
            },
        );
    }

    /// Records the report that the process of a rank has sent, unless the process was lost before.
    pub fn exited(&self, report: RankReport) {
        self.ended.lock().entry(report.rank).or_insert(EndedRank {
            report,
            is_lost: false,
        });
    }

    /// Records the report of a rank of another process that will not send one.
    pub fn lose(&self, report: RankReport) {
        self.ended.lock().insert(
            report.rank,
            EndedRank {
                report,
                is_lost: true,
            },
        );
    }

    /// Lets this process end without the processes of the ranks in `running`, whose programs have
    /// not ended in time, and not without the others, except those that were [left
    /// behind](MembershipPeers::leave_behind) by a shrunk world.
    pub fn finish(&self, running: &[usize]) {
        for process in self.peers() {
            let is_over = !running
                .iter()
                .any(|rank| self.ranks[process].contains(rank));
            if !is_over || self.launch.shrunk == 0 {
                self.transport.await_end(process, is_over);
            }
        }
    }

    /// Returns the first rank whose program has failed, of the ranks for which `counts` returns
    /// true.
    pub fn unsuccessful(&self, counts: impl Fn(&usize) -> bool) -> Option<usize> {
        let ended = self.ended.lock();
        let mut failed = ended
            .iter()
            .filter(|(_, ended)| ended.report.error.is_some());
        failed.find(|(rank, _)| counts(rank)).map(|(rank, _)| *rank)
    }

    /// Returns the outcomes of the ranks of other processes.
    pub fn reports(&self) -> Vec<RankReport> {
        let ended = self.ended.lock();
        let here = self.local_ranks();
        ended
            .values()
            .map(|ended| &ended.report)
            .filter(|report| !here.contains(&report.rank))
            .cloned()
            .collect()
    }

    /// Returns true if the first process, which reports the outcome of the launch, does not report
    /// it.
    pub fn has_lost_first(&self) -> bool {
        let ended = self.ended.lock();
        self.ranks_of(self.first())
            .any(|rank| ended.get(&rank).is_some_and(|ended| ended.is_lost))
    }
}

impl MembershipPeers for PeerProcesses {
    fn notify(&self, message: &MembershipMessage) {
        self.notify_all(|| ControlMessage::Membership(message.clone()));
    }

    fn leave_behind(&self, ranks: &[usize]) {
        ranks
            .iter()
            .for_each(|rank| self.transport.await_end(self.process_of(*rank), false));
    }
}

impl PeerNotifier for PeerProcesses {
    fn notify(&self, event: PeerEvent) -> Option<Failure> {
        match event {
            PeerEvent::Failed { failure, decided } => {
                let message = || ControlMessage::Failed {
                    failure: failure.clone(),
                    decided,
                };
                if decided {
                    self.notify_all(message)
                } else {
                    self.notify_process(self.first(), message())
                }
                None
            }
            PeerEvent::Declined(offers) => {
                self.answer(offers, false);
                None
            }
            PeerEvent::Awaited => {
                self.transport.poll_now();
                None
            }
            PeerEvent::Waits(StalledWait {
                rank,
                number,
                during,
                needs,
            }) => {
                let here = self.transport.process_index();
                needs.into_iter().find_map(|(other, in_wait)| {
                    match (in_wait, self.process_of(other)) {
                        (Some(in_wait), _) => self.waits_for(WaitForEdge::WaitsFor {
                            rank,
                            number,
                            during: during.clone(),
                            other,
                            in_wait,
                        }),
                        (None, process) if process != here => {
                            self.notify_process(
                                process,
                                ControlMessage::Waits(WaitForEdge::Needs {
                                    rank,
                                    number,
                                    other,
                                }),
                            );
                            None
                        }
                        (None, _) => None,
                    }
                })
            }
        }
    }

    fn progress(&self) -> Option<bool> {
        self.transport.progress()
    }
}
