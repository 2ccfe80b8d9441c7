//! [`balance`]: shard sizes for [`FullyShard::with_balanced_bytes`](super::FullyShard::with_balanced_bytes).

use itertools::Itertools;

use super::plan::PlannedParam;
use crate::dtensor::DTensorSpec;
use crate::param::FsdpMeshInfo;
use crate::placement::{ShardSizes, TensorRows, balanced};

/// Replaces the chunks of parameters by uneven shards, so that all ranks that shard a unit hold
/// about the same number of bytes of it.
///
/// Ranks of a tensor-parallel mesh must choose the same shard sizes, but their local shapes may
/// differ. So a parameter whose local shapes differ keeps its chunks, and everything is weighed by
/// the local shape of the first of these ranks.
pub(super) fn balance<'a>(
    params: &mut [PlannedParam],
    meshes: impl Iterator<Item = &'a FsdpMeshInfo>,
) {
    let ranks = meshes
        .map(|data| data.mesh.size_of(data.shard))
        .collect_vec();
    let units =
        (0..params.len()).into_group_map_by(|&at| (params[at].unit.clone(), params[at].data));
    for ((_, data), members) in units {
        let mut held = vec![0; ranks[data]];
        let mut free = Vec::new();
        for at in members {
            let Some((dim, sizes)) = &params[at].sharding else {
                continue;
            };
            let rows = rows(&params[at], *dim);
            match sizes {
                ShardSizes::Chunked(_) if is_even(&params[at], *dim) => free.push((at, *dim, rows)),
                sizes => {
                    // What it weighs must be the same on all tensor-parallel ranks, whose own
                    // chunks differ.
                    let sizes = match sizes {
                        ShardSizes::Chunked(_) => &ShardSizes::Chunked(rows.count),
                        uneven => uneven,
                    };
                    let more = (0..held.len())
                        .map(|rank| sizes.range(held.len(), rank).len() * rows.bytes)
                        .collect_vec();
                    held.iter_mut()
                        .zip(more)
                        .for_each(|(held, more)| *held += more);
                }
            }
        }
        let lengths = balanced(&free.iter().map(|(.., rows)| *rows).collect_vec(), &held);
        for ((at, dim, _), lengths) in free.into_iter().zip(lengths) {
            params[at].sharding = Some((dim, ShardSizes::Uneven(lengths.into())));
        }
    }
}

/// Returns the rows of a parameter along `dim`. Their number is that of the first tensor-parallel
/// rank, so that all ranks use the same.
fn rows(param: &PlannedParam, dim: usize) -> TensorRows {
    let shape = match &param.parallel {
        None => param.shape.clone(),
        Some(parallel) => shape_of_first(&parallel.spec),
    };
    let others: usize = shape
        .iter()
        .enumerate()
        .filter(|(at, _)| *at != dim)
        .map(|(_, len)| len)
        .product();
    TensorRows {
        count: shape[dim],
        bytes: others * param.dtype.size(),
    }
}

fn shape_of_first(spec: &DTensorSpec) -> Vec<usize> {
    spec.layout()
        .local_shape(spec.shape(), &vec![0; spec.mesh().ndim()])
}

/// Returns true if the tensor-parallel shards have the same size along `dim` on all ranks.
fn is_even(param: &PlannedParam, dim: usize) -> bool {
    param.parallel.as_ref().is_none_or(|parallel| {
        let spec = &parallel.spec;
        spec.layout().min_local_shape(spec.shape())[dim] == shape_of_first(spec)[dim]
    })
}
