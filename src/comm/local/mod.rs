//! [`HostBackend`]: the backend for ranks that are threads, in one or more processes.
//!
//! A collective has two steps. Posting it adds references to the rank's tensors, with a signature, to the
//! [`MatchTable`](match_table) and never blocks. Waiting blocks until every rank of the group has contributed to
//! the collective with this sequence number. The rank then builds its result directly from the memory of its peers.
//! Any number of collectives can therefore be in flight, and they can be waited for in any order.
//!
//! Within a process, tensors are passed by reference (zero-copy). A result that is identical on all ranks, such as
//! that of an all-gather or an all-reduce, is built by all ranks together and shared. Tensors are copy-on-write: a
//! rank that writes to a shared tensor writes to a private copy.
//!
//! The ranks of a launch may be in several [processes](super::process). A call is then also sent to every other
//! process that has ranks of the group ([`remote_group`]), which posts it on behalf of the calling rank
//! ([`remote`]). Between processes, a large all-reduce runs as a reduce-scatter followed by an all-gather
//! ([`two_phase_all_reduce`]). A request that its rank has not waited for may be completed in the
//! [`background`].
//!
//! On Cube devices, a list of tensors is packed into one flat buffer per rank, which kernels fill and read (module
//! `device`).

mod background;
mod channel;
mod contribution;
#[cfg(feature = "cube")]
mod device;
#[cfg(feature = "flex")]
mod host;
mod match_table;
mod peer_processes;
mod remote;
mod remote_group;
mod rendezvous;
mod requests;
mod sync;
mod two_phase_all_reduce;
mod wait_for_graph;

use std::ops::Range;
use std::panic::Location;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use burn_dtensor_flight::LaunchId;

use super::backend::{
    Backend, CallSignature, Failure, GroupBackend, GroupMember, ProcessOptions, RemoteOutcome, ShrunkWorld,
    device_number, launch_number,
};
use super::membership::Membership;
use super::{CommError, Divergence, Op, RankReport, launcher};
use crate::Error;

pub(super) use contribution::Contribution;
use match_table::OpHandle;
pub(super) use peer_processes::PeerProcesses;
pub(super) use remote::PayloadTarget;
pub(super) use rendezvous::LONGEST;
use rendezvous::{LINGER, PeerNotifier, SpinPolicy};
pub(super) use wait_for_graph::WaitForEdge;

/// State shared by the ranks of one [`launch`](super::launch) in one process.
pub(super) struct HostBackend {
    rendezvous: rendezvous::Rendezvous<CallSignature, Contribution>,
    /// Number of ranks in all processes.
    size: usize,
    /// Ranks of this process.
    here: Range<usize>,
    /// Other processes of the launch, if there are any.
    others: Option<Arc<PeerProcesses>>,
    /// Number of the launch in this process: 0, 1, ..
    launch: u64,
    /// Number of ranks whose programs have ended.
    left: AtomicUsize,
    manner: ProcessOptions,
    membership: Membership,
    /// Cache of results that several local ranks share; `None` if every rank needs separate memory.
    #[cfg(feature = "flex")]
    shelf: Option<host::SharedResultCache>,
    this: Weak<Self>,
}

/// Generous estimate of the time that a rank needs to post a collective, or to contribute to a small one. The
/// estimate is generous because a rank that is woken from sleep is so late that its peers fall asleep, too.
const TURN: Duration = Duration::from_micros(80);

/// Number of times that a rank with a core to itself polls before it sleeps, which takes about 40 microseconds.
/// Sleeping and waking takes as long, and so does one job of a cooperative result.
const LOOKS: u32 = 1000;

/// Number of times that a rank without a core to itself yields before it sleeps. While few ranks are runnable, one
/// round of all of them takes microseconds.
const YIELDS: u32 = 64;

/// Returns the policy by which `ranks` ranks spin or yield before they sleep.
fn lingers(ranks: usize) -> SpinPolicy {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    if ranks <= cores {
        return SpinPolicy::Spinning(LOOKS);
    }
    // All other ranks of the core may run before a waiter gets its core back.
    let round = TURN * ranks.div_ceil(cores) as u32;
    SpinPolicy::Yielding(YIELDS, LINGER.max(round))
}

/// Returns the cache of shared results, unless `manner` requires separate memory. The cache continues that of the
/// backend `before`, if there is one.
#[cfg(feature = "flex")]
fn shelf(manner: ProcessOptions, lingers: SpinPolicy, before: Option<&HostBackend>) -> Option<host::SharedResultCache> {
    let before = before.and_then(|engine| engine.shelf.as_ref());
    (!manner.separate_memory).then(|| host::SharedResultCache::new(lingers, before))
}

impl HostBackend {
    pub fn new(size: usize, manner: ProcessOptions) -> Arc<Self> {
        Self::after(None, size, manner)
    }

    /// Creates the backend of a program without ranks on one device. Any of its threads may use it.
    pub fn of_device() -> Arc<Self> {
        let manner = ProcessOptions { multithreaded: true, ..ProcessOptions::default() };
        Self::numbered(None, 1, manner, device_number())
    }

    /// Creates the backend of a launch within one process. After a `shrink`, `before` is the backend of the
    /// previous world.
    fn after(before: Option<&Self>, size: usize, manner: ProcessOptions) -> Arc<Self> {
        Self::numbered(before, size, manner, launch_number())
    }

    fn numbered(before: Option<&Self>, size: usize, manner: ProcessOptions, launch: u64) -> Arc<Self> {
        let lingers = lingers(size);
        let rendezvous = rendezvous::Rendezvous::new(size, lingers, manner.multithreaded);
        Arc::new_cyclic(|this| Self {
            rendezvous,
            size,
            here: 0..size,
            others: None,
            launch,
            left: AtomicUsize::new(0),
            manner,
            membership: Membership::of_threads(size),
            #[cfg(feature = "flex")]
            shelf: shelf(manner, lingers, before),
            this: this.clone(),
        })
    }

    /// Creates the backend of a launch in several processes. After a `shrink`, `before` is the backend of the
    /// previous world.
    pub(super) fn of_processes(before: Option<&Self>, others: PeerProcesses, manner: ProcessOptions) -> Arc<Self> {
        let others = Arc::new(others);
        let (size, decides) = (others.size(), others.decides());
        let rendezvous = rendezvous::Rendezvous::among_processes(size, manner.multithreaded, decides, others.clone());
        Arc::new_cyclic(|this| Self {
            rendezvous,
            size,
            here: others.here(),
            launch: launch_number(),
            left: AtomicUsize::new(0),
            manner,
            membership: others.membership(),
            others: Some(others),
            #[cfg(feature = "flex")]
            shelf: shelf(manner, SpinPolicy::Yielding(YIELDS, LINGER), before),
            this: this.clone(),
        })
    }

    /// Creates the backend of the surviving `ranks`.
    fn next_engine(&self, ranks: &[usize]) -> Arc<Self> {
        match &self.others {
            None => Self::after(Some(self), ranks.len(), self.manner),
            Some(others) => {
                let engine = Self::of_processes(Some(self), others.of_those(ranks), self.manner);
                others.begin(&engine);
                engine
            }
        }
    }

    /// Requests the contributions in `offers`, which ranks of other processes send on demand.
    fn ask(&self, offers: Vec<OpHandle>) {
        if let Some(others) = self.others.as_ref().filter(|_| !offers.is_empty()) {
            others.answer(offers, true);
        }
    }

    /// Makes progress on the communication with other processes for a moment.
    fn carry(&self) {
        if let Some(others) = &self.others {
            others.help();
        }
    }

    /// Records that the program of `rank`, in any process, has ended.
    fn left(&self, rank: usize) {
        if self.rendezvous.returned(rank) {
            self.left.fetch_add(1, Ordering::Relaxed);
            self.membership.exited(rank);
        }
    }
}

impl Backend for HostBackend {
    fn size(&self) -> usize {
        self.size
    }

    fn local_ranks(&self) -> Vec<usize> {
        self.here.clone().collect()
    }

    fn launch(&self) -> u64 {
        self.launch
    }

    fn launch_id(&self) -> LaunchId {
        let alone = || LaunchId::of_process(launcher::process_index(), self.launch);
        self.others.as_ref().map_or_else(alone, |others| others.launch())
    }

    fn channel(&self, member: GroupMember, name: &'static str) -> Arc<dyn GroupBackend> {
        let this = self.this.upgrade().expect("the caller has a reference to the backend");
        Arc::new(channel::HostGroupBackend::new(this, member, name))
    }

    fn fail(&self, failure: Failure) -> CommError {
        self.rendezvous.fail(failure)
    }

    fn failure(&self) -> Option<Failure> {
        self.rendezvous.failure()
    }

    fn rank_exited(&self, rank: usize, error: Option<Error>, at: Option<&'static Location<'static>>) {
        self.left(rank);
        if let Some(others) = &self.others {
            others.leave(RankReport { rank, doing: self.activity(rank), error, at: at.map(ToString::to_string) });
        }
    }

    fn activity(&self, rank: usize) -> String {
        self.rendezvous.doing(rank)
    }

    fn is_finished(&self) -> bool {
        self.left.load(Ordering::Relaxed) == self.size
    }

    fn shrink(&self, rank: usize, deadline: Duration) -> Result<ShrunkWorld, CommError> {
        self.fail(Failure::Collective(CommError::Revoked { rank }));
        // No collective completes any more.
        self.others.iter().for_each(|others| others.completion.forget());
        let ranks = self.membership.survivors(rank, deadline)?;
        let next = || ShrunkWorld { engine: self.next_engine(&ranks), ranks: ranks.clone() };
        Ok(self.membership.next_or(next))
    }

    fn successor(&self) -> Option<ShrunkWorld> {
        self.membership.next()
    }

    fn finish(&self, deadline: Duration) -> RemoteOutcome {
        let Some(others) = self.others.as_ref() else { return RemoteOutcome::default() };
        let running = self.rendezvous.finish(deadline);
        others.finish(&running);
        for rank in running {
            let error = Some(CommError::StillRunning { rank, deadline }.into());
            others.lose(RankReport { rank, doing: self.activity(rank), error, at: None });
        }
        others.completion.forget();
        // If the other ranks have continued without a remote rank, the outcome of that rank does not matter.
        let roster = self.membership.roster();
        let counts =
            |rank: &usize| self.here.contains(rank) || roster.as_ref().is_none_or(|ranks| ranks.contains(rank));
        let failure = others.unsuccessful(counts).map(|rank| {
            // The message with the cause may come from another process than the message that the rank has exited.
            let untold = || Failure::Failed { rank, message: "its process did not report the cause".into() };
            self.rendezvous.await_failure().unwrap_or_else(untold)
        });
        RemoteOutcome { failure, reports: others.reports(), is_told: !others.decides() && !others.has_lost_first() }
    }
}

impl match_table::Signature for CallSignature {
    fn op(&self) -> Op {
        self.op
    }

    fn label(&self) -> Arc<str> {
        self.label.clone()
    }

    fn difference(&self, other: &Self) -> Option<String> {
        self.difference(other)
    }

    fn refusal(&self, sent: &Self) -> Option<String> {
        self.refusal(sent)
    }

    fn divergence<'a>(prints: impl Iterator<Item = &'a Self> + Clone) -> Option<Divergence> {
        Self::divergence(prints)
    }

    fn is_of_pairs(&self) -> bool {
        self.is_of_pairs()
    }
}

impl std::fmt::Debug for HostBackend {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HostBackend").field("launch", &self.launch).field("size", &self.size).finish()
    }
}
