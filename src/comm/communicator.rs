//! [`Communicator`]: the collectives of one group of ranks.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use burn::backend::{DispatchTensor, TensorMetadata};
use parking_lot::Mutex;

use super::arguments::{self, Problem};
use super::engine::{Channel, Member, Pairs, Post, Posted, Print, TensorPrint};
use super::rank::Rank;
use super::work::{Charge, Place};
use super::{Call, CollectiveId, CommError, Group, Op, ReduceOp, Sharded, TensorMeta, Work, trace};
use crate::placement::Cut;

/// The collectives of one group, seen from one of its ranks. Tensors are plain (no autodiff), of any kind and dtype.
/// Cheap to clone: clones are one communicator.
///
/// Several tensors travel in one collective: one rendezvous, one ledger entry.
///
/// # Collective
/// Every rank of the group must make the same calls in the same order, with equal labels,
/// shapes, cuts and dtypes. Each call carries a fingerprint of all of these; a difference is
/// [`CommError::Mismatch`] on every rank, never a hang.
///
/// # Errors
/// Every [`Work`] resolves to its value or to a [`CommError`] that names the
/// rank at fault, the operation and its sequence number.
#[derive(Debug, Clone)]
pub struct Communicator {
    shared: Arc<Shared>,
    /// How long one wait may last.
    deadline: Duration,
}

/// What the clones of a communicator share.
#[derive(Debug)]
struct Shared {
    rank: Arc<Rank>,
    channel: Arc<dyn Channel>,
    /// Calls so far.
    calls: AtomicU64,
    drawn: AtomicU64,
    duplicates: Mutex<HashMap<&'static str, Communicator>>,
}

impl Communicator {
    /// Of `group`, for the rank that it is seen from.
    pub(super) fn new(rank: Arc<Rank>, group: Group, name: &'static str, deadline: Duration) -> Self {
        let member = Member { group, device: rank.device.clone(), ledger: rank.ledger.clone() };
        let channel = rank.engine.channel(member, name);
        let (calls, drawn, duplicates) = (AtomicU64::default(), AtomicU64::default(), Mutex::default());
        Self { shared: Arc::new(Shared { rank, channel, calls, drawn, duplicates }), deadline }
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
    /// come to use them: see [`Call::drawn`].
    pub fn draw(&self) -> u64 {
        self.shared.drawn.fetch_add(1, Ordering::Relaxed)
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
    /// [`Launch::deadline`](super::Launch::deadline). Local.
    pub fn with_deadline(&self, deadline: Duration) -> Self {
        Self { deadline, ..self.clone() }
    }

    /// Concatenates every rank's piece: each rank gets the whole of every tensor.
    pub fn all_gather(&self, call: Call, shards: Vec<Sharded>) -> Work<Vec<DispatchTensor>> {
        let checked = arguments::pieces(&shards, self.group());
        let prints = match self.at_home(checked, shards.iter().map(|shard| &shard.tensor)) {
            Ok(prints) => prints,
            Err(problem) => return self.refuse(Op::AllGather, &call, problem),
        };
        if self.is_alone() {
            return Work::done(shards.into_iter().map(|shard| shard.tensor).collect());
        }
        let (bytes, print) = (bytes(&prints), Print::new(Op::AllGather, &call, prints));
        self.post(call, print, bytes, |channel, post| channel.all_gather(post, shards))
    }

    /// Reduces the wholes of all ranks; each rank gets its own part of every tensor.
    pub fn reduce_scatter(&self, call: Call, wholes: Vec<Sharded>, op: ReduceOp) -> Work<Vec<DispatchTensor>> {
        let checked = arguments::wholes(&wholes, op, self.group());
        let prints = match self.at_home(checked, wholes.iter().map(|whole| &whole.tensor)) {
            Ok(prints) => prints,
            Err(problem) => return self.refuse(Op::ReduceScatter, &call, problem),
        };
        if self.is_alone() {
            return Work::done(wholes.into_iter().map(|whole| whole.tensor).collect());
        }
        let bytes = bytes(&prints);
        let print = Print { reduce: Some(op), ..Print::new(Op::ReduceScatter, &call, prints) };
        self.post(call, print, bytes, |channel, post| channel.reduce_scatter(post, wholes, op))
    }

    /// Reduces tensors of one shape over the ranks; each rank gets the result.
    pub fn all_reduce(&self, call: Call, tensors: Vec<DispatchTensor>, op: ReduceOp) -> Work<Vec<DispatchTensor>> {
        let prints = match self.at_home(arguments::reduced(&tensors, op), &tensors) {
            Ok(prints) => prints,
            Err(problem) => return self.refuse(Op::AllReduce, &call, problem),
        };
        if self.is_alone() {
            return Work::done(tensors);
        }
        let bytes = bytes(&prints);
        let print = Print { reduce: Some(op), ..Print::new(Op::AllReduce, &call, prints) };
        self.post(call, print, bytes, |channel, post| channel.all_reduce(post, tensors, op))
    }

    /// Re-cuts a tensor: from pieces along `shard.dim` to pieces along `to_dim`, cut as `to_cut`.
    ///
    /// `shard` is the rank's own piece, whole along `to_dim`; the result is whole along `shard.dim`
    /// and holds the rank's part of `to_dim`.
    pub fn all_to_all(&self, call: Call, shard: Sharded, to_dim: usize, to_cut: Cut) -> Work<DispatchTensor> {
        let checked = arguments::recut(&shard, to_dim, &to_cut, self.group());
        let whole = match self.at_home(checked, [&shard.tensor]) {
            Ok(whole) => whole,
            Err(problem) => return self.refuse(Op::AllToAll, &call, problem),
        };
        if self.is_alone() {
            return Work::done(shard.tensor);
        }
        let piece = (shard.tensor.shape().num_elements() * shard.tensor.dtype().size()) as u64;
        let print = Print::new(Op::AllToAll, &call, vec![whole]);
        self.post(call, print, piece, |channel, post| channel.recut(post, shard, to_dim, to_cut))
    }

    /// Every rank gives each rank of the group a tensor of its own, of any shape and dtype, or none: `parts[i]`
    /// is for group rank `i`. It gets what each had for it, in group order; `metas` describes that, and is
    /// compared with what is given. Its own part comes back as it is.
    ///
    /// ```
    /// use burn::tensor::{DType, Shape, Tensor};
    /// use burn_dtensor::comm::{Launch, TensorMeta, launch};
    ///
    /// // Every rank gives its neighbour as many elements as its rank says.
    /// launch(Launch::threads(3), |world| {
    ///     let (rank, next, last) = (world.rank(), (world.rank() + 1) % 3, (world.rank() + 2) % 3);
    ///     let (mut parts, mut metas) = (vec![None; 3], vec![None; 3]);
    ///     parts[next] = Some(Tensor::<1>::zeros([rank], world.device()).into_dispatch());
    ///     metas[last] = Some(TensorMeta { shape: Shape::from([last]), dtype: DType::F32 });
    ///     let mut got = world.all().all_to_all_list("neighbours".into(), parts, metas).wait()?;
    ///     assert_eq!(Tensor::<1>::from_dispatch(got[last].take().unwrap()).dims(), [last]);
    ///     Ok(())
    /// })?;
    /// # Ok::<_, burn_dtensor::Error>(())
    /// ```
    pub fn all_to_all_list(
        &self,
        call: Call,
        parts: Vec<Option<DispatchTensor>>,
        metas: Vec<Option<TensorMeta>>,
    ) -> Work<Vec<Option<DispatchTensor>>> {
        let checked = arguments::listed(&parts, metas.clone(), self.group());
        let pairs: Pairs = match self.at_home(checked, parts.iter().flatten()) {
            Ok(pairs) => pairs,
            Err(problem) => return self.refuse(Op::AllToAllList, &call, problem),
        };
        if self.is_alone() {
            return Work::done(parts);
        }
        let bytes = pairs.bytes();
        let print = Print { pairs: Some(pairs.into()), ..Print::new(Op::AllToAllList, &call, Vec::new()) };
        let listed = |parts: Vec<Option<DispatchTensor>>| parts.into_iter().map(Vec::from_iter).collect();
        let metas = metas.into_iter().map(Vec::from_iter).collect();
        let work = self.post(call, print, bytes, |channel, post| channel.all_to_all(post, listed(parts), metas));
        work.then(|parts: Vec<Vec<_>>| parts.into_iter().map(|mut part| part.pop()).collect())
    }

    /// Every rank gets the tensors of group rank `root`. `metas` describes them on every rank;
    /// `tensors` is `Some` on the root and ignored elsewhere.
    pub fn broadcast(
        &self,
        call: Call,
        tensors: Option<Vec<DispatchTensor>>,
        metas: Vec<TensorMeta>,
        root: usize,
    ) -> Work<Vec<DispatchTensor>> {
        let checked = arguments::rooted(tensors.as_deref(), &metas, root, self.group());
        let tensors = tensors.filter(|_| self.group().rank() == root).unwrap_or_default();
        let prints = match self.at_home(checked, &tensors) {
            Ok(prints) => prints,
            Err(problem) => return self.refuse(Op::Broadcast, &call, problem),
        };
        if self.is_alone() {
            return Work::done(tensors);
        }
        let bytes = bytes(&prints);
        let print = Print { root: Some(root), ..Print::new(Op::Broadcast, &call, prints) };
        self.post(call, print, bytes, |channel, post| channel.broadcast(post, tensors, metas, root))
    }

    /// Each rank gets its own part of tensor `i` of group rank `root`: `cuts[i]` is the dimension, and
    /// how it is cut. `metas` describes the wholes on every rank; `tensors` is `Some` on the root and
    /// ignored elsewhere.
    pub fn scatter(
        &self,
        call: Call,
        tensors: Option<Vec<DispatchTensor>>,
        metas: Vec<TensorMeta>,
        cuts: Vec<(usize, Cut)>,
        root: usize,
    ) -> Work<Vec<DispatchTensor>> {
        let checked = arguments::rooted(tensors.as_deref(), &metas, root, self.group()).and_then(|mut prints| {
            arguments::scattered(&mut prints, &cuts, self.group())?;
            Ok(prints)
        });
        let tensors = tensors.filter(|_| self.group().rank() == root).unwrap_or_default();
        let prints = match self.at_home(checked, &tensors) {
            Ok(prints) => prints,
            Err(problem) => return self.refuse(Op::Scatter, &call, problem),
        };
        if self.is_alone() {
            return Work::done(tensors);
        }
        let bytes = bytes(&prints);
        let print = Print { root: Some(root), ..Print::new(Op::Scatter, &call, prints) };
        self.post(call, print, bytes, |channel, post| channel.scatter(post, tensors, metas, cuts, root))
    }

    /// Returns once every rank of the group has called it.
    pub fn barrier(&self, call: Call) -> Work<()> {
        if self.is_alone() {
            return Work::done(());
        }
        let print = Print::new(Op::Barrier, &call, Vec::new());
        self.post(call, print, 0, |channel, post| channel.barrier(post))
    }

    fn is_alone(&self) -> bool {
        self.group().size() == 1
    }

    /// `checked`, unless a tensor is not on the rank's device.
    fn at_home<'a, T>(
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
    fn refuse<T>(&self, op: Op, call: &Call, problem: Problem) -> Work<T> {
        let Problem { problem, remedy } = problem;
        let (rank, label) = (self.shared.rank.rank, call.label.to_string());
        let error = CommError::InvalidArgument { rank, op, label, problem, remedy: remedy.into() };
        Work::failed(self.shared.rank.fail(error))
    }

    /// Has the engine begin a call. `bytes` is what the ledger counts.
    fn post<T>(
        &self,
        call: Call,
        print: Print,
        bytes: u64,
        begin: impl FnOnce(&dyn Channel, Post) -> Posted<T>,
    ) -> Work<T> {
        let Shared { rank, channel, calls, .. } = &*self.shared;
        if let Err(error) = rank.check_thread(print.op, &call) {
            return Work::failed(error);
        }
        let (op, ranks) = (print.op, self.group().ranks().len());
        let seq = calls.fetch_add(1, Ordering::Relaxed);
        if rank.is_alone() {
            let called = CollectiveId { op, seq, label: call.label.clone(), ranks: self.group().shared_ranks() };
            return Work::failed(rank.fail(CommError::InsideOnly { rank: rank.rank, called }));
        }
        let span = trace::posted(rank.rank, self.group(), seq, &print, call.phase, bytes);
        let post = Post { print, ahead: call.ahead };
        let charge = Charge { op, ranks, bytes, call };
        if !charge.call.ahead {
            charge.record(&rank.ledger);
        }
        match span.in_scope(|| begin(&**channel, post)) {
            Ok(pending) => Work::under_way(pending, Place::new(rank.clone(), span), charge, self.deadline),
            Err(error) => Work::failed(error),
        }
    }
}

fn bytes(tensors: &[TensorPrint]) -> u64 {
    tensors.iter().map(TensorPrint::bytes).sum()
}
