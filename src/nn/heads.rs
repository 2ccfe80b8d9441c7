//! [`local_heads`]: the number of attention heads of a rank.

use crate::dtensor::{DTensor, DTensorError};
use crate::error::OrUnwind;
use crate::placement::Placement;

/// Returns how many of `heads` attention heads this rank's local tensor of `x`, shape `[.., heads *
/// d_head]`, contains. Local.
///
/// A [`DTensor`] does not need it: `x.reshape([batch, seq, heads, d_head])` takes the global number
/// of heads. A local tensor contains the features of only `heads / ranks` heads. Reshaping it to
/// `[batch, seq, heads, -1]` with the global number yields as many heads with fewer features each,
/// so attention mixes features of different heads, without an error.
///
/// ```
/// use burn_dtensor::nn::local_heads;
/// # use burn_dtensor::prelude::*;
/// # launch(Launch::threads(2), |world| {
/// # let mesh = DeviceMesh::new(world, [2], ["tp"])?;
/// // Output of a column-sharded projection: 4 heads with 3 features each.
/// let query = DTensor::<3>::ones([2, 5, 12], &mesh, &[Placement::Shard(2)], world.device())?;
/// let heads = local_heads(&query, 4);
/// assert_eq!(heads, 2);
/// let query = query.to_local().reshape([2, 5, heads as i32, -1]);
/// assert_eq!(query.dims(), [2, 5, 2, 3]);
/// # Ok::<_, burn_dtensor::Error>(())
/// # })?;
/// # Ok::<_, burn_dtensor::comm::LaunchError>(())
/// ```
///
/// # Panics
/// Unwinds with [`DTensorError::Operands`], on every rank, if the shards are not complete heads on
/// every rank.
#[track_caller]
pub fn local_heads<const D: usize>(x: &DTensor<D>, heads: usize) -> usize {
    let last = D - 1;
    let is_uneven = x
        .layout()
        .shard_order(last)
        .iter()
        .any(|&mesh_dim| x.layout().uneven_sizes(mesh_dim).is_some());
    let shardings = x
        .placements()
        .iter()
        .zip(x.mesh().shape())
        .zip(x.mesh().names());
    let shardings = shardings.filter(|((placement, _), _)| **placement == Placement::Shard(last));
    let (sizes, names): (Vec<_>, Vec<_>) = shardings
        .map(|((_, &size), name)| (size, format!("`{name}`")))
        .unzip();
    let ranks = sizes.iter().product::<usize>();
    let features = x.dims()[last];
    if heads == 0 || !heads.is_multiple_of(ranks) || !features.is_multiple_of(heads) || is_uneven {
        let why = format!(
            "cannot shard {features} features in {heads} heads into complete heads over the {ranks} ranks of mesh \
             dimension {}. Make the number of heads divisible by the number of ranks, make the features divisible \
             by the number of heads, and shard them evenly",
            names.join(" and ")
        );
        let error = DTensorError::Operands {
            operator: "local_heads",
            shapes: vec![x.dims().to_vec()],
            why,
        };
        Err(error).or_unwind()
    }
    heads / ranks
}
