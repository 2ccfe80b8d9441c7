//! Collectives on one local tensor.

use burn::backend::DispatchTensor;
use burn::tensor::Tensor;

use super::Kind;
use crate::Result;
use crate::comm::{Call, Communicator, Sharded, Work};
use crate::placement::Cut;

/// Concatenates the ranks' pieces of dimension `dim`.
pub(super) fn all_gather<const D: usize, K: Kind>(
    comm: &dyn Communicator,
    call: Call,
    piece: Tensor<D, K>,
    dim: usize,
    cut: Cut,
) -> Result<Tensor<D, K>> {
    let piece = Sharded { tensor: piece.into_dispatch(), dim, cut };
    single(comm.all_gather(call, vec![piece]))
}

/// Re-cuts from pieces of one dimension to pieces of another: each with its cut.
pub(super) fn all_to_all<const D: usize, K: Kind>(
    comm: &dyn Communicator,
    call: Call,
    piece: Tensor<D, K>,
    (dim, cut): (usize, Cut),
    (to_dim, to_cut): (usize, Cut),
) -> Result<Tensor<D, K>> {
    let piece = Sharded { tensor: piece.into_dispatch(), dim, cut };
    Ok(Tensor::from_dispatch(comm.all_to_all(call, piece, to_dim, to_cut).wait()?))
}

/// The result of a collective on one tensor.
pub(super) fn single<const D: usize, K: Kind>(work: Work<Vec<DispatchTensor>>) -> Result<Tensor<D, K>> {
    let mut tensors = work.wait()?;
    let tensor = tensors.pop().expect("a collective returns as many tensors as it takes");
    Ok(Tensor::from_dispatch(tensor))
}
