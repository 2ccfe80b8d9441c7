//! [`PeerProcesses`]: the other processes of a launch, and the messages to them.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use burn_dtensor_flight::LaunchId;
use parking_lot::Mutex;

use super::HostBackend;
use super::background::CompletionThread;
use super::match_table::{GroupKey, OpHandle, StalledWait};
use super::rendezvous::{PeerEvent, PeerNotifier};
use super::wait_for_graph::{WaitForEdge, WaitForGraph};
use crate::comm::backend::{CallSignature, Failure};
use crate::comm::membership::{Membership, MembershipMessage, MembershipPeers};
use crate::comm::process::header::{ControlMessage, Header, KnownSignatures, PayloadDesc};
use crate::comm::process::result_buffer::ResultBuffer;
use crate::comm::transport::{Message, Payload, SendStamp, Transport};
use crate::comm::{CommError, RankReport};
use crate::memory::HostMemoryPool;

/// The other processes of a launch.
pub(in crate::comm) struct PeerProcesses {
    courier: Arc<dyn Transport>,
    launch: LaunchId,
    /// Ranks of each process.
    ranks: Vec<Range<usize>>,
    /// Routes the messages of a launch to its backend.
    begin: Begin,
    /// Number of channels of this process so far.
    numbers: AtomicUsize,
    pub(super) channels: Mutex<Channels>,
    /// Data offered on demand, by process, channel and sequence number of the call.
    pub(super) offered: Mutex<HashMap<(usize, usize, u64), Offer>>,
    pub(super) completion: CompletionThread,
    /// Result buffers into which remote shards are received.
    pub(super) result_buffers: Mutex<HashMap<CollectiveKey, Weak<ResultBuffer>>>,
    /// Pool of the memory of result buffers. The thread of the rank, of the completion or of the transport
    /// allocates from it.
    pub(super) memory: Arc<HostMemoryPool>,
    /// Graph of the waits of ranks in several processes. The first process maintains it.
    chains: Mutex<WaitForGraph>,
    /// Outcomes of ranks of all processes that have ended.
    pub(super) ended: Mutex<BTreeMap<usize, Ended>>,
    /// True if the [first](Self::first) process is lost.
    first_is_lost: AtomicBool,
}

pub(super) enum Ended {
    /// The rank has ended, as its process reported.
    Said(RankReport),
    /// The process of the rank was lost, or its program did not end in time.
    Lost(RankReport),
}

pub(in crate::comm) type Begin = Arc<dyn Fn(LaunchId, &Arc<HostBackend>) + Send + Sync>;

/// Group of a collective, and its sequence number.
pub(super) type CollectiveKey = (GroupKey, u64);

/// Data offered on demand: its description and the payloads.
type Offer = (PayloadDesc, Vec<Payload>);

/// Channels of other processes, each identified by a process and a number, mapped to the group and the caller's
/// group rank; and the reverse.
#[derive(Default)]
pub(super) struct Channels {
    pub places: HashMap<(usize, usize), (GroupKey, usize)>,
    pub numbers: HashMap<(GroupKey, usize), (usize, usize)>,
    /// Signatures that were received on each channel.
    pub prints: HashMap<(usize, usize), KnownSignatures<CallSignature>>,
}

impl PeerProcesses {
    /// Creates the processes of a launch, with `counts` ranks each.
    pub fn new(courier: Arc<dyn Transport>, launch: LaunchId, counts: &[usize], begin: Begin) -> Self {
        let ends = counts.iter().scan(0, |end, count| {
            *end += count;
            Some(*end)
        });
        let ranks = ends.zip(counts).map(|(end, count)| end - count..end).collect();
        let (numbers, channels) = (AtomicUsize::default(), Mutex::default());
        let (offered, completion) = (Mutex::default(), CompletionThread::default());
        let (result_buffers, memory) = (Mutex::default(), Arc::default());
        let (chains, ended) = (Mutex::default(), Mutex::default());
        let first_is_lost = AtomicBool::new(false);
        Self {
            courier,
            launch,
            ranks,
            begin,
            numbers,
            channels,
            offered,
            completion,
            result_buffers,
            memory,
            chains,
            ended,
            first_is_lost,
        }
    }

    /// Creates the processes of the next launch, which has only the surviving `ranks`.
    pub fn of_those(&self, ranks: &[usize]) -> Self {
        let count = |range: &Range<usize>| ranks.iter().filter(|rank| range.contains(rank)).count();
        let counts: Vec<_> = self.ranks.iter().map(count).collect();
        Self::new(self.courier.clone(), self.launch.next(), &counts, self.begin.clone())
    }

    /// Registers the backend of the next launch, so that it receives the messages for it.
    pub fn begin(&self, next: &Arc<HostBackend>) {
        (self.begin)(self.launch.next(), next);
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
    pub(super) fn membership(self: &Arc<Self>) -> Membership {
        Membership::of_processes(&self.ranks, self.courier.process_index(), self.clone())
    }

    /// Returns the ranks of this process.
    pub fn here(&self) -> Range<usize> {
        self.of(self.courier.process_index())
    }

    /// Returns the ranks of a process.
    pub(super) fn of(&self, process: usize) -> Range<usize> {
        self.ranks[process].clone()
    }

    /// Returns the process that a rank is in.
    pub fn process_of(&self, rank: usize) -> usize {
        self.ranks.partition_point(|ranks| ranks.end <= rank)
    }

    /// Returns the process that decides which failure is the first: that of rank 0.
    pub(super) fn first(&self) -> usize {
        self.process_of(0)
    }

    /// Returns true if this process decides which failure is the first.
    pub fn decides(&self) -> bool {
        self.courier.process_index() == self.first()
    }

    /// Returns a new channel number of this process.
    pub fn number(&self) -> usize {
        self.numbers.fetch_add(1, Ordering::Relaxed)
    }

    /// Sends a control message and its payloads to a process.
    pub fn send(&self, to: usize, word: ControlMessage, payloads: Vec<Payload>) {
        self.send_noted(to, word, payloads, None);
    }

    /// Like [`send`](Self::send), and records in `taken` when the message is sent.
    pub fn send_noted(&self, to: usize, word: ControlMessage, payloads: Vec<Payload>, taken: Option<SendStamp>) {
        self.courier.send(to, Message { header: Header { launch: self.launch, word }.write(), payloads, taken });
    }

    fn send_all(&self, word: impl Fn() -> ControlMessage) {
        let here = self.courier.process_index();
        let others = (0..self.ranks.len()).filter(|process| *process != here && !self.ranks[*process].is_empty());
        others.for_each(|process| self.send(process, word(), Vec::new()));
    }

    /// Keeps offered data until the process requests or declines it.
    pub fn keep(&self, call: (usize, usize, u64), contents: PayloadDesc, payloads: Vec<Payload>) {
        self.offered.lock().insert(call, (contents, payloads));
    }

    /// Requests the offered contributions of ranks of other processes, or declines them.
    pub fn answer(&self, offers: Vec<OpHandle>, wanted: bool) {
        for OpHandle { group, member, seq } in offers {
            let place = self.channels.lock().numbers.get(&(group, member)).copied();
            let (process, channel) = place.expect("the offer came on a known channel");
            self.send(process, ControlMessage::Pull { channel, seq, wanted }, Vec::new());
        }
    }

    /// Passes an edge of the wait-for graph to the first process. If this is the first process, returns a deadlock
    /// that the edge completes.
    pub(super) fn waits_for(&self, chain: WaitForEdge) -> Option<Failure> {
        if !self.decides() {
            self.send(self.first(), ControlMessage::Waits(chain), Vec::new());
            return None;
        }
        let WaitForEdge::WaitsFor { rank, number, during, other, in_wait } = chain else { return None };
        let waits = self.chains.lock().add(rank, number, during, other, in_wait)?;
        Some(Failure::Collective(CommError::Deadlock { waits }))
    }

    /// Records that the first process is lost, so that every process decides by itself which failure is the first.
    pub fn lose_first(&self) {
        self.first_is_lost.store(true, Ordering::Relaxed);
    }

    /// Sends a local failure: to all processes if this process decides, and to the first process otherwise.
    fn tell_failure(&self, failure: Failure) {
        let decided = self.decides() || self.first_is_lost.load(Ordering::Relaxed);
        let word = || ControlMessage::Failed { failure: failure.clone(), decided };
        if decided { self.send_all(word) } else { self.send(self.first(), word(), Vec::new()) }
    }

    /// Sends the report of a local rank that has exited to all other processes.
    pub fn leave(&self, report: RankReport) {
        self.send_all(|| ControlMessage::RankExited(report.clone()));
        self.ended.lock().insert(report.rank, Ended::Said(report));
    }

    /// Records the report of a rank of another process that will not send one.
    pub(super) fn lose(&self, report: RankReport) {
        self.ended.lock().insert(report.rank, Ended::Lost(report));
    }

    /// Lets this process end without the processes of the ranks in `running`, whose programs have not ended in time,
    /// and not without the others, except those that were [left behind](MembershipPeers::leave_behind) by a shrunk world.
    pub(super) fn finish(&self, running: &[usize]) {
        let here = self.courier.process_index();
        for process in (0..self.ranks.len()).filter(|process| *process != here && !self.ranks[*process].is_empty()) {
            let is_over = !running.iter().any(|rank| self.ranks[process].contains(rank));
            if !is_over || self.launch.shrunk == 0 {
                self.courier.await_end(process, is_over);
            }
        }
    }

    /// Returns the first rank whose program has failed, of the ranks for which `counts` returns true.
    pub fn unsuccessful(&self, counts: impl Fn(&usize) -> bool) -> Option<usize> {
        let ended = self.ended.lock();
        let mut reports = ended.values().map(Ended::report).filter(|report| counts(&report.rank));
        reports.find(|report| report.error.is_some()).map(|report| report.rank)
    }

    /// Returns the outcomes of the ranks of other processes.
    pub fn reports(&self) -> Vec<RankReport> {
        let (ended, here) = (self.ended.lock(), self.here());
        ended.values().map(Ended::report).filter(|report| !here.contains(&report.rank)).cloned().collect()
    }

    /// Returns true if the first process, which reports the outcome of the launch, does not report it.
    pub fn has_lost_first(&self) -> bool {
        let ended = self.ended.lock();
        self.of(self.first()).any(|rank| matches!(ended.get(&rank), Some(Ended::Lost(_))))
    }
}

impl MembershipPeers for PeerProcesses {
    fn notify(&self, message: &MembershipMessage) {
        self.send_all(|| ControlMessage::Membership(message.clone()));
    }

    fn leave_behind(&self, ranks: &[usize]) {
        ranks.iter().for_each(|rank| self.courier.await_end(self.process_of(*rank), false));
    }
}

impl PeerNotifier for PeerProcesses {
    fn tell(&self, news: PeerEvent) -> Option<Failure> {
        match news {
            PeerEvent::Failed(failure) => self.tell_failure(failure),
            PeerEvent::Declined(offers) => self.answer(offers, false),
            PeerEvent::Awaited => self.courier.poll_now(),
            PeerEvent::Waits(StalledWait { rank, number, during, needs }) => {
                for (other, in_wait) in needs {
                    let process = self.process_of(other);
                    if let Some(in_wait) = in_wait {
                        let chain = WaitForEdge::WaitsFor { rank, number, during: during.clone(), other, in_wait };
                        if let Some(deadlock) = self.waits_for(chain) {
                            return Some(deadlock);
                        }
                    } else if process != self.courier.process_index() {
                        self.send(
                            process,
                            ControlMessage::Waits(WaitForEdge::Needs { rank, number, other }),
                            Vec::new(),
                        );
                    }
                }
            }
        }
        None
    }

    fn help(&self) -> Option<bool> {
        self.courier.progress()
    }
}

impl Ended {
    fn report(&self) -> &RankReport {
        match self {
            Self::Said(report) | Self::Lost(report) => report,
        }
    }
}
