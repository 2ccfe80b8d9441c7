//! [`GroupBackend`]: the collectives of a group; a few are required, and all others are built from these.

use std::fmt::Debug;
use std::sync::Arc;

use burn::backend::{DispatchTensor, TensorMetadata};
use burn::tensor::Device;

use super::ranges::{full, slice};
use super::{
    CallContext, Capabilities, GroupMember, Mapped, PostResult, ReceivedTensors, Request, concat,
    reduce, rows,
};
use crate::comm::{CollectivePlan, ReduceOp, ShardedTensor, TensorMeta};
use crate::placement::ShardSizes;

/// Handle of one rank on one group: the collectives of a backend (c10d: process group).
///
/// The caller has already checked all arguments. Shapes, shard sizes and dtypes fit each other and
/// the group. Tensors are plain and all on the rank's device or all on the host. The group has
/// several ranks, except for a send or a receive.
pub trait GroupBackend: Debug + Send + Sync {
    /// Returns the rank and its group.
    fn member(&self) -> &GroupMember;

    /// Returns true if posted transfers proceed while the ranks compute, so that posting them
    /// before their results are needed saves time.
    ///
    /// The provided implementation returns false.
    fn can_overlap(&self) -> bool {
        false
    }

    /// Returns the capabilities of calls with tensors on the rank's device.
    ///
    /// The provided implementation returns the default.
    fn capabilities(&self) -> Capabilities {
        Capabilities::default()
    }

    /// Gathers tensors of which every rank passes its shard; `plan` contains the shardings. Returns
    /// the full tensors.
    fn all_gather(
        &self,
        post: CallContext,
        plan: Arc<CollectivePlan>,
        parts: Vec<DispatchTensor>,
    ) -> PostResult<Vec<DispatchTensor>>;

    /// Reduces full tensors over the ranks. Returns this rank's shards of the results, sharded
    /// according to `plan`.
    fn reduce_scatter(
        &self,
        post: CallContext,
        plan: Arc<CollectivePlan>,
        full_tensors: Vec<DispatchTensor>,
        op: ReduceOp,
    ) -> PostResult<Vec<DispatchTensor>>;

    /// Sends `parts[i]` to group rank `i`. Returns the tensors of each rank for this one, which
    /// `metas` describes. The rank's tensors for itself are returned unchanged.
    fn all_to_all(
        &self,
        post: CallContext,
        parts: Vec<Vec<DispatchTensor>>,
        metas: Vec<Vec<TensorMeta>>,
    ) -> PostResult<Vec<Vec<DispatchTensor>>>;

    /// Returns the tensors of `root`, which `metas` describes. The other ranks pass no tensors.
    fn broadcast(
        &self,
        post: CallContext,
        tensors: Vec<DispatchTensor>,
        metas: Vec<TensorMeta>,
        root: usize,
    ) -> PostResult<Vec<DispatchTensor>>;

    /// Completes once all ranks have called it.
    fn barrier(&self, post: CallContext) -> PostResult<()>;

    /// Sends tensors to group rank `to`, which may be the rank itself. The request is complete when
    /// the backend has taken over the tensors.
    fn send(
        &self,
        post: CallContext,
        tensors: Vec<DispatchTensor>,
        to: usize,
        tag: u32,
    ) -> PostResult<()>;

    /// Receives the next message with `tag` from `from`, or from any rank. `metas` describes its
    /// tensors, if it is given.
    fn receive(
        &self,
        post: CallContext,
        from: Option<usize>,
        tag: u32,
        metas: Option<Vec<TensorMeta>>,
    ) -> PostResult<ReceivedTensors>;

    /// Reduces tensors of the same shape over all ranks. Every rank receives the results.
    ///
    /// The provided implementation sends all operands to every rank, which reduces them.
    fn all_reduce(
        &self,
        post: CallContext,
        tensors: Vec<DispatchTensor>,
        op: ReduceOp,
    ) -> PostResult<Vec<DispatchTensor>> {
        let size = self.member().group.size();
        let device = self.member().home(&tensors);
        let metas: Vec<_> = tensors.iter().map(meta).collect();
        let terms = self.all_to_all(post, vec![tensors; size], vec![metas.clone(); size])?;
        Ok(mapped(terms, move |terms| {
            let reduced = |(index, meta): (usize, TensorMeta)| {
                let terms: Vec<_> = terms.iter().map(|of_rank| &of_rank[index]).collect();
                reduce(&terms, &full(&meta.shape[..]), op, &device)
            };
            metas.into_iter().enumerate().map(reduced).collect()
        }))
    }

    /// Reshards a tensor: from shards along `shard.dim` to shards along `to_dim`.
    ///
    /// The provided implementation is an all-to-all of blocks.
    fn shard_dim_all_to_all(
        &self,
        post: CallContext,
        shard: ShardedTensor,
        to_dim: usize,
        to_sizes: ShardSizes,
    ) -> PostResult<DispatchTensor> {
        let ShardedTensor {
            tensor,
            dim,
            sizes: from_sizes,
        } = shard;
        let group = self.member().group.clone();
        let device = Device::new(tensor.device());
        let given = |rank: usize| {
            vec![block(
                &tensor,
                to_dim,
                &to_sizes,
                group.size(),
                rank,
                &device,
            )]
        };
        let taken = |rank: usize| {
            let mut meta = meta(&tensor);
            meta.shape[to_dim] = to_sizes.range(group.size(), group.rank()).len();
            meta.shape[dim] = from_sizes.range(group.size(), rank).len();
            vec![meta]
        };
        let ranks = 0..group.size();
        let blocks = self.all_to_all(
            post,
            ranks.clone().map(given).collect(),
            ranks.map(taken).collect(),
        )?;
        Ok(mapped(blocks, move |blocks| joined(&blocks, dim, &device)))
    }

    /// Sends rows of `tensor` to each rank: the first `send_counts[0]` rows to group rank 0, the
    /// next `send_counts[1]` to group rank 1, and so on. Returns the rows for this rank,
    /// `recv_counts[i]` from group rank `i`, concatenated along the first dimension.
    ///
    /// The provided implementation is an all-to-all of the rows.
    fn all_to_all_v(
        &self,
        post: CallContext,
        tensor: DispatchTensor,
        send_counts: &[usize],
        recv_counts: &[usize],
    ) -> PostResult<DispatchTensor> {
        let device = Device::new(tensor.device());
        let metas = recv_counts
            .iter()
            .map(|count| {
                let mut meta = meta(&tensor);
                meta.shape[0] = *count;
                vec![meta]
            })
            .collect();
        let parts = self.all_to_all(post, rows_for_each(&tensor, send_counts), metas)?;
        Ok(mapped(parts, move |parts| joined(&parts, 0, &device)))
    }

    /// Returns this rank's shards of the tensors of `root`, which `metas` describes. `shardings`
    /// contains the dimension and the shard sizes of each tensor. The other ranks pass no tensors.
    ///
    /// The provided implementation is an all-to-all in which only the root sends.
    fn scatter(
        &self,
        post: CallContext,
        tensors: Vec<DispatchTensor>,
        metas: Vec<TensorMeta>,
        shardings: Vec<(usize, ShardSizes)>,
        root: usize,
    ) -> PostResult<Vec<DispatchTensor>> {
        let group = self.member().group.clone();
        let device = self.member().home(&tensors);
        let given = |rank: usize| {
            tensors
                .iter()
                .zip(&shardings)
                .map(|(tensor, (dim, sizes))| {
                    block(tensor, *dim, sizes, group.size(), rank, &device)
                })
                .collect()
        };
        let part = |(mut meta, (dim, sizes)): (TensorMeta, &(usize, ShardSizes))| {
            meta.shape[*dim] = sizes.range(group.size(), group.rank()).len();
            meta
        };
        let mut taken = vec![Vec::new(); group.size()];
        taken[root] = metas.into_iter().zip(&shardings).map(part).collect();
        let parts = self.all_to_all(post, (0..group.size()).map(given).collect(), taken)?;
        Ok(mapped(parts, move |mut parts| parts.swap_remove(root)))
    }
}

/// Splits a tensor into consecutive rows for each rank: the first `counts[0]`, the next
/// `counts[1]`, ..
pub(crate) fn rows_for_each(tensor: &DispatchTensor, counts: &[usize]) -> Vec<Vec<DispatchTensor>> {
    let mut start = 0;
    counts
        .iter()
        .map(|count| {
            start += count;
            vec![rows(tensor, start - count..start)]
        })
        .collect()
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
    concat(
        &[(
            tensor,
            slice(&tensor.shape()[..], dim, of.range(ranks, rank)),
        )],
        0,
        device,
    )
}

/// Concatenates the tensors of all ranks along `dim`.
fn joined(parts: &[Vec<DispatchTensor>], dim: usize, device: &Device) -> DispatchTensor {
    let parts: Vec<_> = parts
        .iter()
        .flatten()
        .map(|part| (part, full(&part.shape()[..])))
        .collect();
    concat(&parts, dim, device)
}

fn meta(tensor: &DispatchTensor) -> TensorMeta {
    TensorMeta {
        shape: tensor.shape(),
        dtype: tensor.dtype(),
    }
}

fn mapped<T: 'static, U: 'static>(
    pending: Box<dyn Request<T>>,
    map: impl FnOnce(T) -> U + Send + 'static,
) -> Box<dyn Request<U>> {
    Box::new(Mapped { pending, map })
}
