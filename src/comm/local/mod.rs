//! Ranks as threads: within a process, tensors change hands by reference.
//!
//! A collective has two steps. Issuing it deposits references to the rank's tensors, with a
//! fingerprint, and never blocks. Waiting blocks until all deposits of that sequence number are
//! there; then the rank builds its result straight from its peers' memory. So any number of
//! collectives can be under way, in any order of waiting.
//!
//! What all ranks get alike, as from an all-gather or an all-reduce, they make together, and have in common; what one rank
//! sends whole another has by reference. Tensors are handles: who writes to one that others have, too, gets memory of its own.
//!
//! Ranks may be in several [processes](super::process), each of which has some. A call is then also sent to those that have
//! ranks of its group (`outlet`), where it joins in the rank's name (`remote`). Large all-reduces are then two collectives,
//! `halves`, and so are large gathers among ranks of one host, who have the result `in_common`; what a rank leaves `open`, the
//! engine's `hands` finish.
//!
//! On Cube devices a list of tensors goes through one flat buffer a rank, `cube`, which kernels fill and read.

mod all_gather;
mod all_reduce;
mod channel;
mod completion_thread;
mod contribution;
mod deferred_gather;
#[cfg(feature = "cube")]
mod device;
#[cfg(feature = "flex")]
mod host;
mod match_table;
mod membership;
mod peer_processes;
mod remote;
mod remote_group;
mod rendezvous;
mod requests;
mod segments;
mod shared_memory;
mod shared_request;
mod shrink;
mod sync;
mod two_phase_all_reduce;
mod wait_for_graph;

use std::ops::Range;
use std::panic::Location;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use super::backend::{
    Backend, CallSignature, Failure, GroupBackend, GroupMember, ProcessOptions, RemoteOutcome, ShrunkWorld,
    launch_number,
};
use super::{CommError, Divergence, Op, RankReport};
use crate::Error;

pub(super) use contribution::Contribution;
use match_table::OpHandle;
pub(super) use membership::MembershipMessage;
pub(super) use peer_processes::PeerProcesses;
pub(super) use remote::PayloadTarget;
use rendezvous::{LINGER, PeerNotifier, SpinPolicy};
use shrink::ShrinkState;
pub(super) use wait_for_graph::WaitForEdge;

/// What the ranks of one [`launch`](super::launch) in one process share.
pub(super) struct HostBackend {
    rendezvous: rendezvous::Rendezvous<CallSignature, Contribution>,
    /// Ranks of all processes.
    size: usize,
    /// Those of this one.
    here: Range<usize>,
    /// The other processes, if there are any.
    others: Option<Arc<PeerProcesses>>,
    /// What ranks here have called ahead of need, until somebody wants it.
    deferred_gathers: deferred_gather::DeferredGathers,
    /// Tells the launches of a process apart: 0, 1, ..
    launch: u64,
    /// Ranks whose programs are over.
    left: AtomicUsize,
    manner: ProcessOptions,
    going_on: ShrinkState,
    /// Of what ranks here get alike, unless each has memory of its own.
    #[cfg(feature = "flex")]
    shelf: Option<host::SharedResultCache>,
    this: Weak<Self>,
}

/// What a rank takes to join a collective, or to make its part of one that is small, with much room: once ranks sleep, each
/// wakes so late that the next ones sleep, too.
const TURN: Duration = Duration::from_micros(80);

/// How often a rank that has a core of its own looks before it sleeps: for 40 microseconds or so. To sleep and be woken takes
/// as long, and so does a piece of what ranks make together.
const LOOKS: u32 = 1000;

/// How often one that shares its core lets the others have it before it sleeps. While few of them run, a turn of all is over
/// in microseconds.
const YIELDS: u32 = 64;

/// How ranks pass the time before they sleep.
fn lingers(ranks: usize) -> SpinPolicy {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    if ranks <= cores {
        return SpinPolicy::Spinning(LOOKS);
    }
    // Each has its turn before a waiter gets its core back.
    let round = TURN * ranks.div_ceil(cores) as u32;
    SpinPolicy::Yielding(YIELDS, LINGER.max(round))
}

/// Of what ranks have in common, if they may.
#[cfg(feature = "flex")]
fn shelf(manner: ProcessOptions, lingers: SpinPolicy, before: Option<&HostBackend>) -> Option<host::SharedResultCache> {
    let before = before.and_then(|engine| engine.shelf.as_ref());
    (!manner.separate_memory).then(|| host::SharedResultCache::new(lingers, before))
}

impl HostBackend {
    pub fn new(size: usize, manner: ProcessOptions) -> Arc<Self> {
        Self::after(None, size, manner)
    }

    /// The same, of ranks that go on from another engine.
    fn after(before: Option<&Self>, size: usize, manner: ProcessOptions) -> Arc<Self> {
        let lingers = lingers(size);
        let rendezvous = rendezvous::Rendezvous::new(size, lingers, manner.multithreaded);
        let going_on = ShrinkState::new(std::iter::once(0..size), 0);
        Arc::new_cyclic(|this| Self {
            rendezvous,
            size,
            here: 0..size,
            others: None,
            deferred_gathers: deferred_gather::DeferredGathers::default(),
            launch: launch_number(),
            left: AtomicUsize::new(0),
            manner,
            going_on,
            #[cfg(feature = "flex")]
            shelf: shelf(manner, lingers, before),
            this: this.clone(),
        })
    }

    /// Of ranks in several processes, as this one sees the others; which may go on from another engine.
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
            going_on: others.going_on(),
            others: Some(others),
            deferred_gathers: deferred_gather::DeferredGathers::default(),
            #[cfg(feature = "flex")]
            shelf: shelf(manner, SpinPolicy::Yielding(YIELDS, LINGER), before),
            this: this.clone(),
        })
    }

    /// Asks for what ranks of other processes have offered.
    fn ask(&self, offers: Vec<OpHandle>) {
        if let Some(others) = self.others.as_ref().filter(|_| !offers.is_empty()) {
            others.answer(offers, true);
        }
    }

    /// Carries for a moment what there is to carry between processes.
    fn carry(&self) {
        if let Some(others) = &self.others {
            others.help();
        }
    }

    /// A rank's program is over, in whatever process.
    fn left(&self, rank: usize) {
        if self.rendezvous.returned(rank) {
            self.left.fetch_add(1, Ordering::Relaxed);
            self.does_not_go_on(rank);
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

    fn channel(&self, member: GroupMember, name: &'static str) -> Arc<dyn GroupBackend> {
        let this = self.this.upgrade().expect("whoever calls has it");
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
        self.go_on(rank, deadline)
    }

    fn successor(&self) -> Option<ShrunkWorld> {
        self.going_on.next()
    }

    fn finish(&self) -> RemoteOutcome {
        let Some(others) = self.others.as_ref() else { return RemoteOutcome::default() };
        self.rendezvous.finish();
        others.hands.forget();
        // Of ranks elsewhere that others have gone on without it does not matter how they have ended.
        let roster = self.going_on.roster();
        let counts =
            |rank: &usize| self.here.contains(rank) || roster.as_ref().is_none_or(|ranks| ranks.contains(rank));
        let failure = others.unsuccessful(counts).map(|rank| {
            // Word of what has ended it may come from another process than word of its end.
            let untold = || Failure::Failed { rank, message: "its process does not say why".into() };
            self.rendezvous.await_failure().unwrap_or_else(untold)
        });
        RemoteOutcome { failure, reports: others.reports(), is_told: !others.decides() && !others.has_lost_first() }
    }
}

impl match_table::Signature for CallSignature {
    fn op(&self) -> Op {
        self.op()
    }

    fn label(&self) -> Arc<str> {
        self.label().clone()
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
