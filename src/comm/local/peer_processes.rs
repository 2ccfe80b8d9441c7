//! [`PeerProcesses`]: the other processes of a launch, and what is said to them.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use super::HostBackend;
use super::completion_thread::CompletionThread;
use super::match_table::{GroupKey, OpHandle, StalledWait};
use super::membership::MembershipMessage;
use super::rendezvous::{PeerEvent, PeerNotifier};
use super::shrink::ShrinkState;
use super::wait_for_graph::{WaitForEdge, WaitForGraph};
use crate::comm::backend::{CallSignature, Failure};
use crate::comm::process::header::{ControlMessage, EncodedSignature, Header, LaunchId, PayloadDesc};
use crate::comm::process::result_buffer::ResultBuffer;
use crate::comm::transport::{Message, Payload, SendStamp, Transport};
use crate::comm::{CommError, RankReport};
use crate::memory::HostMemoryPool;
use crate::memory::shared_memory::SharedMemoryPool;

/// The other processes of a launch.
pub(in crate::comm) struct PeerProcesses {
    courier: Arc<dyn Transport>,
    commons: Arc<SharedMemoryPool>,
    launch: LaunchId,
    /// Of every process.
    ranks: Vec<Range<usize>>,
    /// Has what others say of a launch come to its engine.
    begin: Begin,
    /// Numbers of channels here, so far.
    numbers: AtomicUsize,
    pub(super) channels: Mutex<Channels>,
    /// What was offered, by the process, the channel and the call.
    pub(super) offered: Mutex<HashMap<(usize, usize, u64), Offer>>,
    pub(super) hands: CompletionThread,
    /// Results in which parts land.
    pub(super) result_buffers: Mutex<HashMap<CollectiveKey, Weak<ResultBuffer>>>,
    /// Where their memory waits for the next ones, whichever thread needs them first: the rank's, the hands or the
    /// courier's.
    pub(super) memory: Arc<HostMemoryPool>,
    /// Who waits for whom, as far as the first process knows.
    chains: Mutex<WaitForGraph>,
    /// How ranks have ended, of all processes.
    pub(super) ended: Mutex<BTreeMap<usize, Ended>>,
    /// Whether the [first](Self::first) process hears nothing any more.
    first_is_lost: AtomicBool,
}

pub(super) enum Ended {
    /// As its process says.
    Said(RankReport),
    /// With its process, which is lost.
    Lost(RankReport),
}

pub(in crate::comm) type Begin = Arc<dyn Fn(LaunchId, &Arc<HostBackend>) + Send + Sync>;

/// A group, and the sequence number of one of its collectives.
pub(super) type CollectiveKey = (GroupKey, u64);

/// What was offered: a description, and payloads.
type Offer = (PayloadDesc, Vec<Payload>);

/// The channels of other processes: of each process and number the group, and the rank's position in it; and back.
#[derive(Default)]
pub(super) struct Channels {
    pub places: HashMap<(usize, usize), (GroupKey, usize)>,
    pub numbers: HashMap<(GroupKey, usize), (usize, usize)>,
    /// What is known by a number, of each channel.
    pub prints: HashMap<(usize, usize), Vec<CallSignature>>,
}

impl PeerProcesses {
    /// With so many ranks in each process.
    pub fn new(
        courier: Arc<dyn Transport>,
        commons: Arc<SharedMemoryPool>,
        launch: LaunchId,
        counts: &[usize],
        begin: Begin,
    ) -> Self {
        let ends = counts.iter().scan(0, |end, count| {
            *end += count;
            Some(*end)
        });
        let ranks = ends.zip(counts).map(|(end, count)| end - count..end).collect();
        let (numbers, channels) = (AtomicUsize::default(), Mutex::default());
        let (offered, hands) = (Mutex::default(), CompletionThread::default());
        let (result_buffers, memory) = (Mutex::default(), Arc::default());
        let (chains, ended) = (Mutex::default(), Mutex::default());
        let first_is_lost = AtomicBool::new(false);
        Self {
            courier,
            commons,
            launch,
            ranks,
            begin,
            numbers,
            channels,
            offered,
            hands,
            result_buffers,
            memory,
            chains,
            ended,
            first_is_lost,
        }
    }

    /// Those of a launch of some of these ranks.
    pub fn of_those(&self, ranks: &[usize]) -> Self {
        let count = |range: &Range<usize>| ranks.iter().filter(|rank| range.contains(rank)).count();
        let counts: Vec<_> = self.ranks.iter().map(count).collect();
        let commons = Arc::new(self.commons.reset());
        Self::new(self.courier.clone(), commons, self.launch.next(), &counts, self.begin.clone())
    }

    /// The engine of the launch that follows is there.
    pub fn begin(&self, next: &Arc<HostBackend>) {
        (self.begin)(self.launch.next(), next);
    }

    /// All ranks of the launch.
    pub fn size(&self) -> usize {
        self.ranks.last().map_or(0, |ranks| ranks.end)
    }

    /// Who goes on after a failure: nobody knows yet.
    pub(super) fn going_on(&self) -> ShrinkState {
        ShrinkState::new(self.ranks.iter().cloned(), self.courier.process_index())
    }

    /// The ranks of this process.
    pub fn here(&self) -> Range<usize> {
        self.of(self.courier.process_index())
    }

    /// The ranks of a process.
    pub(super) fn of(&self, process: usize) -> Range<usize> {
        self.ranks[process].clone()
    }

    /// The process that a rank is in.
    pub fn process_of(&self, rank: usize) -> usize {
        self.ranks.partition_point(|ranks| ranks.end <= rank)
    }

    /// The process that says which failure is the first: that of rank 0.
    pub(super) fn first(&self) -> usize {
        self.process_of(0)
    }

    /// Whether this process does.
    pub fn decides(&self) -> bool {
        self.courier.process_index() == self.first()
    }

    /// What this process has in common with others.
    pub fn commons(&self) -> &SharedMemoryPool {
        &self.commons
    }

    /// Whether ranks of this process and of `others` may have memory in common. Not once a process may have been lost:
    /// what it has used stays in use.
    pub fn have_in_common(&self, mut others: impl Iterator<Item = usize>) -> bool {
        self.launch.shrunk == 0 && others.all(|other| self.courier.shares_memory(other))
    }

    /// A number for a channel of this process.
    pub fn number(&self) -> usize {
        self.numbers.fetch_add(1, Ordering::Relaxed)
    }

    /// Sends `word` and what belongs to it.
    pub fn send(&self, to: usize, word: ControlMessage<&EncodedSignature>, payloads: Vec<Payload>) {
        self.send_noted(to, word, payloads, None);
    }

    /// The same, noted when it is `taken` up.
    pub fn send_noted(
        &self,
        to: usize,
        word: ControlMessage<&EncodedSignature>,
        payloads: Vec<Payload>,
        taken: Option<SendStamp>,
    ) {
        self.courier.send(to, Message { header: Header { launch: self.launch, word }.write(), payloads, taken });
    }

    fn send_all(&self, word: impl Fn() -> ControlMessage<&'static EncodedSignature>) {
        let here = self.courier.process_index();
        let others = (0..self.ranks.len()).filter(|process| *process != here && !self.ranks[*process].is_empty());
        others.for_each(|process| self.send(process, word(), Vec::new()));
    }

    /// Keeps what is offered until the process has answered.
    pub fn keep(&self, call: (usize, usize, u64), contents: PayloadDesc, payloads: Vec<Payload>) {
        self.offered.lock().insert(call, (contents, payloads));
    }

    /// Asks for what ranks of other processes have offered, or declines it.
    pub fn answer(&self, offers: Vec<OpHandle>, wanted: bool) {
        for OpHandle { group, member, seq } in offers {
            let place = self.channels.lock().numbers.get(&(group, member)).copied();
            let (process, channel) = place.expect("who has offered has said on which channel");
            self.send(process, ControlMessage::Pull { channel, seq, wanted }, Vec::new());
        }
    }

    /// The first process looks for a cycle of waits: a failure, if this is it and there is one.
    pub(super) fn waits_for(&self, chain: WaitForEdge) -> Option<Failure> {
        if !self.decides() {
            self.send(self.first(), ControlMessage::Waits(chain), Vec::new());
            return None;
        }
        let WaitForEdge::WaitsFor { rank, number, during, other, in_wait } = chain else { return None };
        let waits = self.chains.lock().add(rank, number, during, other, in_wait)?;
        Some(Failure::Collective(CommError::Deadlock { waits }))
    }

    /// Nothing more comes from the first process, nor does it hear anything: each decides which failure is the first.
    pub fn lose_first(&self) {
        self.first_is_lost.store(true, Ordering::Relaxed);
    }

    /// A failure that was found here: an end for all, or something to be decided.
    fn tell_failure(&self, failure: Failure) {
        let decided = self.decides() || self.first_is_lost.load(Ordering::Relaxed);
        let word = || ControlMessage::Failed { failure: failure.clone(), decided };
        if decided { self.send_all(word) } else { self.send(self.first(), word(), Vec::new()) }
    }

    /// Something about who goes on.
    pub fn notify(&self, notice: &MembershipMessage) {
        self.send_all(|| ControlMessage::Membership(notice.clone()));
    }

    /// A rank of this process has left.
    pub fn leave(&self, report: RankReport) {
        self.send_all(|| ControlMessage::RankExited(report.clone()));
        self.ended.lock().insert(report.rank, Ended::Said(report));
    }

    /// The first rank whose program has not succeeded, of those that count.
    pub fn unsuccessful(&self, counts: impl Fn(&usize) -> bool) -> Option<usize> {
        let ended = self.ended.lock();
        let mut reports = ended.values().map(Ended::report).filter(|report| counts(&report.rank));
        reports.find(|report| report.error.is_some()).map(|report| report.rank)
    }

    /// How the ranks of other processes have ended.
    pub fn reports(&self) -> Vec<RankReport> {
        let (ended, here) = (self.ended.lock(), self.here());
        ended.values().map(Ended::report).filter(|report| !here.contains(&report.rank)).cloned().collect()
    }

    /// Whether the first process, which reports to whoever has started all, is lost before the end of its ranks.
    pub fn has_lost_first(&self) -> bool {
        let ended = self.ended.lock();
        self.of(self.first()).any(|rank| matches!(ended.get(&rank), Some(Ended::Lost(_))))
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
