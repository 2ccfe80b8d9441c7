//! Collectives on a single local tensor.

use burn::backend::DispatchTensor;
use burn::tensor::Tensor;

use super::Kind;
use crate::Result;
use crate::comm::{Call, Communicator, ShardedTensor, Work};
use crate::placement::ShardSizes;

/// A local tensor that is available, or the result of a collective in flight.
#[derive(Debug)]
pub(super) enum Moving<const D: usize, K: Kind> {
    /// The tensor is available.
    There(Tensor<D, K>),
    /// The only result of a collective on a list of tensors.
    Many(Work<Vec<DispatchTensor>>),
    /// The result of a collective on a single tensor.
    One(Work<DispatchTensor>),
}

impl<const D: usize, K: Kind> Moving<D, K> {
    /// Returns true if [`wait`](Self::wait) would return without blocking on other ranks.
    pub fn is_complete(&self) -> bool {
        match self {
            Self::There(_) => true,
            Self::Many(work) => work.is_complete(),
            Self::One(work) => work.is_complete(),
        }
    }

    /// Waits for the collective, if there is one, and returns the tensor.
    pub fn wait(self) -> Result<Tensor<D, K>> {
        match self {
            Self::There(tensor) => Ok(tensor),
            Self::Many(work) => Ok(work.single()?),
            Self::One(work) => Ok(Tensor::from_dispatch(work.wait()?)),
        }
    }
}

/// Starts an all-gather, which concatenates the ranks' shards along dimension `dim`.
pub(super) fn all_gather<const D: usize, K: Kind>(
    comm: &Communicator,
    call: Call,
    block: Tensor<D, K>,
    dim: usize,
    sizes: ShardSizes,
) -> Moving<D, K> {
    let block = ShardedTensor {
        tensor: block.into_dispatch(),
        dim,
        sizes,
    };
    Moving::Many(comm.all_gather(call, vec![block]))
}

/// Starts an all-to-all, which changes the sharded dimension from `dim` to `to_dim`. Each dimension
/// comes with its shard sizes.
pub(super) fn all_to_all<const D: usize, K: Kind>(
    comm: &Communicator,
    call: Call,
    block: Tensor<D, K>,
    (dim, sizes): (usize, ShardSizes),
    (to_dim, to_sizes): (usize, ShardSizes),
) -> Moving<D, K> {
    let block = ShardedTensor {
        tensor: block.into_dispatch(),
        dim,
        sizes,
    };
    Moving::One(comm.all_to_all(call, block, to_dim, to_sizes))
}
