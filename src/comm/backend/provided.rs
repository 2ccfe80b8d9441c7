//! Provided operations of [`GroupBackend`], built from its few required ones.

use burn::backend::{DispatchTensor, TensorMetadata};
use burn::tensor::Device;

use super::ranges::{full, slice};
use super::{CallContext, GroupBackend, Mapped, PostResult, Request, concat, reduce, rows};
use crate::comm::{ReduceOp, ShardedTensor, TensorMeta};
use crate::placement::ShardSizes;

/// Implements an all-reduce by sending all operands to every rank, which reduces them.
pub(super) fn all_reduce(
    channel: &(impl GroupBackend + ?Sized),
    post: CallContext,
    tensors: Vec<DispatchTensor>,
    op: ReduceOp,
) -> PostResult<Vec<DispatchTensor>> {
    let (size, device) = (channel.member().group.size(), channel.member().home(&tensors));
    let metas: Vec<_> = tensors.iter().map(meta).collect();
    let terms = channel.all_to_all(post, vec![tensors; size], vec![metas.clone(); size])?;
    Ok(mapped(terms, move |terms| {
        let reduced = |(index, meta): (usize, TensorMeta)| {
            let terms: Vec<_> = terms.iter().map(|of_rank| &of_rank[index]).collect();
            reduce(&terms, &full(&meta.shape[..]), op, &device)
        };
        metas.into_iter().enumerate().map(reduced).collect()
    }))
}

/// Implements the change of a sharded dimension by an all-to-all of blocks.
pub(super) fn recut(
    channel: &(impl GroupBackend + ?Sized),
    post: CallContext,
    shard: ShardedTensor,
    to_dim: usize,
    to_sizes: ShardSizes,
) -> PostResult<DispatchTensor> {
    let ShardedTensor { tensor, dim, sizes: from_sizes } = shard;
    let (group, device) = (channel.member().group.clone(), Device::new(tensor.device()));
    let given = |rank: usize| vec![block(&tensor, to_dim, &to_sizes, group.size(), rank, &device)];
    let taken = |rank: usize| {
        let mut meta = meta(&tensor);
        meta.shape[to_dim] = to_sizes.range(group.size(), group.rank()).len();
        meta.shape[dim] = from_sizes.range(group.size(), rank).len();
        vec![meta]
    };
    let ranks = 0..group.size();
    let blocks = channel.all_to_all(post, ranks.clone().map(given).collect(), ranks.map(taken).collect())?;
    Ok(mapped(blocks, move |blocks| joined(&blocks, dim, &device)))
}

/// Implements an all-to-all of rows by an all-to-all of views of them.
pub(super) fn exchange_rows(
    channel: &(impl GroupBackend + ?Sized),
    post: CallContext,
    tensor: DispatchTensor,
    given: &[usize],
    taken: &[usize],
) -> PostResult<DispatchTensor> {
    let device = Device::new(tensor.device());
    let of_rank = |count: &usize| {
        let mut meta = meta(&tensor);
        meta.shape[0] = *count;
        vec![meta]
    };
    let parts = channel.all_to_all(post, rows_for_each(&tensor, given), taken.iter().map(of_rank).collect())?;
    Ok(mapped(parts, move |parts| joined(&parts, 0, &device)))
}

/// Splits a tensor into consecutive rows for each rank: the first `given[0]`, the next `given[1]`, ..
pub(crate) fn rows_for_each(tensor: &DispatchTensor, given: &[usize]) -> Vec<Vec<DispatchTensor>> {
    let mut start = 0;
    let next = |count: &usize| {
        start += count;
        vec![rows(tensor, start - count..start)]
    };
    given.iter().map(next).collect()
}

/// Implements a scatter by an all-to-all in which only the root sends.
pub(super) fn scatter(
    channel: &(impl GroupBackend + ?Sized),
    post: CallContext,
    tensors: Vec<DispatchTensor>,
    metas: Vec<TensorMeta>,
    shardings: Vec<(usize, ShardSizes)>,
    root: usize,
) -> PostResult<Vec<DispatchTensor>> {
    let (group, device) = (channel.member().group.clone(), channel.member().home(&tensors));
    let given = |rank: usize| {
        let part = |(tensor, (dim, sizes)): (&DispatchTensor, &(usize, ShardSizes))| {
            block(tensor, *dim, sizes, group.size(), rank, &device)
        };
        tensors.iter().zip(&shardings).map(part).collect()
    };
    let part = |(mut meta, (dim, sizes)): (TensorMeta, &(usize, ShardSizes))| {
        meta.shape[*dim] = sizes.range(group.size(), group.rank()).len();
        meta
    };
    let mut taken = vec![Vec::new(); group.size()];
    taken[root] = metas.into_iter().zip(&shardings).map(part).collect();
    let parts = channel.all_to_all(post, (0..group.size()).map(given).collect(), taken)?;
    Ok(mapped(parts, move |mut parts| parts.swap_remove(root)))
}

/// Returns a copy of `rank`'s shard along `dim`.
fn block(
    tensor: &DispatchTensor,
    dim: usize,
    of: &ShardSizes,
    ranks: usize,
    rank: usize,
    device: &Device,
) -> DispatchTensor {
    concat(&[(tensor, slice(&tensor.shape()[..], dim, of.range(ranks, rank)))], 0, device)
}

/// Concatenates the tensors of all ranks along `dim`.
fn joined(parts: &[Vec<DispatchTensor>], dim: usize, device: &Device) -> DispatchTensor {
    let parts: Vec<_> = parts.iter().flatten().map(|part| (part, full(&part.shape()[..]))).collect();
    concat(&parts, dim, device)
}

fn meta(tensor: &DispatchTensor) -> TensorMeta {
    TensorMeta { shape: tensor.shape(), dtype: tensor.dtype() }
}

fn mapped<T: 'static, U: 'static>(
    pending: Box<dyn Request<T>>,
    map: impl FnOnce(T) -> U + Send + 'static,
) -> Box<dyn Request<U>> {
    Box::new(Mapped { pending, map })
}
