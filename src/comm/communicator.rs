//! [`Communicator`]: the collectives of a group of ranks.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use burn::backend::DispatchTensor;
use burn::tensor::Device;
use burn_dtensor_flight::format::Peer;
use parking_lot::Mutex;

use super::arguments::{self, Problem};
use super::backend::{
    CallContext, CallSignature, Capabilities, GroupBackend, GroupMember, PostResult,
};
use super::observe::flight::Sequence;
use super::observe::{CallInfo, ObservedCall, Posting};
use super::rank::Rank;
use super::{Call, CollectiveId, CommError, Group, Ledger, Op, Work};

/// The collectives of a group, as called by one of its ranks. It is cheap to clone; all clones are
/// the same communicator.
///
/// Tensors are plain (no autodiff), of any kind and dtype. The tensors of one call must all be on
/// the rank's device, or all on the CPU. Results are on the device of the rank's own tensors, or on
/// the rank's device if it passed none.
///
/// A list of tensors is one collective: one rendezvous and one ledger entry.
///
/// # Collective
/// Every rank of the group must make the same calls in the same order, with equal labels, shapes,
/// shard sizes and dtypes. Each call carries a signature of all of these. A difference is
/// [`CommError::Mismatch`] on every rank, never a deadlock. A call may also carry
/// [digests](Call::digests) of values that must be identical on all ranks.
///
/// # Errors
/// Every [`Work`] returns its value, or a [`CommError`] that names the rank at fault, the operation
/// and its sequence number.
#[derive(Debug, Clone)]
pub struct Communicator {
    rank: Arc<Rank>,
    channel: Arc<GroupChannel>,
    /// The channels of these ranks, by name.
    channels: Arc<Mutex<HashMap<&'static str, Arc<GroupChannel>>>>,
    /// Maximum duration of one wait.
    deadline: Duration,
}

/// One sequence of calls of a group, by one of its ranks.
#[derive(Debug)]
struct GroupChannel {
    backend: Arc<dyn GroupBackend>,
    sequence: Arc<Sequence>,
    forward_indices: AtomicU64,
    /// Number of models that were sharded over these ranks.
    models: AtomicU64,
}

impl GroupChannel {
    fn new(rank: &Rank, group: Group, name: &'static str) -> Arc<Self> {
        let sequence = rank.ledger.recorder().sequence(&group, name);
        let member = GroupMember {
            group,
            device: rank.device.clone(),
            ledger: rank.ledger.clone(),
        };
        let backend = rank.backend.clone().channel(member, name);
        Arc::new(Self {
            backend,
            sequence,
            forward_indices: AtomicU64::default(),
            models: AtomicU64::default(),
        })
    }
}

/// Beginning of the names of this crate's own duplicates and internal groups, which names of
/// programs do not have.
pub(crate) const PRIVATE: &str = "burn_dtensor::";

impl Communicator {
    /// Creates the communicator of `group` for its rank `rank`.
    pub(super) fn new(rank: Arc<Rank>, group: Group, deadline: Duration) -> Self {
        let channel = GroupChannel::new(&rank, group, "");
        Self {
            rank,
            channel,
            channels: Arc::default(),
            deadline,
        }
    }

    /// Returns the ranks of this group and the caller's group rank.
    pub fn group(&self) -> &Group {
        &self.channel.backend.member().group
    }

    /// Returns how the backend moves and reduces tensors on the rank's device. Local.
    pub fn capabilities(&self) -> Capabilities {
        self.channel.backend.capabilities()
    }

    /// Returns true if both are clones of the same communicator, with the same deadline.
    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.channel, &other.channel) && self.deadline == other.deadline
    }

    /// Returns the next forward index of this rank on this communicator: 0, 1, .. Local.
    ///
    /// Ranks that run the same forward draw the same indices, in whatever order their backward
    /// passes use them: see [`Call::with_forward_index`].
    pub fn next_forward_index(&self) -> u64 {
        self.channel.forward_indices.fetch_add(1, Ordering::Relaxed)
    }

    /// Returns the sequence number for a model that is sharded over these ranks now: 1, 2, ..
    /// Local.
    ///
    /// Ranks that shard models in the same order draw the same numbers.
    pub(crate) fn draw_model(&self) -> u64 {
        self.channel.models.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Returns a communicator of the same ranks with a separate sequence of calls: calls on it
    /// match only calls on it, so that the two sequences may be interleaved in any order. Local.
    /// Every call with the same `name` on this communicator, or on a duplicate of it, returns the
    /// same duplicate. So use each name for one purpose only.
    ///
    /// # Panics
    /// If the name is empty, or begins with `burn_dtensor::`, like those of this crate's own
    /// duplicates.
    pub fn duplicate(&self, name: &'static str) -> Self {
        assert!(
            !name.is_empty(),
            "cannot duplicate a communicator without a name. Pass one that says what it is for"
        );
        assert!(
            !name.starts_with(PRIVATE),
            "cannot duplicate a communicator with the name {name:?}: names that begin with {PRIVATE:?} are this crate's own. \
             Pass another name"
        );
        self.duplicate_private(name)
    }

    /// Like [`duplicate`](Self::duplicate), with a name of this crate that no program can use.
    pub(crate) fn duplicate_private(&self, name: &'static str) -> Self {
        let channel = self
            .channels
            .lock()
            .entry(name)
            .or_insert_with(|| GroupChannel::new(&self.rank, self.group().clone(), name))
            .clone();
        Self {
            channel,
            ..self.clone()
        }
    }

    /// Returns this communicator, with the same sequence of calls, but with `deadline` as the
    /// maximum duration of a wait instead of
    /// [`Launch::with_deadline`](super::Launch::with_deadline). Local.
    pub fn with_deadline(&self, deadline: Duration) -> Self {
        Self {
            deadline,
            ..self.clone()
        }
    }

    pub(super) fn deadline(&self) -> Duration {
        self.deadline
    }

    /// Returns the device of the rank's tensors.
    pub(crate) fn device(&self) -> &Device {
        &self.rank.device
    }

    /// Returns the ledger that counts the rank's collectives.
    pub(crate) fn ledger(&self) -> &Arc<Ledger> {
        &self.rank.ledger
    }

    pub(super) fn is_alone(&self) -> bool {
        self.group().size() == 1
    }

    /// Returns `checked`, or a problem if a tensor is neither on the rank's device nor on the host.
    /// A group of one rank is not checked.
    pub(super) fn on_own_device<'a, T>(
        &self,
        checked: Result<T, Problem>,
        tensors: impl IntoIterator<Item = &'a DispatchTensor>,
    ) -> Result<T, Problem> {
        let checked = checked?;
        if !self.is_alone() {
            arguments::on_own_device(tensors, &self.rank.device)?;
        }
        Ok(checked)
    }

    /// Fails the world, because the other ranks would wait for this call forever. Returns a work
    /// with the error.
    pub(super) fn refuse<T>(&self, op: Op, call: &Call, problem: Problem) -> Work<T> {
        Work::failed(self.rank.fail(self.refusal(op, &call.label, problem)))
    }

    pub(super) fn refusal(
        &self,
        op: Op,
        label: &str,
        Problem { problem, remedy }: Problem,
    ) -> CommError {
        let rank = self.rank.rank;
        let label = label.to_string();
        CommError::InvalidArgument {
            rank,
            op,
            label,
            problem,
            remedy: remedy.into(),
        }
    }

    /// Returns true if transfers overlap with computation, as between processes.
    pub(crate) fn moves_meanwhile(&self) -> bool {
        self.channel.backend.can_overlap()
    }

    /// Posts a call to the backend with `begin`, and records it. `bytes` is the number of bytes
    /// that the ledger counts; if `None`, it is that of the signature. If there is a `peer`, the
    /// call is a point-to-point message.
    pub(super) fn post<T>(
        &self,
        peer: Option<Peer>,
        call: Call,
        signature: CallSignature,
        bytes: Option<u64>,
        begin: impl FnOnce(&dyn GroupBackend, CallContext) -> PostResult<T>,
    ) -> Work<T> {
        let Self { rank, channel, .. } = self;
        let GroupChannel {
            backend, sequence, ..
        } = &**channel;
        if let Err(error) = rank.check_thread(signature.op, &call.label) {
            return Work::failed(error);
        }
        let op = signature.op;
        let group = self.group();
        let seq = sequence.next(op);
        if rank.is_alone() && !op.is_message() {
            let called = CollectiveId {
                op,
                seq,
                label: call.label.clone(),
                ranks: group.shared_ranks(),
            };
            return Work::failed(rank.fail(CommError::CollectiveInRunOn {
                rank: rank.rank,
                called,
            }));
        }
        let Call {
            label,
            phase,
            deferred: is_deferred,
            ..
        } = call;
        let bytes = bytes.unwrap_or_else(|| signature.bytes());
        let posting = Posting {
            group,
            channel: sequence.number(),
            seq,
            signature: &signature,
            phase,
            bytes,
            peer,
        };
        let info = CallInfo {
            rank: rank.rank,
            op,
            group_size: group.size(),
            bytes,
            label,
            phase,
            seq,
        };
        let mut call = ObservedCall::post(
            rank.ledger.clone(),
            sequence.clone(),
            info,
            &posting,
            is_deferred,
        );
        match call.begin(|| {
            begin(
                &**backend,
                CallContext {
                    signature,
                    is_deferred,
                },
            )
        }) {
            Ok(pending) => Work::under_way(pending, rank.clone(), call, self.deadline),
            Err(error) => Work::failed(error),
        }
    }
}
