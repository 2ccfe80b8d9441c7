//! A [`Backend`] carries collectives from rank to rank.
//!
//! A [`Communicator`](super::Communicator) checks what it is given, counts it, and asks an engine for one of a few
//! operations. An engine moves tensors, and tells ranks that call alike from ranks that do not; of layouts, gradients and
//! ledgers it knows nothing.
//!
//! | operation | a rank brings | and gets |
//! |---|---|---|
//! | [`all_gather`](GroupBackend::all_gather) | its parts of some tensors | the wholes |
//! | [`reduce_scatter`](GroupBackend::reduce_scatter) | wholes | its parts of their reduction |
//! | [`all_to_all`](GroupBackend::all_to_all) | tensors for each rank, or none | what each had for it |
//! | [`broadcast`](GroupBackend::broadcast) | as the root, tensors | the root's |
//! | [`barrier`](GroupBackend::barrier) | nothing | nothing, once all have come |
//! | [`send`](GroupBackend::send) | tensors for one rank | nothing |
//! | [`receive`](GroupBackend::receive) | nothing | what one rank, or any, has sent it |
//! | [`Backend::channel`] | a group's ranks and a name | its place in that group |
//!
//! Everything else is made of these, by provided methods that an engine may override where it has a faster way.
//!
//! # What an engine promises
//!
//! 1. **Order.** The n-th call of a rank on a channel meets the n-th call of every other rank of the group, however
//!    their results are waited for; messages do not count. Of one sender and one tag, messages are received in the order
//!    in which they were sent, by receives in the order in which they were posted. Posting never waits for other
//!    ranks.
//! 2. **Agreement.** [`CallSignature`]s are compared; a [difference](CallSignature::difference) is
//!    [`CommError::Mismatch`] on every rank of the world. So are, once those of all ranks of a collective are there,
//!    the values that they say ranks hold [alike](CallSignature::divergence): [`CommError::Diverged`].
//! 3. **Ends.** The first [`Failure`] is the only one, and ends every wait of every rank of the world. A wait ends, too,
//!    when a rank that it needs has [left](Backend::rank_exited), and at its deadline.
//! 4. **Bits.** A reduction adds neighbours in one fixed binary tree over the group's ranks: f16 and bf16 in f32, rounded
//!    once, the averages of narrow integers in 64 bits.
//! 5. **Memory.** What is posted belongs to the engine until all ranks have what they need of it. Who writes to a result
//!    leaves what others have alone: ranks of a process may have handles to one memory, which tensors are, and in which burn
//!    writes where there is one handle only. Any number of calls may be posted ahead: backward's gathers are, all at once, so
//!    an engine with buffers of its own does not fill one before it must. Threads hold references to shards, no more.
//! 6. **Progress.** [`Request::wait`] makes it, on the thread that waits, where nothing else does. A [`Request`] may be
//!    dropped at any time, which never waits: the rank has taken part, and the others get their results.

mod failure;
mod generic;
mod process_options;
mod provided;
pub(crate) mod ranges;
mod request;
mod shrunk_world;
mod signature;

use std::fmt::Debug;
use std::panic::Location;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use burn::backend::{DispatchTensor, TensorMetadata};
use burn::tensor::Device;

use super::{CollectivePlan, CommError, Group, Ledger, RankReport, ReduceOp, ShardedTensor, TensorMeta};
use crate::Error;
use crate::placement::ShardSizes;

pub use failure::Failure;
pub(crate) use generic::{concat, from_data, into_data, reduce, reshaped, rows};
pub use process_options::ProcessOptions;
pub(super) use provided::rows_for_each;
pub(super) use request::Mapped;
pub use request::{Completed, Request};
pub use shrunk_world::ShrunkWorld;
pub(super) use shrunk_world::{last, worlds};
pub use signature::CallSignature;
pub(crate) use signature::{PairwiseSignature, ShardSignature, TensorSignature, tensor_text};

/// The ranks of one [`launch`](super::launch), and what connects them.
pub trait Backend: Debug + Send + Sync {
    /// Number of ranks.
    fn size(&self) -> usize;

    /// The ranks that are in this process, ascending.
    fn local_ranks(&self) -> Vec<usize>;

    /// Tells the launches of a process apart: a [`launch_number`] of the engine's own.
    fn launch(&self) -> u64;

    /// The place of `member` in its group. `name` tells channels of the same ranks apart: calls on one meet only calls
    /// on the one of that name. Asked for once for each member, group and name, and not by all ranks at once: an engine
    /// whose groups are made by all their ranks together makes one at its first operation.
    fn channel(&self, member: GroupMember, name: &'static str) -> Arc<dyn GroupBackend>;

    /// Ends every wait of every rank, now and later. Returns the error that counts: of the first failure.
    fn fail(&self, failure: Failure) -> CommError;

    /// The first failure, if there was one.
    fn failure(&self) -> Option<Failure>;

    /// The rank's program is over: those that wait for it wait in vain. `error` is what it has ended with, if it has not
    /// succeeded, and `at` where it unwound with that: for the reports of other processes.
    fn rank_exited(&self, rank: usize, error: Option<Error>, at: Option<&'static Location<'static>>);

    /// What `rank` was doing at the first failure, or is doing now: a few words behind "rank 1 was".
    fn activity(&self, rank: usize) -> String;

    /// Whether the program of every rank is over.
    fn is_finished(&self) -> bool;

    /// Ends this world, if nothing has, and waits until every rank has called this or its program is over, but no longer
    /// than `deadline`. Returns the world of those that have called.
    ///
    /// Provided, for engines without: [`CommError::CannotShrink`].
    fn shrink(&self, rank: usize, deadline: Duration) -> Result<ShrunkWorld, CommError> {
        let _ = deadline;
        Err(CommError::CannotShrink { rank })
    }

    /// The world that ranks of this process have [gone on](Self::shrink) in.
    fn successor(&self) -> Option<ShrunkWorld> {
        None
    }

    /// Waits until the programs of all ranks are over, those of other processes too. Returns how these have ended.
    ///
    /// Provided, for engines whose ranks are all in this process: whoever has started them knows.
    fn finish(&self) -> RemoteOutcome {
        RemoteOutcome::default()
    }
}

/// How the ranks of other processes have ended.
#[derive(Debug, Clone, Default)]
pub struct RemoteOutcome {
    /// The first failure, if any rank of any process has not succeeded.
    pub failure: Option<Failure>,
    /// Each of them, as far as their processes have said.
    pub reports: Vec<RankReport>,
    /// Whether another process reports it all to whoever has started them.
    pub is_told: bool,
}

/// A number that no other launch of this process has, of whatever engine: 0, 1, ..
pub fn launch_number() -> u64 {
    static LAUNCHES: AtomicU64 = AtomicU64::new(0);
    LAUNCHES.fetch_add(1, Ordering::Relaxed)
}

/// A rank's place in a group, and what is its own there.
#[derive(Debug, Clone)]
pub struct GroupMember {
    /// The ranks, and the place among them.
    pub group: Group,
    /// Where the rank's tensors are.
    pub device: Device,
    /// What kernels copy is counted there.
    pub ledger: Arc<Ledger>,
}

impl GroupMember {
    /// The global rank.
    pub fn rank(&self) -> usize {
        self.group.ranks()[self.group.rank()]
    }

    /// Where what a call makes is, to which the rank has brought these: with them, or else on its device.
    pub fn home(&self, tensors: &[DispatchTensor]) -> Device {
        tensors.first().map_or_else(|| self.device.clone(), |tensor| Device::new(tensor.device()))
    }
}

/// What an engine needs to know of a call beside its tensors.
#[derive(Debug)]
pub struct CallContext {
    /// What ranks must agree on.
    pub print: CallSignature,
    /// The result is wanted later.
    pub is_deferred: bool,
}

/// What one rank has sent another.
#[derive(Debug)]
pub struct ReceivedTensors {
    /// The sender's place in the group.
    pub from: usize,
    /// What it sent.
    pub tensors: Vec<DispatchTensor>,
}

/// What an operation returns at once.
pub type PostResult<T> = Result<Box<dyn Request<T>>, CommError>;

/// A rank's place in one group: the operations of an engine.
///
/// Arguments are checked: shapes, cuts and dtypes fit each other and the group, tensors are plain and on the rank's
/// device, and the group has several ranks, unless what is called is a send or a receive.
pub trait GroupBackend: Debug + Send + Sync {
    /// The rank and its group.
    fn member(&self) -> &GroupMember;

    /// Whether what is posted moves while its ranks do other things: then it is worth posting before it is needed.
    ///
    /// Provided: it does not.
    fn can_overlap(&self) -> bool {
        false
    }

    /// The wholes of tensors of which every rank has a part, cut as `plan` says.
    fn all_gather(
        &self,
        post: CallContext,
        plan: Arc<CollectivePlan>,
        parts: Vec<DispatchTensor>,
    ) -> PostResult<Vec<DispatchTensor>>;

    /// This rank's parts, cut as `plan` says, of the reductions of wholes.
    fn reduce_scatter(
        &self,
        post: CallContext,
        plan: Arc<CollectivePlan>,
        full_tensors: Vec<DispatchTensor>,
        op: ReduceOp,
    ) -> PostResult<Vec<DispatchTensor>>;

    /// What each rank has for this one, as `metas` say: `parts[i]` goes to group rank `i`. Its own tensors are handed
    /// back.
    fn all_to_all(
        &self,
        post: CallContext,
        parts: Vec<Vec<DispatchTensor>>,
        metas: Vec<Vec<TensorMeta>>,
    ) -> PostResult<Vec<Vec<DispatchTensor>>>;

    /// The tensors of `root`, as `metas` say; the others bring none.
    fn broadcast(
        &self,
        post: CallContext,
        tensors: Vec<DispatchTensor>,
        metas: Vec<TensorMeta>,
        root: usize,
    ) -> PostResult<Vec<DispatchTensor>>;

    /// Nothing, once all ranks have called it.
    fn barrier(&self, post: CallContext) -> PostResult<()>;

    /// Sends tensors to `to`, which may be the rank itself: done when the engine has them.
    fn send(&self, post: CallContext, tensors: Vec<DispatchTensor>, to: usize, tag: u32) -> PostResult<()>;

    /// The next message with `tag` of `from`, or of whoever comes first: as `metas` say, where they are given.
    fn receive(
        &self,
        post: CallContext,
        from: Option<usize>,
        tag: u32,
        metas: Option<Vec<TensorMeta>>,
    ) -> PostResult<ReceivedTensors>;

    /// The reductions of tensors of one shape on all ranks.
    ///
    /// Provided: every rank gets all terms and reduces them.
    fn all_reduce(
        &self,
        post: CallContext,
        tensors: Vec<DispatchTensor>,
        op: ReduceOp,
    ) -> PostResult<Vec<DispatchTensor>> {
        provided::all_reduce(self, post, tensors, op)
    }

    /// A tensor cut along `shard.dim`, cut along `to_dim` instead.
    ///
    /// Provided: an all-to-all of blocks.
    fn shard_dim_all_to_all(
        &self,
        post: CallContext,
        shard: ShardedTensor,
        to_dim: usize,
        to_sizes: ShardSizes,
    ) -> PostResult<DispatchTensor> {
        provided::recut(self, post, shard, to_dim, to_sizes)
    }

    /// What each rank has for this one, one after another along the first dimension: the first `given[0]` rows of `tensor`
    /// go to group rank 0, the next `given[1]` to group rank 1, ..; `taken[i]` come from group rank `i`.
    ///
    /// Provided: an all-to-all of the rows.
    fn all_to_all_v(
        &self,
        post: CallContext,
        tensor: DispatchTensor,
        send_counts: &[usize],
        recv_counts: &[usize],
    ) -> PostResult<DispatchTensor> {
        provided::exchange_rows(self, post, tensor, send_counts, recv_counts)
    }

    /// This rank's parts, by dimension and cut, of the tensors of `root`, as `metas` say; the others bring none.
    ///
    /// Provided: an all-to-all, in which the root gives.
    fn scatter(
        &self,
        post: CallContext,
        tensors: Vec<DispatchTensor>,
        metas: Vec<TensorMeta>,
        shardings: Vec<(usize, ShardSizes)>,
        root: usize,
    ) -> PostResult<Vec<DispatchTensor>> {
        provided::scatter(self, post, tensors, metas, shardings, root)
    }
}
