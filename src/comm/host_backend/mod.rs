//! [`HostBackend`]: the backend for ranks that are threads, in one or more processes.
//!
//! A collective has two steps. Posting it adds references to the rank's tensors, with a signature,
//! to the match table and never blocks. Waiting blocks until every rank of the group has
//! contributed to the collective with this sequence number. The rank then builds its result
//! directly from the memory of its peers. Any number of collectives can therefore be in flight, and
//! they can be waited for in any order.
//!
//! Within a process, tensors are passed by reference (zero-copy). A result that is identical on all
//! ranks, such as that of an all-gather or an all-reduce, is built by all ranks together and
//! shared. Tensors are copy-on-write: a rank that writes to a shared tensor writes to a private
//! copy.
//!
//! The ranks of a launch may be in several [processes](ProcessJob). A call is then also sent to
//! every other process that has ranks of the group ([`remote_group`]), which posts it in its match
//! table on behalf of the calling rank ([`incoming`]):
//!
//! ```text
//! process 0                                     process 1
//! rank 0 calls a collective:    ---header--->   posts the call for rank 0 and compares the signatures
//! posts it locally and sends
//!                               ---payload-->   completes rank 0's contribution; when all contributions
//!                                               are complete, rank 1 computes its result from them
//! ```
//!
//! A payload holds the data of one rank's tensors that the ranks of the receiving process need: the
//! shard of an all-gather, or their blocks of a reduction or an all-to-all. It is sent to each
//! process once, however many ranks the process has, and when it is due: that of a deferred call
//! when it is requested. Elements on a device are copied to the host only then, on the completion
//! thread. From then on, ranks in processes use the same code as ranks as threads: the same
//! kernels, the same reduction tree, and bit-identical results. Between processes, a large
//! all-reduce runs as a reduce-scatter followed by an all-gather ([`two_phase_all_reduce`]). A
//! request that its rank has not waited for may be completed in the background ([`request`]).
//!
//! # Failures
//!
//! The process of rank 0 decides which failure is the first. The other processes report the
//! failures that they find to it, and continue when they have received its decision. A launch ends
//! in a process when the ranks of all processes have ended, whether they succeeded or failed. By
//! then the process has received the first failure, if any rank failed, and the outcome of each
//! rank from that rank's process. Every process therefore has the same report; process 0 prints it.
//! Processes whose numbers of ranks differ cannot agree on anything, so each reports that.

mod completion_thread;
mod exchange_order;
mod exchanged;
mod exchanged_messages;
mod group_backend;
mod incoming;
mod process_job;
mod recv_request;
mod remote_group;
mod request;
#[cfg(test)]
mod tests;
mod two_phase_all_reduce;

use std::collections::HashMap;
use std::ops::{Deref, Range};
use std::panic::{AssertUnwindSafe, Location, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use burn::tensor::Device;
use burn_dtensor_flight::LaunchId;
use parking_lot::Mutex;

use super::backend::{
    Backend, CallSignature, Failure, GroupBackend, GroupMember, ProcessOptions, RemoteOutcome,
    ShrunkWorld, device_number, launch_number,
};
use super::control::match_table::{GroupKey, OpHandle, Signature};
use super::control::membership::Membership;
use super::control::rendezvous::{LINGER, PeerNotifier, Rendezvous, SpinPolicy};
use super::data::Planes;
use super::data::contribution::Contribution;
use super::data::inputs::CollectiveInputs;
use super::data::result_buffer::ResultBuffer;
use super::panic::panic_text;
use super::transport::peer_processes::{PayloadData, PeerProcesses};
use super::{CommError, Divergence, Op, RankReport, launcher};
use crate::Error;
use crate::memory::HostMemoryPool;

use completion_thread::CompletionThread;
use exchange_order::ExchangeOrder;

pub use process_job::ProcessJob;
#[cfg(feature = "mpi")]
pub(super) use process_job::mpi_processes;

/// State shared by the ranks of one [`launch`](super::launch) in one process.
pub(super) struct HostBackend {
    rendezvous: Rendezvous<CallSignature, Contribution>,
    /// Number of ranks in all processes.
    size: usize,
    local_ranks: Range<usize>,
    /// Other processes of the launch, if there are any.
    remote: Option<RemoteRanks>,
    /// Number of the launch in this process: 0, 1, ..
    launch: u64,
    /// Number of ranks whose programs have ended.
    exited: AtomicUsize,
    options: ProcessOptions,
    membership: Membership,
    planes: Arc<Planes>,
    completion: CompletionThread,
    exchanges: Arc<ExchangeOrder>,
    this: Weak<Self>,
}

/// The other processes of a launch, and the results that their data completes.
struct RemoteRanks {
    peers: Arc<PeerProcesses>,
    job: Weak<ProcessJob>,
    /// Result buffers into which remote shards are received.
    result_buffers: Mutex<HashMap<(GroupKey, u64), Weak<ResultBuffer>>>,
    /// Pool of the memory of result buffers. The thread of the rank, of the completion or of the
    /// transport allocates from it.
    memory: Arc<HostMemoryPool>,
}

impl Deref for RemoteRanks {
    type Target = PeerProcesses;

    fn deref(&self) -> &PeerProcesses {
        &self.peers
    }
}

/// Generous estimate of the time that a rank needs to post a collective, or to contribute to a
/// small one. The estimate is generous because a rank that is woken from sleep is so late that its
/// peers fall asleep, too.
const TURN: Duration = Duration::from_micros(80);

/// Number of times that a rank with a core to itself polls before it sleeps, which takes about 40
/// microseconds. Sleeping and waking takes as long, and so does one job of a cooperative result.
const POLLS: u32 = 1000;

/// Number of times that a rank without a core to itself yields before it sleeps. While few ranks
/// are runnable, one round of all of them takes microseconds.
const YIELDS: u32 = 64;

/// Returns the policy by which `ranks` ranks spin or yield before they sleep.
fn spin_policy(ranks: usize) -> SpinPolicy {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    if ranks <= cores {
        return SpinPolicy::Spinning(POLLS);
    }
    // All other ranks of the core may run before a waiter gets its core back.
    let round = TURN * ranks.div_ceil(cores) as u32;
    SpinPolicy::Yielding(YIELDS, LINGER.max(round))
}

impl HostBackend {
    /// Creates the backend of a launch of `size` ranks within one process.
    pub fn new(size: usize, options: ProcessOptions) -> Arc<Self> {
        Self::build(None, size, options, launch_number(), None)
    }

    /// Lets ranks exchange tensors on GPUs by `plane`. Before any group is created.
    #[cfg(any(feature = "nccl", feature = "testing"))]
    pub fn use_nccl(&self, plane: Arc<super::data::nccl::NcclPlane>) {
        self.planes.use_nccl(plane);
        self.watch_planes();
    }

    /// Lets simulated GPUs exchange the tensors of the ranks, which are in host memory.
    #[cfg(feature = "testing")]
    pub fn simulate_gpus(&self, plane: Arc<super::data::nccl::NcclPlane>) {
        self.planes.simulate_gpus();
        self.use_nccl(plane);
    }

    /// Lets the planes fail the world.
    #[cfg(any(feature = "nccl", feature = "testing"))]
    fn watch_planes(&self) {
        let this = self.this.clone();
        self.planes.watch(Arc::new(move |rank, plane, error| {
            if let Some(this) = this.upgrade() {
                this.rendezvous
                    .find(exchanged::failure(rank, plane, &error));
            }
        }));
    }

    /// Creates the backend of a program without ranks on one device. Any of its threads may use it.
    pub fn of_device() -> Arc<Self> {
        let options = ProcessOptions {
            multithreaded: true,
            ..ProcessOptions::default()
        };
        Self::build(None, 1, options, device_number(), None)
    }

    /// Creates the backend of a launch in several processes. After a `shrink`, `before` is the
    /// backend of the previous world.
    fn of_processes(
        before: Option<&Self>,
        peers: PeerProcesses,
        job: Weak<ProcessJob>,
        options: ProcessOptions,
    ) -> Arc<Self> {
        let size = peers.size();
        let peers = Arc::new(peers);
        let result_buffers = Mutex::default();
        let memory = Arc::default();
        let remote = RemoteRanks {
            peers,
            job,
            result_buffers,
            memory,
        };
        Self::build(before, size, options, launch_number(), Some(remote))
    }

    /// Creates the backend of `size` ranks. After a `shrink`, `before` is the backend of the
    /// previous world.
    fn build(
        before: Option<&Self>,
        size: usize,
        options: ProcessOptions,
        launch: u64,
        remote: Option<RemoteRanks>,
    ) -> Arc<Self> {
        let multithreaded = options.multithreaded;
        let (spin, rendezvous, local_ranks, membership) = match &remote {
            None => {
                let spin = spin_policy(size);
                (
                    spin,
                    Rendezvous::new(size, spin, multithreaded),
                    0..size,
                    Membership::of_threads(size),
                )
            }
            Some(RemoteRanks { peers, .. }) => {
                let rendezvous = Rendezvous::among_processes(
                    size,
                    multithreaded,
                    peers.decides(),
                    peers.clone(),
                );
                (
                    SpinPolicy::Yielding(YIELDS, LINGER),
                    rendezvous,
                    peers.local_ranks(),
                    peers.membership(),
                )
            }
        };
        let before = before.map(|before| &*before.planes);
        let planes = Arc::new(Planes::new(spin, options.separate_memory, before));
        let aborted = planes.clone();
        let exchanges = Arc::<ExchangeOrder>::default();
        let unstarted = exchanges.clone();
        let rendezvous = rendezvous.with_abort(move || {
            aborted.abort();
            unstarted.end();
        });
        let backend = Arc::new_cyclic(|this| Self {
            rendezvous,
            size,
            local_ranks,
            remote,
            launch,
            exited: AtomicUsize::new(0),
            options,
            membership,
            planes,
            completion: CompletionThread::default(),
            exchanges,
            this: this.clone(),
        });
        #[cfg(any(feature = "nccl", feature = "testing"))]
        backend.watch_planes();
        backend
    }

    /// Creates the backend of the surviving `ranks`.
    fn of_survivors(&self, ranks: &[usize]) -> Arc<Self> {
        let Some(RemoteRanks { peers, job, .. }) = &self.remote else {
            return Self::build(Some(self), ranks.len(), self.options, launch_number(), None);
        };
        let peers = peers.of_survivors(ranks);
        let launch = peers.launch();
        let backend = Self::of_processes(Some(self), peers, job.clone(), self.options);
        let job = job
            .upgrade()
            .expect("the transport's handler keeps the job alive");
        job.begin(launch, &backend);
        backend
    }

    fn remote(&self) -> &RemoteRanks {
        self.remote
            .as_ref()
            .expect("only a backend with other processes receives messages")
    }

    /// Requests the contributions in `offers`, which ranks of other processes send on demand.
    fn pull(&self, offers: Vec<OpHandle>) {
        if let Some(remote) = self.remote.as_ref().filter(|_| !offers.is_empty()) {
            remote.answer(offers, true);
        }
    }

    /// Sends the data of a call that was posted without it. The completion thread reads data on a
    /// device, because that waits for the device.
    fn send_data(&self, to: usize, channel: usize, seq: u64, data: PayloadData) {
        let Some(rank) = data.device_of else {
            return self.remote().send_data(to, channel, seq, data);
        };
        let this = self
            .this
            .upgrade()
            .expect("the caller has a reference to the backend");
        let read = move || match catch_unwind(AssertUnwindSafe(|| data.read())) {
            Ok(()) => this.remote().send_data(to, channel, seq, data),
            Err(panic) => {
                this.rendezvous.find(Failure::Panicked {
                    rank,
                    message: panic_text(&*panic).into(),
                });
            }
        };
        if let Err(refused) = self.completion.run(Box::new(read)) {
            refused();
        }
    }

    /// Makes progress on the communication with other processes for a moment.
    fn progress(&self) {
        if let Some(remote) = &self.remote {
            remote.peers.progress();
        }
    }

    /// Returns the contributions of the collective `op`, as its rank uses them.
    fn inputs<'a>(
        &'a self,
        all: &'a [Contribution],
        op: OpHandle,
        device: &'a Device,
    ) -> CollectiveInputs<'a> {
        CollectiveInputs {
            all,
            op,
            device,
            is_distributed: self.remote.is_some(),
            result_buffer: None,
            waited: Default::default(),
        }
    }

    /// Records that the program of `rank`, in any process, has ended.
    fn exited(&self, rank: usize) {
        if self.rendezvous.returned(rank) {
            self.exited.fetch_add(1, Ordering::Relaxed);
            self.membership.exited(rank);
        }
    }
}

impl Backend for HostBackend {
    fn size(&self) -> usize {
        self.size
    }

    fn local_ranks(&self) -> Vec<usize> {
        self.local_ranks.clone().collect()
    }

    fn launch(&self) -> u64 {
        self.launch
    }

    fn launch_id(&self) -> LaunchId {
        self.remote.as_ref().map_or_else(
            || LaunchId::of_process(launcher::process_index(), self.launch),
            |remote| remote.launch(),
        )
    }

    fn channel(self: Arc<Self>, member: GroupMember, name: &'static str) -> Arc<dyn GroupBackend> {
        Arc::new(group_backend::HostGroupBackend::new(self, member, name))
    }

    fn fail(&self, failure: Failure) -> CommError {
        self.rendezvous.fail(failure)
    }

    fn failure(&self) -> Option<Failure> {
        self.rendezvous.failure()
    }

    fn rank_exited(
        &self,
        rank: usize,
        error: Option<Error>,
        at: Option<&'static Location<'static>>,
    ) {
        self.exited(rank);
        if let Some(remote) = &self.remote {
            let report = RankReport {
                rank,
                activity: self.activity(rank),
                error,
                at: at.map(ToString::to_string),
            };
            remote.exit(report, self.planes.exchange());
        }
    }

    fn activity(&self, rank: usize) -> String {
        self.rendezvous.read(|table| table.activity(rank))
    }

    fn is_finished(&self) -> bool {
        self.exited.load(Ordering::Relaxed) == self.size
    }

    fn shrink(&self, rank: usize, deadline: Duration) -> Result<ShrunkWorld, CommError> {
        self.fail(Failure::Collective(CommError::Revoked { rank }));
        // No collective completes any more, and none of the offered data is requested.
        self.completion.forget();
        if let Some(remote) = &self.remote {
            remote.withdraw_offers();
        }
        let ranks = self.membership.survivors(rank, deadline)?;
        Ok(self.membership.next_or(|| ShrunkWorld {
            backend: self.of_survivors(&ranks),
            ranks: ranks.clone(),
        }))
    }

    fn successor(&self) -> Option<ShrunkWorld> {
        self.membership.next()
    }

    fn finish(&self, deadline: Duration) -> RemoteOutcome {
        let Some(remote) = self.remote.as_ref() else {
            self.exchanges.end();
            self.completion.forget();
            return RemoteOutcome::default();
        };
        let running = self.rendezvous.finish(deadline);
        if running.is_empty() && self.planes.exchange() && self.failure().is_none() {
            self.complete_exchanges();
        }
        self.exchanges.end();
        remote.finish(&running);
        for rank in running {
            let error = Some(CommError::StillRunning { rank, deadline }.into());
            remote.lose(RankReport {
                rank,
                activity: self.activity(rank),
                error,
                at: None,
            });
        }
        self.completion.forget();
        // If the other ranks have continued without a remote rank, the outcome of that rank does
        // not matter.
        let roster = self.membership.roster();
        let failure = remote
            .unsuccessful(|rank| {
                self.local_ranks.contains(rank)
                    || roster.as_ref().is_none_or(|ranks| ranks.contains(rank))
            })
            .map(|rank| {
                // The message with the cause may come from another process than the message that the
                // rank has exited.
                self.rendezvous
                    .await_failure()
                    .unwrap_or_else(|| Failure::Failed {
                        rank,
                        message: "its process did not report the cause".into(),
                    })
            });
        RemoteOutcome {
            failure,
            reports: remote.reports(),
            is_reported_by_other_process: !remote.decides() && !remote.has_lost_first(),
        }
    }
}

impl Signature for CallSignature {
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

    fn divergence<'a>(all: impl Iterator<Item = &'a Self> + Clone) -> Option<Divergence> {
        Self::divergence(all)
    }

    fn is_of_pairs(&self) -> bool {
        self.is_of_pairs()
    }
}

impl std::fmt::Debug for HostBackend {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HostBackend")
            .field("launch", &self.launch)
            .field("size", &self.size)
            .finish()
    }
}
