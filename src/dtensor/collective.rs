//! Collectives on one local tensor.

use burn::backend::DispatchTensor;
use burn::tensor::Tensor;

use super::Kind;
use crate::Result;
use crate::comm::{Call, Communicator, ShardedTensor, Work};
use crate::placement::ShardSizes;

/// One local tensor, there or on its way.
#[derive(Debug)]
pub(super) enum Moving<const D: usize, K: Kind> {
    /// It is there.
    There(Tensor<D, K>),
    /// Alone in a collective of many.
    Many(Work<Vec<DispatchTensor>>),
    /// In a collective of one.
    One(Work<DispatchTensor>),
}

impl<const D: usize, K: Kind> Moving<D, K> {
    /// Whether it is there.
    pub fn is_complete(&self) -> bool {
        match self {
            Self::There(_) => true,
            Self::Many(work) => work.is_complete(),
            Self::One(work) => work.is_complete(),
        }
    }

    /// The tensor, once it is there.
    pub fn wait(self) -> Result<Tensor<D, K>> {
        match self {
            Self::There(tensor) => Ok(tensor),
            Self::Many(work) => Ok(work.single()?),
            Self::One(work) => Ok(Tensor::from_dispatch(work.wait()?)),
        }
    }
}

/// Concatenates the ranks' pieces of dimension `dim`.
pub(super) fn all_gather<const D: usize, K: Kind>(
    comm: &Communicator,
    call: Call,
    block: Tensor<D, K>,
    dim: usize,
    sizes: ShardSizes,
) -> Moving<D, K> {
    let block = ShardedTensor { tensor: block.into_dispatch(), dim, sizes };
    Moving::Many(comm.all_gather(call, vec![block]))
}

/// Re-cuts from pieces of one dimension to pieces of another: each with its cut.
pub(super) fn all_to_all<const D: usize, K: Kind>(
    comm: &Communicator,
    call: Call,
    block: Tensor<D, K>,
    (dim, sizes): (usize, ShardSizes),
    (to_dim, to_sizes): (usize, ShardSizes),
) -> Moving<D, K> {
    let block = ShardedTensor { tensor: block.into_dispatch(), dim, sizes };
    Moving::One(comm.all_to_all(call, block, to_dim, to_sizes))
}
