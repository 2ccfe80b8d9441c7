//! Collectives on one local tensor.

use burn::backend::DispatchTensor;
use burn::tensor::Tensor;

use super::Kind;
use crate::Result;
use crate::comm::{Call, Communicator, Sharded, Work};

/// Concatenates the ranks' pieces of a dimension of length `len`.
pub(super) fn all_gather<const D: usize, K: Kind>(
    comm: &dyn Communicator,
    call: Call,
    piece: Tensor<D, K>,
    dim: usize,
    len: usize,
) -> Result<Tensor<D, K>> {
    let piece = Sharded { tensor: piece.into_dispatch(), dim, len };
    single(comm.all_gather(call, vec![piece]))
}

/// Re-cuts from pieces of `from`, of length `len` over all ranks, to pieces of `to`.
pub(super) fn all_to_all<const D: usize, K: Kind>(
    comm: &dyn Communicator,
    call: Call,
    piece: Tensor<D, K>,
    from: usize,
    len: usize,
    to: usize,
) -> Result<Tensor<D, K>> {
    let piece = Sharded { tensor: piece.into_dispatch(), dim: from, len };
    Ok(Tensor::from_dispatch(comm.all_to_all(call, piece, to).wait()?))
}

/// The result of a collective on one tensor.
pub(super) fn single<const D: usize, K: Kind>(work: Work<Vec<DispatchTensor>>) -> Result<Tensor<D, K>> {
    let mut tensors = work.wait()?;
    let tensor = tensors.pop().expect("a collective returns as many tensors as it takes");
    Ok(Tensor::from_dispatch(tensor))
}
