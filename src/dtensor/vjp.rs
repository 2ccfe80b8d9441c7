//! One step of a change of layout, backward: the right-hand column of the [table](super).

use burn::tensor::Tensor;
use smallvec::SmallVec;

use super::collective::{all_gather, all_to_all};
use super::local::slice_dim;
use crate::Result;
use crate::comm::{Call, Communicator, ReduceOp, ShardedTensor};
use crate::placement::{PartialOp, ShardSizes};

/// Mesh dimensions.
pub(crate) type MeshDims = SmallVec<[usize; 3]>;

/// Takes the gradient of a step's result to the gradient of its input.
#[derive(Debug)]
pub(super) struct StepVjp<const D: usize> {
    pub(super) mesh_dims: MeshDims,
    /// Of the ranks along them.
    pub(super) comm: Communicator,
    /// Drawn in forward: see [`Call::forward_index`].
    pub(super) place: Option<u64>,
    pub(super) kind: PullbackKind<D>,
}

/// What a step's gradient needs.
#[derive(Debug)]
pub(super) enum PullbackKind<const D: usize> {
    /// `R` -> `P(sum)`.
    Nothing,
    /// `S(dim)` -> `R` and `S(dim)` -> `P(sum)`.
    Slice { dim: usize, sizes: ShardSizes },
    /// `R` -> `S(dim)`.
    AllGather { dim: usize, sizes: ShardSizes },
    /// `P(op)` -> `R`.
    AllReduce { reduced: ReductionVjp<D> },
    /// `P(op)` -> `S(dim)`.
    ReduceScatter { dim: usize, sizes: ShardSizes, reduced: ReductionVjp<D> },
    /// `S(to)` -> `S(from)`: each dimension with its cut.
    AllToAll { from: (usize, ShardSizes), to: (usize, ShardSizes) },
}

/// A reduction's derivative by the local value.
#[derive(Debug)]
pub(super) enum ReductionVjp<const D: usize> {
    /// Every value counts in full.
    Sum,
    /// Every value counts for `1 / k`.
    Avg,
    /// Only the extremum counts. Ranks that tie share the gradient evenly, which no renumbering
    /// of ranks changes (and as `amax` does in PyTorch).
    Extremum(Box<Extremum<D>>),
    /// A value counts for the product of the others, found from the local values.
    Product(Box<Tensor<D>>),
}

/// A local value and the extremum of all.
#[derive(Debug)]
pub(super) struct Extremum<const D: usize> {
    local: Tensor<D>,
    reduced: Tensor<D>,
}

impl<const D: usize> ReductionVjp<D> {
    /// The derivative of `op` at `local`. Without values there is no gradient to take.
    pub(super) fn new(op: PartialOp, local: Option<Tensor<D>>, reduced: Option<Tensor<D>>) -> Self {
        match (op, local, reduced) {
            (PartialOp::Min | PartialOp::Max, Some(local), Some(reduced)) => {
                Self::Extremum(Box::new(Extremum { local, reduced }))
            }
            (PartialOp::Product, Some(local), _) => Self::Product(Box::new(local)),
            (PartialOp::Avg, ..) => Self::Avg,
            _ => Self::Sum,
        }
    }

    /// The gradient of the local value. `grad` and `reduced` are those of the whole result.
    fn derivative(
        &self,
        comm: &Communicator,
        call: &Call,
        grad: Tensor<D>,
        reduced: Option<Tensor<D>>,
    ) -> Result<Tensor<D>> {
        match self {
            Self::Sum => Ok(grad),
            Self::Avg => Ok(grad.div_scalar(comm.group().size() as f64)),
            Self::Extremum(extremum) => {
                let reduced = reduced.unwrap_or_else(|| extremum.reduced.clone());
                let holds = extremum.local.clone().equal(reduced).float().cast(grad.dtype());
                let holders = vec![holds.clone().into_dispatch()];
                let holders = comm.all_reduce(call.clone(), holders, ReduceOp::Sum).single()?;
                Ok(grad * holds / holders)
            }
            Self::Product(local) => {
                let others = others_product(comm, call, local)?.cast(grad.dtype());
                Ok(grad * others)
            }
        }
    }
}

/// The product of the other ranks' values.
///
/// Multiplied out, not divided out of the whole product: a zero, an overflow or an underflow on
/// this rank must not reach its own derivative.
fn others_product<const D: usize>(comm: &Communicator, call: &Call, local: &Tensor<D>) -> Result<Tensor<D>> {
    let (size, rank, len) = (comm.group().size(), comm.group().rank(), local.dims()[0]);
    let all = all_gather(comm, call.clone(), local.clone(), 0, ShardSizes::Chunked(size * len)).wait()?;
    let others = (0..size).filter(|&other| other != rank);
    let values = others.map(|other| all.clone().slice_dim(0, other * len..(other + 1) * len));
    Ok(values.reduce(|product, value| product * value).unwrap_or_else(|| local.ones_like()))
}

impl<const D: usize> StepVjp<D> {
    /// The gradient of the step's input.
    ///
    /// With `varying`, `grad` is one rank's term of a sum over the step's mesh dimensions.
    ///
    /// # Collective
    /// Over the step's mesh dimensions.
    pub(super) fn apply(&self, call: &Call, grad: Tensor<D>, varying: bool) -> Result<Tensor<D>> {
        let call = &Call { forward_index: self.place, ..call.clone() };
        match varying {
            true => self.apply_varying(call, grad),
            false => self.apply_same(call, grad),
        }
    }

    fn apply_same(&self, call: &Call, grad: Tensor<D>) -> Result<Tensor<D>> {
        let comm = &self.comm;
        match &self.kind {
            PullbackKind::Nothing => Ok(grad),
            PullbackKind::Slice { dim, sizes } => {
                let own = sizes.range(comm.group().size(), comm.group().rank());
                Ok(slice_dim(grad, *dim, own))
            }
            PullbackKind::AllGather { dim, sizes } => all_gather(comm, call.clone(), grad, *dim, sizes.clone()).wait(),
            PullbackKind::AllReduce { reduced } => reduced.derivative(comm, call, grad, None),
            PullbackKind::ReduceScatter { dim, sizes, reduced } => {
                let block = |tensor: &Tensor<D>| {
                    let tensor = tensor.clone().into_dispatch();
                    ShardedTensor { tensor, dim: *dim, sizes: sizes.clone() }
                };
                let mut full_tensors = vec![block(&grad)];
                if let ReductionVjp::Extremum(extremum) = reduced {
                    full_tensors.push(block(&extremum.reduced));
                }
                let full_tensors = comm.all_gather(call.clone(), full_tensors).wait()?;
                let mut full_tensors = full_tensors.into_iter().map(Tensor::from_dispatch);
                let grad = full_tensors.next().expect("the gradient was gathered");
                reduced.derivative(comm, call, grad, full_tensors.next())
            }
            PullbackKind::AllToAll { from, to } => {
                all_to_all(comm, call.clone(), grad, from.clone(), to.clone()).wait()
            }
        }
    }

    fn apply_varying(&self, call: &Call, grad: Tensor<D>) -> Result<Tensor<D>> {
        match &self.kind {
            // The sum's own slice is all that is needed: `S(dim)` -> varying.
            PullbackKind::Slice { dim, sizes } => {
                let grad = ShardedTensor { tensor: grad.into_dispatch(), dim: *dim, sizes: sizes.clone() };
                Ok(self.comm.reduce_scatter(call.clone(), vec![grad], ReduceOp::Sum).single()?)
            }
            _ => {
                let grad = all_reduce_sum(&self.comm, call, grad)?;
                self.apply_same(call, grad)
            }
        }
    }
}

/// `R` -> varying, backward.
pub(super) fn all_reduce_sum<const D: usize>(comm: &Communicator, call: &Call, grad: Tensor<D>) -> Result<Tensor<D>> {
    Ok(comm.all_reduce(call.clone(), vec![grad.into_dispatch()], ReduceOp::Sum).single()?)
}
