//! Interface of a backend: [`Backend`] and [`GroupBackend`] carry out collectives among ranks.
//!
//! A [`Communicator`](super::Communicator) checks its arguments, counts the call, and passes it to
//! the backend as one of a few operations. The backend moves tensors and detects ranks whose calls
//! differ. It knows nothing about layouts, gradients or ledgers.
//!
//! | operation | a rank passes | a rank receives |
//! |---|---|---|
//! | [`all_gather`](GroupBackend::all_gather) | its shards of some tensors | the full tensors |
//! | [`reduce_scatter`](GroupBackend::reduce_scatter) | full tensors | its shards of their reduction |
//! | [`all_to_all`](GroupBackend::all_to_all) | a list of tensors for each rank | the list of each rank for this one |
//! | [`broadcast`](GroupBackend::broadcast) | tensors, on the root | the root's tensors |
//! | [`barrier`](GroupBackend::barrier) | nothing | nothing, once all ranks have called it |
//! | [`send`](GroupBackend::send) | tensors for one rank | nothing |
//! | [`receive`](GroupBackend::receive) | nothing | tensors that a given rank, or any rank, has sent |
//! | [`Backend::channel`] | a group and a name | a handle on the group |
//!
//! All other operations are provided methods built from these. A backend can override them with
//! faster implementations. The book's page "Writing a backend" names an example in another crate,
//! across processes too.
//!
//! # Guarantees of a backend
//!
//! 1. **Order.** The n-th collective of a rank on a channel matches the n-th collective of every
//!    other rank of the group, in whatever order the ranks wait for the results. Messages do not
//!    count. Messages with the same sender and tag are received in the order in which they were
//!    sent, by receives in the order in which they were posted. Posting never waits for other
//!    ranks.
//! 2. **Agreement.** The backend compares the [`CallSignature`]s of the ranks; a
//!    [difference](CallSignature::difference) is [`CommError::Mismatch`] on every rank of the
//!    world. When the signatures of all ranks of a collective are available, it also compares the
//!    digests in them; a [divergence](CallSignature::divergence) is [`CommError::Diverged`].
//! 3. **Termination.** Only the first [`Failure`] of a world counts, and it ends every wait of
//!    every rank with the same error. A wait also ends when a rank that it needs has
//!    [exited](Backend::rank_exited), with [`CommError::RankReturned`], and at its deadline, with
//!    [`CommError::DeadlineExceeded`]: both are then the world's failure, [`Failure::Collective`].
//! 4. **Reproducible bits.** A reduction adds neighbours in one fixed binary tree over the group's
//!    ranks, unless the [capabilities](Capabilities::fixed_tree) say otherwise. f16 and bf16 are summed in f32 and rounded once; narrow integers are averaged in 64
//!    bits. A minimum or maximum is NaN if any rank has NaN; of bools, the maximum is their "or"
//!    and the minimum their "and".
//! 5. **Memory.** The backend owns posted tensors until every rank has received what it needs from
//!    them. Results may alias: ranks of one process can hold handles to the same memory. This is
//!    safe because burn writes in place only through a unique handle (copy-on-write otherwise). On
//!    a GPU, work runs after it was submitted: a backend that reads a rank's memory by a handle
//!    also makes the read run after what that rank submitted before the call, and before what it
//!    submits once the handle is dropped. Any number of deferred calls may be posted, such as all
//!    the all-gathers of a backward, so a backend must not fill result buffers when a call is
//!    posted. A backend for ranks as threads holds only references to the shards.
//! 6. **Progress.** If nothing else makes progress, [`Request::wait`] does, on the thread that
//!    waits. A [`Request`] may be dropped at any time without blocking: the rank has taken part,
//!    and the other ranks receive their results.

mod capabilities;
mod failure;
mod generic;
mod group_backend;
pub(crate) mod ranges;
mod signature;

use std::fmt::Debug;
use std::panic::Location;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use burn::backend::{DispatchTensor, TensorMetadata};
use burn::tensor::Device;
use burn_dtensor_flight::LaunchId;

use super::launcher;
use super::{CommError, Group, Ledger, RankReport};
use crate::Error;

pub use capabilities::Capabilities;
pub use failure::Failure;
pub(crate) use generic::{MAX_DIMS, concat, from_data, into_data, reduce, reshaped, rows};
pub use group_backend::GroupBackend;
pub(super) use group_backend::rows_for_each;
pub(crate) use signature::tensor_text;
pub use signature::{CallSignature, PairwiseSignature, ShardSignature, TensorSignature};

/// The ranks of one [`launch`](super::launch) and the connections between them (c10d: backend).
pub trait Backend: Debug + Send + Sync {
    /// Returns the number of ranks.
    fn size(&self) -> usize;

    /// Returns the ranks that run in this process, ascending.
    fn local_ranks(&self) -> Vec<usize>;

    /// Returns the [`launch_number`] of this backend, which distinguishes the launches of a
    /// process.
    fn launch(&self) -> u64;

    /// Returns the id by which the flight recorder knows the launch: the same in all processes of
    /// the launch.
    ///
    /// The provided implementation is for backends whose ranks are all in this process.
    fn launch_id(&self) -> LaunchId {
        LaunchId::of_process(launcher::process_index(), self.launch())
    }

    /// Returns the handle of `member` on its group. `name` distinguishes channels of the same
    /// ranks: calls on a channel match only calls on the channel of the same name.
    ///
    /// It is called once for each member, group and name, but not by all ranks at the same time. A
    /// backend whose groups must be created by all their ranks together therefore creates a group
    /// at its first operation.
    fn channel(self: Arc<Self>, member: GroupMember, name: &'static str) -> Arc<dyn GroupBackend>;

    /// Ends every wait of every rank, now and later. Returns the error of the first failure, which
    /// may be an earlier one.
    fn fail(&self, failure: Failure) -> CommError;

    /// Returns the first failure, if there was one.
    fn failure(&self) -> Option<Failure>;

    /// Notifies the backend that the program of `rank` is over, so that ranks waiting for it stop
    /// waiting. `error` is the error with which the program ended, if it did not succeed, and `at`
    /// is the line where it unwound with that error; both are for the reports of other processes.
    fn rank_exited(
        &self,
        rank: usize,
        error: Option<Error>,
        at: Option<&'static Location<'static>>,
    );

    /// Describes the activity of `rank` at the first failure, or now if there was none: a few words
    /// that continue "rank 1 was".
    fn activity(&self, rank: usize) -> String;

    /// Returns true if the programs of all ranks are over.
    fn is_finished(&self) -> bool;

    /// Ends this world, if it has not failed yet, and waits until every rank has called this method
    /// or its program is over, at most for `deadline`. Returns the world of the ranks that called.
    ///
    /// The provided implementation is for backends without support: it returns
    /// [`CommError::CannotShrink`].
    fn shrink(&self, rank: usize, deadline: Duration) -> Result<ShrunkWorld, CommError> {
        let _ = deadline;
        Err(CommError::CannotShrink { rank })
    }

    /// Returns the world in which ranks of this process [continued](Self::shrink), if there is one.
    fn successor(&self) -> Option<ShrunkWorld> {
        None
    }

    /// Waits until the programs of all ranks are over, including those of other processes. If the
    /// world has failed, it waits at most for `deadline`, because a program may be stuck outside
    /// collectives. Returns the outcome of the ranks in other processes; a rank whose program is
    /// not over has the error [`CommError::StillRunning`].
    ///
    /// The provided implementation is for backends whose ranks are all in this process: there is
    /// nothing to report.
    fn finish(&self, deadline: Duration) -> RemoteOutcome {
        let _ = deadline;
        RemoteOutcome::default()
    }
}

/// The world of the ranks that survived a failure of another world.
#[derive(Debug, Clone)]
pub struct ShrunkWorld {
    /// Backend of the new world.
    pub backend: Arc<dyn Backend>,
    /// Old rank of each new rank, ascending: rank `i` of the new world was rank `ranks[i]` of the
    /// old one.
    pub ranks: Arc<[usize]>,
}

impl ShrunkWorld {
    /// Returns the new rank of the old rank `rank`, or `None` if it did not survive.
    pub fn new_rank_of(&self, rank: usize) -> Option<usize> {
        self.ranks.binary_search(&rank).ok()
    }
}

/// Threading and memory sharing of the ranks of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProcessOptions {
    /// True if several threads of a rank may call and wait at the same time:
    /// [`Launch::with_multithreaded_ranks`](crate::comm::Launch::with_multithreaded_ranks).
    pub multithreaded: bool,
    /// True if ranks must not share memory for results:
    /// [`Launch::with_separate_memory`](crate::comm::Launch::with_separate_memory).
    pub separate_memory: bool,
}

impl Default for ProcessOptions {
    /// Returns the default: one thread of a rank at a time, and shared memory. In builds with a
    /// sanitizer the memory is separate, so that the sanitizer detects uses of memory that its rank
    /// has released.
    fn default() -> Self {
        Self {
            multithreaded: false,
            separate_memory: cfg!(sanitized),
        }
    }
}

/// Outcome of the ranks that ran in other processes.
#[derive(Debug, Clone, Default)]
pub struct RemoteOutcome {
    /// The first failure, if any rank of any process has not succeeded.
    pub failure: Option<Failure>,
    /// Report of each of them, as far as their processes have sent one.
    pub reports: Vec<RankReport>,
    /// True if another process reports the failure to the user.
    pub is_reported_by_other_process: bool,
}

/// Returns a number that no other launch of this process has, whatever its backend: 0, 1, ..
pub fn launch_number() -> u64 {
    static LAUNCHES: AtomicU64 = AtomicU64::new(0);
    LAUNCHES.fetch_add(1, Ordering::Relaxed)
}

/// Numbers of worlds of [one device](super::World::of_device), from the greatest down, so that they
/// leave no gap among the launches, whose numbers are equal in all processes.
pub(super) fn device_number() -> u64 {
    static DEVICES: AtomicU64 = AtomicU64::new(u64::MAX);
    DEVICES.fetch_sub(1, Ordering::Relaxed)
}

/// Returns true if `launch` is a number of [`device_number`].
pub(super) fn is_device_number(launch: u64) -> bool {
    launch > u64::MAX / 2
}

/// A rank as a member of a group, with its device and ledger.
#[derive(Debug, Clone)]
pub struct GroupMember {
    /// The ranks of the group, and the group rank of this member.
    pub group: Group,
    /// Device of the rank's tensors.
    pub device: Device,
    /// Ledger of the rank, which counts the copies that kernels make around collectives.
    pub ledger: Arc<Ledger>,
}

impl GroupMember {
    /// Returns the global rank.
    pub fn rank(&self) -> usize {
        self.group.ranks()[self.group.rank()]
    }

    /// Returns the device of the results of a call with `tensors`: the device of the tensors, or
    /// the rank's device if the rank passes none.
    pub fn home(&self, tensors: &[DispatchTensor]) -> Device {
        tensors.first().map_or_else(
            || self.device.clone(),
            |tensor| Device::new(tensor.device()),
        )
    }
}

/// Properties of a call that a backend needs in addition to its tensors.
#[derive(Debug)]
pub struct CallContext {
    /// Signature of the call, on which all ranks must agree.
    pub signature: CallSignature,
    /// True for a deferred call, whose result is needed later.
    pub is_deferred: bool,
}

/// Message that a rank received from another.
#[derive(Debug)]
pub struct ReceivedTensors {
    /// Group rank of the sender.
    pub from: usize,
    /// The received tensors.
    pub tensors: Vec<DispatchTensor>,
}

/// An operation that a backend has begun (MPI: request).
pub trait Request<T>: Send {
    /// Returns true if [`wait`](Self::wait) would return without waiting for other ranks.
    fn is_complete(&self) -> bool;

    /// Starts the transfer of a [deferred](CallContext::is_deferred) call, if the backend can
    /// transfer data before the rank waits for it. Returns at once.
    fn start(&mut self) {}

    /// Blocks until the result is ready, the world has failed, or `deadline` has passed, which is a
    /// failure.
    fn wait(self: Box<Self>, deadline: Duration) -> Result<Completed<T>, CommError>;
}

/// Result of an operation, with its timing.
#[derive(Debug)]
pub struct Completed<T> {
    /// The result.
    pub value: T,
    /// Time spent on copies and reductions by the thread that waited.
    pub local_work: Duration,
    /// Global rank that joined last, if the backend knows it.
    pub last: Option<usize>,
    /// Timestamps of the transfer, if another thread than the one that waited made it.
    pub transfer: Option<TransferTiming>,
}

impl<T> Completed<T> {
    /// Runs `make` and measures its time. The last rank and the timestamps of the transfer are
    /// unknown.
    pub fn timed(make: impl FnOnce() -> T) -> Self {
        let start = Instant::now();
        Self {
            value: make(),
            local_work: start.elapsed(),
            last: None,
            transfer: None,
        }
    }
}

/// The request of an operation that was complete when it was posted.
impl<T: Send> Request<T> for Completed<T> {
    fn is_complete(&self) -> bool {
        true
    }

    fn wait(self: Box<Self>, _deadline: Duration) -> Result<Self, CommError> {
        Ok(*self)
    }
}

/// Timestamps of one operation's data transfer.
///
/// | | between processes (progress thread) | between threads |
/// |---|---|---|
/// | `send_started` | the progress thread has taken up the call, to send it to the other processes | the call was posted |
/// | `started` | the first bytes for this rank were announced | the rank that waits began to copy or reduce |
/// | `completed` | the last bytes arrived, or the rank itself joined last | the copy or reduction was complete |
///
/// For a deferred call, `started` and `completed` are never earlier than the moment at which this
/// rank requested the result, even if another rank started the transfer earlier.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TransferTiming {
    /// Start of sending; `None` if all data had arrived before this process began to send.
    pub send_started: Option<Instant>,
    /// Start of the transfer.
    pub started: Instant,
    /// End of the transfer.
    pub completed: Instant,
}

/// Timestamps of one operation of a rank, from posting it until its result was ready.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OpTiming {
    /// Time when the rank posted the operation.
    pub posted: Instant,
    /// Timestamps of the data transfer.
    pub transfer: TransferTiming,
    /// Time when the rank began to wait for the result.
    pub requested: Instant,
}

/// A request whose result is mapped by a function.
pub(crate) struct Mapped<P, F> {
    pub pending: P,
    pub map: F,
}

impl<T, U, F: FnOnce(T) -> U + Send> Request<U> for Mapped<Box<dyn Request<T>>, F> {
    fn is_complete(&self) -> bool {
        self.pending.is_complete()
    }

    fn start(&mut self) {
        self.pending.start();
    }

    fn wait(self: Box<Self>, deadline: Duration) -> Result<Completed<U>, CommError> {
        let Self { pending, map } = *self;
        let Completed {
            value,
            local_work,
            last,
            transfer,
        } = pending.wait(deadline)?;
        let mapped = Completed::timed(|| map(value));
        Ok(Completed {
            local_work: local_work + mapped.local_work,
            last,
            transfer,
            ..mapped
        })
    }
}

/// Result of posting an operation: the request to wait for, or an error.
pub type PostResult<T> = Result<Box<dyn Request<T>>, CommError>;
