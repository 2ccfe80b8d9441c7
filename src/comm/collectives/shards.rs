//! Collectives of tensors that are sharded over the group.

use burn::backend::{DispatchTensor, TensorMetadata};

use super::planned::unpacked;
use crate::comm::backend::{CallSignature, reshaped};
use crate::comm::{
    Call, CollectivePlan, Communicator, Op, ReduceOp, ShardedTensor, Work, arguments,
};
use crate::placement::ShardSizes;

impl Communicator {
    /// Gathers the shards of every tensor and concatenates them. Every rank receives the full
    /// tensors.
    pub fn all_gather(&self, call: Call, shards: Vec<ShardedTensor>) -> Work<Vec<DispatchTensor>> {
        let (parts, shardings) = unpacked(shards);
        let checked = arguments::check_shards(&parts, &shardings, self.group());
        let signatures = accepted!(
            self.on_own_device(checked, &parts),
            self,
            Op::AllGather,
            call
        );
        let plan = CollectivePlan::new(
            Op::AllGather,
            None,
            signatures,
            shardings,
            self.group().size(),
        );
        self.begin(call, &plan.into(), parts)
    }

    /// Gathers tensors of the same shape from all ranks. Every rank receives them stacked in group
    /// order, with shape `[ranks, ..]` (`all_gather_into_tensor` in stack layout).
    pub fn all_gather_stacked(
        &self,
        call: Call,
        tensors: Vec<DispatchTensor>,
    ) -> Work<Vec<DispatchTensor>> {
        let size = self.group().size();
        let shapes: Vec<_> = tensors
            .iter()
            .map(|tensor| [&[size], &tensor.shape()[..]].concat())
            .collect();
        let work = self.all_gather(
            call,
            tensors
                .into_iter()
                .map(|tensor| {
                    let sizes = ShardSizes::Chunked(size * tensor.shape()[0]);
                    ShardedTensor {
                        tensor,
                        dim: 0,
                        sizes,
                    }
                })
                .collect(),
        );
        work.then(|full_tensors| {
            full_tensors
                .into_iter()
                .zip(shapes)
                .map(|(full, shape)| reshaped(full, shape.into()))
                .collect()
        })
    }

    /// Reduces full tensors over the ranks. Each rank receives its shard of every result.
    pub fn reduce_scatter(
        &self,
        call: Call,
        full_tensors: Vec<ShardedTensor>,
        op: ReduceOp,
    ) -> Work<Vec<DispatchTensor>> {
        let (full_tensors, shardings) = unpacked(full_tensors);
        let checked = arguments::reduced(&full_tensors, op)
            .and_then(|signatures| arguments::sharded(signatures, &shardings, self.group()));
        let signatures = accepted!(
            self.on_own_device(checked, &full_tensors),
            self,
            Op::ReduceScatter,
            call
        );
        let plan = CollectivePlan::new(
            Op::ReduceScatter,
            Some(op),
            signatures,
            shardings,
            self.group().size(),
        );
        self.begin(call, &plan.into(), full_tensors)
    }

    /// Reduces tensors of the same shape over the ranks. Every rank receives the results.
    pub fn all_reduce(
        &self,
        call: Call,
        tensors: Vec<DispatchTensor>,
        op: ReduceOp,
    ) -> Work<Vec<DispatchTensor>> {
        let checked = self.on_own_device(arguments::reduced(&tensors, op), &tensors);
        let signatures = accepted!(checked, self, Op::AllReduce, call);
        let plan = CollectivePlan::new(
            Op::AllReduce,
            Some(op),
            signatures,
            Vec::new(),
            self.group().size(),
        );
        self.begin(call, &plan.into(), tensors)
    }

    /// Changes the dimension along which a tensor is sharded, from `shard.dim` to `to_dim`.
    ///
    /// `shard` is the rank's shard along `shard.dim`, complete along `to_dim`. The result is
    /// complete along `shard.dim`, and is the rank's shard along `to_dim` with the sizes
    /// `to_sizes`.
    pub fn all_to_all(
        &self,
        call: Call,
        shard: ShardedTensor,
        to_dim: usize,
        to_sizes: ShardSizes,
    ) -> Work<DispatchTensor> {
        let checked = arguments::recut(&shard, to_dim, &to_sizes, self.group());
        let full = accepted!(
            self.on_own_device(checked, [&shard.tensor]),
            self,
            Op::AllToAll,
            call
        );
        if self.is_alone() {
            return Work::done(shard.tensor);
        }
        let block = (shard.tensor.shape().num_elements() * shard.tensor.dtype().size()) as u64;
        let signature = CallSignature::new(Op::AllToAll, &call, vec![full]);
        self.post(None, call, signature, Some(block), |group, context| {
            group.shard_dim_all_to_all(context, shard, to_dim, to_sizes)
        })
    }

    /// Returns once every rank of the group has called it.
    ///
    /// At the deadline, [`CommError::DeadlineExceeded`](crate::comm::CommError) names all ranks
    /// that are missing (`torch.distributed.monitored_barrier`). [`Work::wait_timeout`] sets a
    /// deadline for one call.
    pub fn barrier(&self, call: Call) -> Work<()> {
        if self.is_alone() {
            return Work::done(());
        }
        let signature = CallSignature::new(Op::Barrier, &call, Vec::new());
        self.post(None, call, signature, None, |group, context| {
            group.barrier(context)
        })
    }
}
