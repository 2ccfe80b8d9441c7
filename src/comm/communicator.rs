//! The [`Communicator`] trait: the collectives of one group of ranks.

use std::fmt::Debug;
use std::sync::Arc;

use burn::backend::DispatchTensor;
use burn::tensor::{DType, Shape};

use super::{Group, Work};
use crate::placement::Cut;

/// How values of several ranks become one.
///
/// Reductions run in a fixed binary tree over group ranks, never in order of arrival, so that a
/// run is bitwise repeatable. f16 and bf16 accumulate in f32 and round once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ReduceOp {
    /// Sum over ranks.
    Sum,
    /// Sum over ranks divided by the number of ranks.
    Avg,
    /// Elementwise minimum.
    Min,
    /// Elementwise maximum.
    Max,
    /// Elementwise product.
    Product,
}

/// The pass a collective belongs to, as counted by the [`Ledger`](super::Ledger).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub enum Phase {
    /// Set-up, checkpoints, norms: anything outside a training pass.
    #[default]
    Other,
    /// During a forward pass.
    Forward,
    /// During a backward pass.
    Backward,
}

impl std::fmt::Display for Phase {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(match self {
            Self::Other => "other",
            Self::Forward => "forward",
            Self::Backward => "backward",
        })
    }
}

/// What a collective is for: part of its fingerprint, and of the ledger's key.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct Call {
    /// The caller's name for the operation, such as a unit's path. Must agree on all ranks.
    pub label: Arc<str>,
    /// The pass it runs in.
    pub phase: Phase,
    /// Of a collective that the graph runs in backward: the place that [`Communicator::draw`] gave it
    /// in forward. The graph's order may differ between ranks; a collective that meets one drawn
    /// elsewhere in forward is then an error, where it could be a wrong sum. The ledger leaves it out.
    pub drawn: Option<u64>,
    /// The distributed tensor, on all its ranks, of which a part travels. The ledger leaves it out.
    pub whole: Option<TensorMeta>,
    /// Of a pending reduction: the global shapes of what its terms were computed from, such as
    /// `[4, 8] and [8, 2]`. The ledger leaves it out.
    pub terms: Option<Arc<str>>,
    /// Names of the tensors, such as the parameters' paths, in the order in which they travel; tensors
    /// after the last name have none. Must agree on all ranks. The ledger leaves them out.
    pub names: Option<Arc<[Arc<str>]>>,
    /// Issued ahead of need: the ledger counts it when its result is taken, and not before.
    pub ahead: bool,
}

impl Call {
    /// A call named `label` outside any training pass.
    pub fn new(label: impl Into<Arc<str>>) -> Self {
        Self { label: label.into(), ..Self::default() }
    }

    /// The same call counted under `phase`.
    pub fn in_phase(mut self, phase: Phase) -> Self {
        self.phase = phase;
        self
    }

    /// The same call with its place in forward.
    pub fn drawn(mut self, place: u64) -> Self {
        self.drawn = Some(place);
        self
    }

    /// The same call, of tensors of these names.
    pub fn named(mut self, names: impl IntoIterator<Item = Arc<str>>) -> Self {
        self.names = Some(names.into_iter().collect());
        self
    }

    /// The same call, counted when its result is taken.
    pub fn ahead(mut self) -> Self {
        self.ahead = true;
        self
    }
}

impl From<&str> for Call {
    fn from(label: &str) -> Self {
        Self::new(label)
    }
}

/// Shape and dtype of a tensor that a rank does not hold yet.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct TensorMeta {
    /// Shape of the whole tensor.
    pub shape: Shape,
    /// Element type.
    pub dtype: DType,
}

/// One tensor cut along `dim` over the group: rank `r` holds the `r`-th part of `cut`.
///
/// In an all-gather `tensor` is the rank's own piece (possibly empty); in a reduce-scatter it is
/// the whole. `cut` is the same on every rank, so that every rank knows every piece.
#[derive(Debug, Clone)]
pub struct Sharded {
    /// The piece or the whole; plain (no autodiff), any kind.
    pub tensor: DispatchTensor,
    /// The cut dimension.
    pub dim: usize,
    /// How the length of `dim` in the whole falls on the ranks.
    pub cut: Cut,
}

/// The collectives of one group. Tensors are plain (no autodiff), of any kind and dtype.
///
/// Several tensors travel in one collective: one rendezvous, one ledger entry.
///
/// # Collective
/// Every rank of the group must make the same calls in the same order, with equal labels,
/// shapes, cuts and dtypes. Each call carries a fingerprint of all of these; a difference is
/// [`CommError::Mismatch`](super::CommError::Mismatch) on every rank, never a hang.
///
/// # Errors
/// Every [`Work`] resolves to its value or to a [`CommError`](super::CommError) that names the
/// rank at fault, the operation and its sequence number.
pub trait Communicator: Debug + Send + Sync {
    /// The ranks of this group and the caller's place among them.
    fn group(&self) -> &Group;

    /// The next place in this rank's forward: 0, 1, .. on this communicator. Local.
    ///
    /// Ranks that run the same forward draw the same places, in whatever order their backward passes
    /// come to use them: see [`Call::drawn`].
    fn draw(&self) -> u64;

    /// The same ranks with a sequence of calls of its own: calls on it meet only calls on it, so that
    /// neither order waits for the other. Local; of one name there is one.
    ///
    /// Names are the group's, duplicates have none of their own; `fully_shard` has taken "reduced" and
    /// "gathered again", and random streams "threads".
    fn duplicate(&self, name: &'static str) -> Arc<dyn Communicator>;

    /// Concatenates every rank's piece: each rank gets the whole of every tensor.
    fn all_gather(&self, call: Call, shards: Vec<Sharded>) -> Work<Vec<DispatchTensor>>;

    /// Reduces the wholes of all ranks; each rank gets its own part of every tensor.
    fn reduce_scatter(&self, call: Call, wholes: Vec<Sharded>, op: ReduceOp) -> Work<Vec<DispatchTensor>>;

    /// Reduces tensors of one shape over the ranks; each rank gets the result.
    fn all_reduce(&self, call: Call, tensors: Vec<DispatchTensor>, op: ReduceOp) -> Work<Vec<DispatchTensor>>;

    /// Re-cuts a tensor: from pieces along `shard.dim` to pieces along `to_dim`, cut as `to_cut`.
    ///
    /// `shard` is the rank's own piece, whole along `to_dim`; the result is whole along `shard.dim`
    /// and holds the rank's part of `to_dim`.
    fn all_to_all(&self, call: Call, shard: Sharded, to_dim: usize, to_cut: Cut) -> Work<DispatchTensor>;

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
    fn all_to_all_list(
        &self,
        call: Call,
        parts: Vec<Option<DispatchTensor>>,
        metas: Vec<Option<TensorMeta>>,
    ) -> Work<Vec<Option<DispatchTensor>>>;

    /// Every rank gets the tensors of group rank `root`. `metas` describes them on every rank;
    /// `tensors` is `Some` on the root and ignored elsewhere.
    fn broadcast(
        &self,
        call: Call,
        tensors: Option<Vec<DispatchTensor>>,
        metas: Vec<TensorMeta>,
        root: usize,
    ) -> Work<Vec<DispatchTensor>>;

    /// Each rank gets its own part of tensor `i` of group rank `root`: `cuts[i]` is the dimension, and
    /// how it is cut. `metas` describes the wholes on every rank; `tensors` is `Some` on the root and
    /// ignored elsewhere.
    fn scatter(
        &self,
        call: Call,
        tensors: Option<Vec<DispatchTensor>>,
        metas: Vec<TensorMeta>,
        cuts: Vec<(usize, Cut)>,
        root: usize,
    ) -> Work<Vec<DispatchTensor>>;

    /// Returns once every rank of the group has called it.
    fn barrier(&self, call: Call) -> Work<()>;
}
