//! [`local_heads`]: how many attention heads a rank has.

use crate::dtensor::{DTensor, DTensorError};
use crate::error::OrUnwind;
use crate::placement::Placement;

/// How many of `heads` attention heads are in this rank's part of `x`, `[.., heads * d_head]`.
///
/// Over a [`DTensor`] nothing need be asked: `x.reshape([batch, seq, heads, d_head])` splits the whole. A local part of
/// it has the features of `heads / ranks` heads, and there the number of the whole model is a trap: reshaped to
/// `[batch, seq, heads, -1]` it becomes as many heads of fewer features each, and attention mixes what belongs to
/// different heads, without an error.
///
/// ```
/// use burn_dtensor::nn::local_heads;
/// # use burn_dtensor::prelude::*;
/// # launch(Launch::threads(2), |world| {
/// # let mesh = DeviceMesh::new(world, [2], ["tp"])?;
/// // What a column-sharded projection makes of 4 heads with 3 features each.
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
/// Unwinds with [`DTensorError::Operands`], on every rank alike, unless the features are whole heads on every rank.
#[track_caller]
pub fn local_heads<const D: usize>(x: &DTensor<D>, heads: usize) -> usize {
    let last = D - 1;
    let is_uneven = x.layout().shard_order(last).iter().any(|&mesh_dim| x.layout().uneven_sizes(mesh_dim).is_some());
    let shardings = x.placements().iter().zip(x.mesh().shape()).zip(x.mesh().names());
    let shardings = shardings.filter(|((placement, _), _)| **placement == Placement::Shard(last));
    let (sizes, names): (Vec<_>, Vec<_>) = shardings.map(|((_, &size), name)| (size, format!("`{name}`"))).unzip();
    let (ranks, features) = (sizes.iter().product::<usize>(), x.dims()[last]);
    if heads == 0 || !heads.is_multiple_of(ranks) || !features.is_multiple_of(heads) || is_uneven {
        let why = format!(
            "{features} features in {heads} heads cannot stay whole over the {ranks} ranks of mesh dimension {}: the \
             number of heads must divide by that of ranks, and the features, cut evenly, by that of heads",
            names.join(" and ")
        );
        let error = DTensorError::Operands { operator: "local_heads", shapes: vec![x.dims().to_vec()], why };
        Err(error).or_unwind()
    }
    heads / ranks
}
