//! Backward of one step of a redistribution: the right-hand column of the [table](super).

use burn::tensor::Tensor;
use smallvec::SmallVec;

use super::collective::{all_gather, all_to_all};
use super::local::slice_dim;
use crate::Result;
use crate::comm::{Call, Communicator, ReduceOp, ShardedTensor};
use crate::placement::{PartialOp, ShardSizes};

/// Indices of mesh dimensions.
pub(crate) type MeshDims = SmallVec<[usize; 3]>;

/// Computes the gradient of a step's input from the gradient of its result.
#[derive(Debug)]
pub(super) struct StepVjp<const D: usize> {
    pub(super) mesh_dims: MeshDims,
    /// Communicator over the ranks along these mesh dimensions.
    pub(super) comm: Communicator,
    /// Index assigned in forward: see [`Call::forward_index`].
    pub(super) place: Option<u64>,
    pub(super) kind: PullbackKind<D>,
}

/// Data that the gradient of a step needs, by kind of step.
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
    ReduceScatter {
        dim: usize,
        sizes: ShardSizes,
        reduced: ReductionVjp<D>,
    },
    /// `S(to)` -> `S(from)`, each dimension with its shard sizes.
    AllToAll {
        from: (usize, ShardSizes),
        to: (usize, ShardSizes),
    },
}

/// Derivative of a reduction with respect to the local value.
#[derive(Debug)]
pub(super) enum ReductionVjp<const D: usize> {
    /// The derivative of every value is 1.
    Sum,
    /// The derivative of every value is `1 / k`, where `k` is the number of ranks.
    Avg,
    /// Only the extremum has a gradient. Ranks that tie share it evenly, so the result does not
    /// depend on the order of ranks (PyTorch's `amax` does the same).
    Extremum(Box<Extremum<D>>),
    /// The derivative of a value is the product of the other ranks' values, computed from this
    /// local value.
    Product(Box<Tensor<D>>),
}

/// A local value and the extremum over all ranks.
#[derive(Debug)]
pub(super) struct Extremum<const D: usize> {
    local: Tensor<D>,
    reduced: Tensor<D>,
}

impl<const D: usize> ReductionVjp<D> {
    /// Returns the derivative of `op`. The values are present only if a gradient is needed.
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

    /// Returns the gradient of the local value. `grad` and `reduced` belong to the full result of
    /// the reduction; without `reduced`, the stored one is used.
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
                let holds = extremum
                    .local
                    .clone()
                    .equal(reduced)
                    .float()
                    .cast(grad.dtype());
                let holders = vec![holds.clone().into_dispatch()];
                let holders = comm
                    .all_reduce(call.clone(), holders, ReduceOp::Sum)
                    .single()?;
                Ok(grad * holds / holders)
            }
            Self::Product(local) => {
                let others = others_product(comm, call, local)?.cast(grad.dtype());
                Ok(grad * others)
            }
        }
    }
}

/// Returns the product of the other ranks' values.
///
/// It multiplies the other values instead of dividing the full product by the local value: a zero,
/// an overflow or an underflow on this rank must not affect its own derivative.
fn others_product<const D: usize>(
    comm: &Communicator,
    call: &Call,
    local: &Tensor<D>,
) -> Result<Tensor<D>> {
    let size = comm.group().size();
    let rank = comm.group().rank();
    let len = local.dims()[0];
    let all = all_gather(
        comm,
        call.clone(),
        local.clone(),
        0,
        ShardSizes::Chunked(size * len),
    )
    .wait()?;
    let others = (0..size).filter(|&other| other != rank);
    let values = others.map(|other| all.clone().slice_dim(0, other * len..(other + 1) * len));
    Ok(values
        .reduce(|product, value| product * value)
        .unwrap_or_else(|| local.ones_like()))
}

impl<const D: usize> StepVjp<D> {
    /// Returns the gradient of the step's input.
    ///
    /// With `varying`, `grad` is this rank's partial sum, to be added up over the step's mesh
    /// dimensions.
    ///
    /// # Collective
    /// Over the step's mesh dimensions.
    pub(super) fn apply(&self, call: &Call, grad: Tensor<D>, varying: bool) -> Result<Tensor<D>> {
        let call = &Call {
            forward_index: self.place,
            ..call.clone()
        };
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
            PullbackKind::AllGather { dim, sizes } => {
                all_gather(comm, call.clone(), grad, *dim, sizes.clone()).wait()
            }
            PullbackKind::AllReduce { reduced } => reduced.derivative(comm, call, grad, None),
            PullbackKind::ReduceScatter {
                dim,
                sizes,
                reduced,
            } => {
                let block = |tensor: &Tensor<D>| {
                    let tensor = tensor.clone().into_dispatch();
                    ShardedTensor {
                        tensor,
                        dim: *dim,
                        sizes: sizes.clone(),
                    }
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
            // Only this rank's slice of the sum is needed, which is the change `S(dim)` -> varying.
            PullbackKind::Slice { dim, sizes } => {
                let grad = ShardedTensor {
                    tensor: grad.into_dispatch(),
                    dim: *dim,
                    sizes: sizes.clone(),
                };
                Ok(self
                    .comm
                    .reduce_scatter(call.clone(), vec![grad], ReduceOp::Sum)
                    .single()?)
            }
            _ => {
                let grad = all_reduce_sum(&self.comm, call, grad)?;
                self.apply_same(call, grad)
            }
        }
    }
}

/// Sums a gradient over the ranks: the backward of `R` -> varying.
pub(super) fn all_reduce_sum<const D: usize>(
    comm: &Communicator,
    call: &Call,
    grad: Tensor<D>,
) -> Result<Tensor<D>> {
    Ok(comm
        .all_reduce(call.clone(), vec![grad.into_dispatch()], ReduceOp::Sum)
        .single()?)
}
