//! [`DataPlane`]: the interface of a data plane, and the operations that all planes share.

use std::fmt::Debug;
#[cfg(any(feature = "nccl", feature = "testing"))]
use std::sync::Arc;
use std::time::Duration;

use burn::backend::{DispatchTensor, TensorMetadata};

use super::call::DataCall;
use super::contribution::{Contribution, ContributionSource};
use super::inputs::{CollectiveInputs, full_block};
use super::{concat, reduce, shard};
use crate::comm::backend::ranges::{Ranges, full, slice};
use crate::comm::{Capabilities, CollectivePlan, ReduceOp};
use crate::placement::ShardSizes;

/// An error of a data plane in a call on which all ranks have agreed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{problem}")]
pub(in crate::comm) struct DataPlaneError {
    pub problem: String,
}

pub(in crate::comm) type PlaneResult<T> = Result<T, DataPlaneError>;

/// Takes what all ranks sent to this one in an exchange that was [started](DataPlane::start), as
/// contributions from which the plane builds the result. Called when the rank waits, on its thread,
/// with the time that is left until its deadline. Fails when that has passed.
///
/// If results are usable in stream order, it only lets the rank's stream wait. Time that it takes is
/// counted as time that the rank waits for others.
pub(in crate::comm) type TakeExchanged =
    Box<dyn FnOnce(Duration) -> PlaneResult<Vec<Contribution>> + Send>;

/// Fails the world because of an operation of a global rank on the plane of this name.
#[cfg(any(feature = "nccl", feature = "testing"))]
pub(in crate::comm) type OnFailure = Arc<dyn Fn(usize, &'static str, DataPlaneError) + Send + Sync>;

/// Moves the elements of calls on which all ranks have agreed. Nothing here decides whether or in
/// which order a call takes place: that is the control plane's.
///
/// ```text
/// a rank posts        contribute              on its thread, in the order of the calls; waits for nothing
/// all have posted     start                   only if ranks exchange: on every rank, also if it drops the request
/// the rank waits      all_gather, reduce, ..  on its thread; of an exchange, after its `TakeExchanged`
/// later               the function of `watch` is called if an exchange fails after it was taken
/// the world fails     abort                   once; ends what waits inside the plane
/// ```
///
/// A message whose tensors are [exchanged](DataCall::peer) is contributed by its sender when it is
/// sent, and for its receiver, on any thread, when a receive has taken it. It is started for these
/// two ranks, in the one order of all exchanges. The receiver's [`TakeExchanged`] returns one
/// contribution; that of the sender is dropped.
///
/// A plane implements [`capabilities`](Self::capabilities) and [`contribute`](Self::contribute).
/// If its ranks read the tensors of each other by handle, or from bytes that other processes sent,
/// all else is provided: copies and reductions by burn's operations, or by the kernels for where
/// the tensors are. A plane overrides what it does faster. If its ranks [exchange](Self::start)
/// tensors by other means, it says so in its capabilities, and the control plane sends no bytes.
pub(in crate::comm) trait DataPlane: Debug + Send + Sync {
    /// Returns the name by which errors refer to the plane.
    fn name(&self) -> &'static str;

    fn capabilities(&self) -> Capabilities;

    /// Returns true if ranks exchange the tensors of calls by the plane.
    fn exchanges(&self) -> bool {
        !self.capabilities().needs_remote_bytes
    }

    /// Returns the contribution of a rank to the call that it is about to post. `recipients` are
    /// the members that the tensors are for, or empty. Must not wait for another rank.
    ///
    /// If ranks exchange, the contribution keeps what [`start`](Self::start) needs, such as tensors
    /// in staging memory and the layout of the result. Its own `tensors` are empty, or a few bytes
    /// that the ranks of other processes receive with the call: of the
    /// [first exchange](DataCall::is_first_exchange) of a channel, what they need to connect. A call
    /// of which some ranks pass no tensors may be given tensors in host memory.
    fn contribute(
        &self,
        call: &DataCall<'_>,
        tensors: Vec<DispatchTensor>,
        recipients: Vec<usize>,
    ) -> Contribution;

    /// Sets the function by which the plane reports that an exchange has failed, where no rank waits
    /// for it any more.
    #[cfg(any(feature = "nccl", feature = "testing"))]
    fn watch(&self, failed: OnFailure) {
        drop(failed);
    }

    /// Starts the exchange of a call on which all ranks have agreed, and returns how the rank takes
    /// what the others sent. Called once for every rank of the group in this process, on any thread,
    /// in one order of all calls of the world: the same on all ranks, for the calls of all channels.
    /// Must not wait for other ranks: one thread starts the exchanges of all ranks of a process.
    ///
    /// The contributions are dropped once all local ranks have started. Memory that a stream is
    /// still to read is the plane's to keep. Only called if the plane's ranks
    /// [exchange](Capabilities::needs_remote_bytes) tensors.
    fn start(&self, inputs: &CollectiveInputs<'_>) -> PlaneResult<TakeExchanged> {
        let _ = inputs;
        unreachable!("ranks read each other's contributions")
    }

    /// Makes all current and later waits and exchanges of the plane return an error. Called once,
    /// when the world has failed.
    fn abort(&self) {}

    /// Returns the full tensors of an all-gather, built from the shards of all ranks.
    fn all_gather(
        &self,
        inputs: &CollectiveInputs<'_>,
        plan: &CollectivePlan,
    ) -> Vec<DispatchTensor> {
        inputs
            .received()
            .unwrap_or_else(|| gather_by_tensor(inputs, plan))
    }

    /// Returns this rank's shards of the reductions of all tensors.
    fn reduce_scatter(
        &self,
        inputs: &CollectiveInputs<'_>,
        shardings: &[(usize, ShardSizes)],
        op: ReduceOp,
    ) -> Vec<DispatchTensor> {
        reduce_by_tensor(self, inputs, shardings, op)
    }

    /// Returns the reduction of tensor `index`.
    fn all_reduce(
        &self,
        inputs: &CollectiveInputs<'_>,
        index: usize,
        op: ReduceOp,
    ) -> DispatchTensor {
        let shape = inputs.all[0].tensors[index].shape();
        self.reduce(inputs, index, &full(&shape[..]), op)
    }

    /// Returns the reduction of a block of tensor `index`, which every contribution has.
    fn reduce(
        &self,
        inputs: &CollectiveInputs<'_>,
        index: usize,
        ranges: &Ranges,
        op: ReduceOp,
    ) -> DispatchTensor {
        let operands: Vec<_> = inputs.each(index).collect();
        reduce(&operands, ranges, op, &inputs.home(index))
    }

    /// Returns true if several ranks may have handles to the memory of `tensor`, which keeps no other
    /// memory alive.
    fn may_share(&self, tensor: &DispatchTensor) -> bool {
        let _ = tensor;
        false
    }

    /// Returns a tensor of `contribution` for this rank's result. It is not copied if no other rank
    /// has it, or if it [may be shared](Self::may_share).
    fn own(
        &self,
        inputs: &CollectiveInputs<'_>,
        contribution: &Contribution,
        tensor: &DispatchTensor,
    ) -> DispatchTensor {
        let is_own = contribution.source == ContributionSource::RemoteExclusive;
        if (is_own || self.may_share(tensor)) && tensor.device() == *inputs.device.as_dispatch() {
            return tensor.clone();
        }
        concat(vec![full_block(tensor)], 0, inputs.device)
    }

    /// Returns the tensors of `root`.
    fn broadcast(&self, inputs: &CollectiveInputs<'_>, root: usize) -> Vec<DispatchTensor> {
        let root = &inputs.all[root];
        root.tensors_for(inputs.op.member)
            .iter()
            .map(|tensor| self.own(inputs, root, tensor))
            .collect()
    }

    /// Returns the tensors that each rank has addressed to this one. `own` are those of this rank
    /// itself.
    fn all_to_all(
        &self,
        inputs: &CollectiveInputs<'_>,
        mut own: Vec<DispatchTensor>,
    ) -> Vec<Vec<DispatchTensor>> {
        let tensors =
            |(member, contribution): (usize, &Contribution)| match member == inputs.op.member {
                true => std::mem::take(&mut own),
                false => contribution
                    .tensors_for(inputs.op.member)
                    .iter()
                    .map(|tensor| self.own(inputs, contribution, tensor))
                    .collect(),
            };
        inputs.all.iter().enumerate().map(tensors).collect()
    }

    /// Returns the rows that all ranks have addressed to this one, concatenated in group order.
    fn all_to_all_v(&self, inputs: &CollectiveInputs<'_>) -> DispatchTensor {
        let rows = inputs
            .all
            .iter()
            .flat_map(|contribution| contribution.tensors_for(inputs.op.member))
            .map(full_block);
        inputs
            .received_one()
            .unwrap_or_else(|| concat(rows.collect(), 0, inputs.device))
    }

    /// Returns this rank's shard, along `dim`, of tensor `index` of `root`.
    fn scatter(
        &self,
        inputs: &CollectiveInputs<'_>,
        index: usize,
        root: usize,
        dim: usize,
        sizes: &ShardSizes,
    ) -> DispatchTensor {
        let root = &inputs.all[root];
        match root.shard_for(inputs.op.member, index) {
            Ok(shard) => self.own(inputs, root, shard),
            Err(_) => concat(
                vec![inputs.block_of(root, index, dim, sizes)],
                0,
                &inputs.home(index),
            ),
        }
    }

    /// Changes the sharding of tensor 0 from `dim` to `to_dim`, and returns this rank's shard along
    /// `to_dim`.
    fn reshard(
        &self,
        inputs: &CollectiveInputs<'_>,
        dim: usize,
        to_dim: usize,
        to_sizes: &ShardSizes,
    ) -> DispatchTensor {
        let blocks = inputs
            .all
            .iter()
            .map(|contribution| inputs.block_of(contribution, 0, to_dim, to_sizes));
        inputs
            .received_one()
            .unwrap_or_else(|| concat(blocks.collect(), dim, &inputs.home(0)))
    }

    /// Returns `count` one-dimensional tensors, each concatenated from the tensors of all ranks.
    fn rows(&self, inputs: &CollectiveInputs<'_>, count: usize) -> Vec<DispatchTensor> {
        let row = |index| {
            concat(
                inputs.each(index).map(full_block).collect(),
                0,
                inputs.device,
            )
        };
        inputs
            .received()
            .unwrap_or_else(|| (0..count).map(row).collect())
    }
}

/// Returns the full tensors of an all-gather, one after the other.
pub(super) fn gather_by_tensor(
    inputs: &CollectiveInputs<'_>,
    plan: &CollectivePlan,
) -> Vec<DispatchTensor> {
    let gather = |(index, (dim, _)): (usize, &(usize, ShardSizes))| {
        let shards = inputs.each(index).map(full_block).collect();
        concat(shards, *dim, &inputs.home(index))
    };
    plan.shardings().iter().enumerate().map(gather).collect()
}

/// Returns this rank's shards of the reductions, one after the other, by the
/// [`reduce`](DataPlane::reduce) of `plane`.
pub(super) fn reduce_by_tensor<P: DataPlane + ?Sized>(
    plane: &P,
    inputs: &CollectiveInputs<'_>,
    shardings: &[(usize, ShardSizes)],
    op: ReduceOp,
) -> Vec<DispatchTensor> {
    let shard = |(index, (dim, sizes)): (usize, &(usize, ShardSizes))| {
        if inputs.has_shards_only() {
            return reduce_shards(inputs, index, *dim, sizes, op);
        }
        let shape = inputs.all[0].tensors[index].shape();
        let ranges = slice(&shape[..], *dim, inputs.range(sizes));
        plane.reduce(inputs, index, &ranges, op)
    };
    shardings.iter().enumerate().map(shard).collect()
}

/// Returns this rank's shard of the reduction of tensor `index`, of which some ranks have sent only
/// that shard.
fn reduce_shards(
    inputs: &CollectiveInputs<'_>,
    index: usize,
    dim: usize,
    sizes: &ShardSizes,
    op: ReduceOp,
) -> DispatchTensor {
    let operand =
        |contribution: &Contribution| match contribution.shard_for(inputs.op.member, index) {
            Ok(shard) => shard.clone(),
            Err(tensor) => shard(tensor, dim, inputs.range(sizes)),
        };
    let operands: Vec<_> = inputs.all.iter().map(operand).collect();
    let ranges = full(&operands[0].shape()[..]);
    let operands: Vec<_> = operands.iter().collect();
    reduce(&operands, &ranges, op, &inputs.home(index))
}
