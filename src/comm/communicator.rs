//! [`Communicator`]: the collectives of one group of ranks.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use burn::backend::DispatchTensor;
use burn::tensor::Device;
use parking_lot::Mutex;

use super::arguments::{self, Problem};
use super::backend::{CallContext, CallSignature, GroupBackend, GroupMember, PostResult, TensorSignature};
use super::flight::{OpOutcome, Peer, Posting, Sequence};
use super::ledger::Charge;
use super::rank::Rank;
use super::work::InFlightGuard;
use super::{Call, CollectiveId, CommError, Group, Ledger, Op, Work, trace};

/// The collectives of one group, seen from one of its ranks. Tensors are plain (no autodiff), of any kind and dtype.
/// Cheap to clone: clones are one communicator.
///
/// Those of a call are on the rank's device, or all on the CPU, whatever the rank's device is. What a call makes is
/// where the rank's own tensors are; on its device, where it has given none.
///
/// Several tensors travel in one collective: one rendezvous, one ledger entry.
///
/// # Collective
/// Every rank of the group must make the same calls in the same order, with equal labels,
/// shapes, cuts and dtypes. Each call carries a fingerprint of all of these; a difference is
/// [`CommError::Mismatch`] on every rank, never a hang. It may carry [digests](Call::digests) of what ranks hold alike.
///
/// # Errors
/// Every [`Work`] resolves to its value or to a [`CommError`] that names the
/// rank at fault, the operation and its sequence number.
#[derive(Debug, Clone)]
pub struct Communicator {
    shared: Arc<CommunicatorInner>,
    /// How long one wait may last.
    deadline: Duration,
}

/// What the clones of a communicator share.
#[derive(Debug)]
struct CommunicatorInner {
    rank: Arc<Rank>,
    channel: Arc<dyn GroupBackend>,
    sequence: Arc<Sequence>,
    forward_indices: AtomicU64,
    /// How many models were sharded over these ranks.
    models: AtomicU64,
    duplicates: Mutex<HashMap<&'static str, Communicator>>,
}

impl Communicator {
    /// Of `group`, for the rank that it is seen from.
    pub(super) fn new(rank: Arc<Rank>, group: Group, name: &'static str, deadline: Duration) -> Self {
        let sequence = rank.ledger.recorder().sequence(&group, name);
        let member = GroupMember { group, device: rank.device.clone(), ledger: rank.ledger.clone() };
        let channel = rank.engine.channel(member, name);
        let (forward_indices, models, duplicates) = (AtomicU64::default(), AtomicU64::default(), Mutex::default());
        Self {
            shared: Arc::new(CommunicatorInner { rank, channel, sequence, forward_indices, models, duplicates }),
            deadline,
        }
    }

    /// The ranks of this group and the caller's place among them.
    pub fn group(&self) -> &Group {
        &self.shared.channel.member().group
    }

    /// Whether both are clones of one: of one group, with one sequence of calls and one deadline.
    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.shared, &other.shared) && self.deadline == other.deadline
    }

    /// The next place in this rank's forward: 0, 1, .. on this communicator. Local.
    ///
    /// Ranks that run the same forward draw the same places, in whatever order their backward passes
    /// come to use them: see [`Call::with_forward_index`].
    pub fn next_forward_index(&self) -> u64 {
        self.shared.forward_indices.fetch_add(1, Ordering::Relaxed)
    }

    /// Returns the number of a model that these ranks shard now: 1, 2, .. Local: no communication.
    ///
    /// Ranks that shard models in the same order draw the same numbers.
    pub(crate) fn draw_model(&self) -> u64 {
        self.shared.models.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// The same ranks with a sequence of calls of its own: calls on it meet only calls on it, so that
    /// neither order waits for the other. Local; of one name there is one.
    ///
    /// Names are the group's, duplicates have none of their own; `fully_shard` has taken "reduced" and
    /// "gathered again", and random streams "threads".
    pub fn duplicate(&self, name: &'static str) -> Self {
        let make = || Self::new(self.shared.rank.clone(), self.group().clone(), name, self.deadline);
        let duplicate = self.shared.duplicates.lock().entry(name).or_insert_with(make).clone();
        Self { deadline: self.deadline, ..duplicate }
    }

    /// The same ranks with the same sequence of calls, where this rank waits `deadline` for the others and not
    /// [`Launch::with_deadline`](super::Launch::with_deadline). Local.
    pub fn with_deadline(&self, deadline: Duration) -> Self {
        Self { deadline, ..self.clone() }
    }

    pub(super) fn deadline(&self) -> Duration {
        self.deadline
    }

    /// Where the rank's tensors are.
    pub(crate) fn device(&self) -> &Device {
        &self.shared.rank.device
    }

    /// Where the rank's collectives are counted.
    pub(crate) fn ledger(&self) -> &Arc<Ledger> {
        &self.shared.rank.ledger
    }

    pub(super) fn is_alone(&self) -> bool {
        self.group().size() == 1
    }

    /// `checked`, unless the tensors are elsewhere than on the rank's device, or on the host.
    pub(super) fn at_home<'a, T>(
        &self,
        checked: Result<T, Problem>,
        tensors: impl IntoIterator<Item = &'a DispatchTensor>,
    ) -> Result<T, Problem> {
        let checked = checked?;
        if !self.is_alone() {
            arguments::at_home(tensors, &self.shared.rank.device)?;
        }
        Ok(checked)
    }

    /// Fails the whole world: the other ranks would wait in vain for this call.
    pub(super) fn refuse<T>(&self, op: Op, call: &Call, problem: Problem) -> Work<T> {
        Work::failed(self.shared.rank.fail(self.refusal(op, &call.label, problem)))
    }

    pub(super) fn refusal(&self, op: Op, label: &str, Problem { problem, remedy }: Problem) -> CommError {
        let (rank, label) = (self.shared.rank.rank, label.to_string());
        CommError::InvalidArgument { rank, op, label, problem, remedy: remedy.into() }
    }

    /// Whether collectives move while ranks compute, as between processes.
    pub(crate) fn moves_meanwhile(&self) -> bool {
        self.shared.channel.can_overlap()
    }

    /// Has the engine begin a call. `bytes` is what the ledger counts.
    pub(super) fn post<T>(
        &self,
        call: Call,
        print: CallSignature,
        bytes: u64,
        begin: impl FnOnce(&dyn GroupBackend, CallContext) -> PostResult<T>,
    ) -> Work<T> {
        self.post_to(None, call, print, bytes, begin)
    }

    /// [`post`](Self::post)s a call, which is a message if it has a `peer`.
    pub(super) fn post_to<T>(
        &self,
        peer: Option<Peer>,
        call: Call,
        print: CallSignature,
        bytes: u64,
        begin: impl FnOnce(&dyn GroupBackend, CallContext) -> PostResult<T>,
    ) -> Work<T> {
        let CommunicatorInner { rank, channel, sequence, .. } = &*self.shared;
        if let Err(error) = rank.check_thread(print.op, &call.label) {
            return Work::failed(error);
        }
        let (op, group_size) = (print.op, self.group().size());
        let seq = sequence.next(op);
        if rank.is_alone() && !op.is_message() {
            let called = CollectiveId { op, seq, label: call.label.clone(), ranks: self.group().shared_ranks() };
            return Work::failed(rank.fail(CommError::CollectiveInRunOn { rank: rank.rank, called }));
        }
        let span = trace::posted(rank.rank, self.group(), seq, &print, call.phase, bytes);
        let Call { label, phase, deferred: is_deferred, .. } = call;
        let (posted, recorder) = (Instant::now(), rank.ledger.recorder());
        let posting = Posting { channel: sequence.number(), seq, print: &print, phase, bytes, peer };
        let noted = recorder.posted(posted, &posting);
        let charge = Charge { noted, op, group_size, bytes, label, phase };
        if !is_deferred {
            rank.ledger.record(&charge);
        }
        match span.in_scope(|| begin(&**channel, CallContext { print, is_deferred })) {
            Ok(pending) => {
                recorder.taken(sequence, op, seq);
                Work::under_way(
                    pending,
                    InFlightGuard::new(rank.clone(), span, charge, posted, is_deferred, self.deadline),
                )
            }
            Err(error) => {
                recorder.over(noted, posted.elapsed(), OpOutcome::Refused);
                Work::failed(error)
            }
        }
    }
}

pub(super) fn bytes(tensors: &[TensorSignature]) -> u64 {
    tensors.iter().map(TensorSignature::bytes).sum()
}
