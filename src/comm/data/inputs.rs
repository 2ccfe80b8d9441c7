//! [`CollectiveInputs`]: the contributions of all ranks, and the operations that build a rank's result from them.

use std::cell::Cell;
use std::ops::Range;
use std::time::Duration;

use burn::backend::{DispatchTensor, TensorMetadata};
use burn::tensor::Device;

use super::contribution::{Contribution, ContributionSource, concat, shard};
#[cfg(feature = "flex")]
use super::host::{self, SharedResultCache};
use super::result_buffer::ResultBuffer;
use crate::comm::backend::ranges::{Ranges, full, slice};
use crate::comm::control::match_table::OpHandle;
use crate::comm::{CollectivePlan, ReduceOp, backend};
use crate::placement::ShardSizes;

/// Contributions of a complete collective, as one rank uses them.
pub(in crate::comm) struct CollectiveInputs<'a> {
    pub all: &'a [Contribution],
    /// Handle of this rank.
    pub op: OpHandle,
    /// Device for tensors without a local counterpart.
    pub device: &'a Device,
    /// True if ranks of the world are in other processes. If not, there is no need to search for
    /// remote data.
    pub is_distributed: bool,
    /// Cache of results that several local ranks share; `None` if every rank needs separate memory.
    #[cfg(feature = "flex")]
    pub shared: Option<&'a SharedResultCache>,
    /// Result buffer that already has this rank's own shards.
    pub result_buffer: Option<&'a ResultBuffer>,
    /// Time that the rank has waited for others that build its result with it.
    pub waited: Cell<Duration>,
}

impl<'a> CollectiveInputs<'a> {
    /// Returns the results if some remote data was received in place: copies the missing
    /// contributions into the result buffer and takes it.
    pub fn received(&self) -> Option<Vec<DispatchTensor>> {
        if !self.is_distributed {
            return None;
        }
        let buffer = self.result_buffer.or_else(|| {
            self.all
                .iter()
                .find_map(|contribution| contribution.result_buffer.as_deref())
        })?;
        for (member, contribution) in self.all.iter().enumerate() {
            let has_own = member == self.op.member && self.result_buffer.is_some();
            if contribution.result_buffer.is_none() && !has_own {
                // SAFETY: the contributions are complete, and the tensors of this one are in this
                // process.
                unsafe { buffer.put(member, contribution.tensors_for(self.op.member), || ()) };
            }
        }
        // SAFETY: all contributions are in the buffer now.
        Some(unsafe { buffer.take(self.device) })
    }

    /// Like [`received`](Self::received), for one tensor.
    fn received_one(&self) -> Option<DispatchTensor> {
        self.received()
            .map(|mut tensors| tensors.pop().expect("the result buffer has one tensor"))
    }

    /// Returns the owner of a result that is identical on all ranks, if several of them are local
    /// and may share it.
    #[cfg(feature = "flex")]
    fn owner(&self, keep: host::ResultRetention) -> Option<host::Owner<'_>> {
        let local = self
            .all
            .iter()
            .filter(|contribution| contribution.source == ContributionSource::Local);
        let cache = self.shared.filter(|_| local.take(2).count() == 2)?;
        Some(self.all[0].cache.owner(cache, self.op, keep, &self.waited))
    }

    /// Returns the full tensors of an all-gather, built from the shards of all ranks.
    pub fn gather(&self, plan: &CollectivePlan) -> Vec<DispatchTensor> {
        #[cfg(feature = "flex")]
        {
            let first = &self.all[0];
            let copies = || host::GatherCopyPlan::new(plan, self.all.len());
            // One rank keeps it for all, because its size is proportional to the number of ranks.
            let copies = first.plan.as_deref().unwrap_or(plan).kept(copies);
            let sources = first.cache.gathered(copies, || {
                self.all
                    .iter()
                    .map(|contribution| contribution.tensors.iter().map(host::primitive).collect())
                    .collect()
            });
            if let Some(sources) = sources {
                return copies.full_tensors(sources, self.owner(host::ResultRetention::Latest));
            }
        }
        plan.shardings()
            .iter()
            .enumerate()
            .map(|(index, (dim, _))| self.gather_one(index, *dim, &self.home(index)))
            .collect()
    }

    /// Concatenates tensor `index` of all ranks along `dim`.
    fn gather_one(&self, index: usize, dim: usize, device: &Device) -> DispatchTensor {
        concat(
            self.all
                .iter()
                .map(|contribution| full_block(&contribution.tensors[index]))
                .collect(),
            dim,
            device,
        )
    }

    /// Returns `count` one-dimensional tensors, each concatenated from the tensors of all ranks.
    pub fn rows(&self, count: usize) -> Vec<DispatchTensor> {
        self.received().unwrap_or_else(|| {
            (0..count)
                .map(|index| self.gather_one(index, 0, self.device))
                .collect()
        })
    }

    /// Changes the sharding of tensor 0 from `dim` to `to_dim`, and returns this rank's shard along
    /// `to_dim`.
    pub fn reshard(&self, dim: usize, to_dim: usize, to_sizes: &ShardSizes) -> DispatchTensor {
        let blocks = self
            .all
            .iter()
            .map(|contribution| self.block_of(contribution, 0, to_dim, to_sizes));
        self.received_one()
            .unwrap_or_else(|| concat(blocks.collect(), dim, &self.home(0)))
    }

    /// Returns the tensors of `root`.
    pub fn of_root(&self, root: usize) -> Vec<DispatchTensor> {
        let root = &self.all[root];
        root.tensors
            .iter()
            .map(|tensor| self.own(root, tensor))
            .collect()
    }

    /// Returns the tensors that each rank has addressed to this one. `own` are those of this rank
    /// itself.
    pub fn addressed(&self, mut own: Vec<DispatchTensor>) -> Vec<Vec<DispatchTensor>> {
        let tensors =
            |(member, contribution): (usize, &Contribution)| match member == self.op.member {
                true => std::mem::take(&mut own),
                false => contribution
                    .tensors_for(self.op.member)
                    .iter()
                    .map(|tensor| self.own(contribution, tensor))
                    .collect(),
            };
        self.all.iter().enumerate().map(tensors).collect()
    }

    /// Returns the rows that all ranks have addressed to this one, concatenated in group order.
    pub fn addressed_rows(&self) -> DispatchTensor {
        let rows = self
            .all
            .iter()
            .flat_map(|contribution| contribution.tensors_for(self.op.member))
            .map(full_block);
        self.received_one()
            .unwrap_or_else(|| concat(rows.collect(), 0, self.device))
    }

    /// Returns a tensor of `contribution` for this rank's result. It is not copied if no other rank
    /// has it, or if it may be shared and keeps no other memory alive.
    fn own(&self, contribution: &Contribution, tensor: &DispatchTensor) -> DispatchTensor {
        #[cfg(feature = "flex")]
        let is_shared = self.shared.is_some() && host::is_alone(tensor);
        #[cfg(not(feature = "flex"))]
        let is_shared = false;
        if (contribution.source == ContributionSource::RemoteExclusive || is_shared)
            && tensor.device() == *self.device.as_dispatch()
        {
            return tensor.clone();
        }
        concat(vec![full_block(tensor)], 0, self.device)
    }

    /// Returns this rank's shard, along `dim`, of tensor `index` of `root`.
    pub fn shard(
        &self,
        index: usize,
        root: usize,
        dim: usize,
        sizes: &ShardSizes,
    ) -> DispatchTensor {
        let root = &self.all[root];
        match root.shard_for(self.op.member, index) {
            Ok(shard) => self.own(root, shard),
            Err(_) => concat(
                vec![self.block_of(root, index, dim, sizes)],
                0,
                &self.home(index),
            ),
        }
    }

    /// Returns a tensor of a contribution and the ranges in it that are this rank's shard, along
    /// `dim`, of tensor `index`.
    fn block_of<'b>(
        &self,
        contribution: &'b Contribution,
        index: usize,
        dim: usize,
        sizes: &ShardSizes,
    ) -> (&'b DispatchTensor, Ranges) {
        match contribution.shard_for(self.op.member, index) {
            Ok(shard) => full_block(shard),
            Err(tensor) => (tensor, slice(&tensor.shape()[..], dim, self.range(sizes))),
        }
    }

    /// Returns this rank's shards of the reductions of all tensors.
    pub fn reduce_scatter(
        &self,
        shardings: &[(usize, ShardSizes)],
        op: ReduceOp,
    ) -> Vec<DispatchTensor> {
        let shard = |(index, (dim, sizes)): (usize, &(usize, ShardSizes))| {
            if self.is_distributed
                && self
                    .all
                    .iter()
                    .any(|contribution| !contribution.recipients.is_empty())
            {
                // Ranks of other processes have sent only this rank's shards.
                let operand = |contribution: &Contribution| match contribution
                    .shard_for(self.op.member, index)
                {
                    Ok(shard) => shard.clone(),
                    Err(tensor) => shard(tensor, *dim, self.range(sizes)),
                };
                let operands: Vec<_> = self.all.iter().map(operand).collect();
                let ranges = full(&operands[0].shape()[..]);
                #[cfg(feature = "flex")]
                if has_kernel(op)
                    && let Some(operands) = host::ReduceOperands::of(&operands)
                {
                    return operands.reduce(&ranges, op);
                }
                return backend::reduce(
                    &operands.iter().collect::<Vec<_>>(),
                    &ranges,
                    op,
                    &self.home(index),
                );
            }
            let shape = self.all[0].tensors[index].shape();
            self.reduce(index, &slice(&shape[..], *dim, self.range(sizes)), op)
        };
        shardings.iter().enumerate().map(shard).collect()
    }

    /// Returns the reduction of tensor `index`.
    pub fn all_reduce(&self, index: usize, op: ReduceOp) -> DispatchTensor {
        #[cfg(feature = "flex")]
        if let Some(operands) = self.operands(index, op) {
            return operands.reduce_full(op, self.owner(host::ResultRetention::All));
        }
        self.reduce(index, &full(&self.all[0].tensors[index].shape()[..]), op)
    }

    fn reduce(&self, index: usize, ranges: &Ranges, op: ReduceOp) -> DispatchTensor {
        #[cfg(feature = "flex")]
        if let Some(operands) = self.operands(index, op) {
            return operands.reduce(ranges, op);
        }
        let sources: Vec<_> = self
            .all
            .iter()
            .map(|contribution| &contribution.tensors[index])
            .collect();
        backend::reduce(&sources, ranges, op, &self.home(index))
    }

    /// Returns tensor `index` of every rank, if all are Flex tensors and `op` has a kernel.
    #[cfg(feature = "flex")]
    fn operands(&self, index: usize, op: ReduceOp) -> Option<&'a host::ReduceOperands> {
        let first = &self.all[0];
        if has_kernel(op) {
            first.cache.terms((index, first.tensors.len()), || {
                self.all
                    .iter()
                    .map(|contribution| host::primitive(&contribution.tensors[index]))
                    .collect()
            })
        } else {
            None
        }
    }

    /// Returns the interval of this rank's shard.
    fn range(&self, sizes: &ShardSizes) -> Range<usize> {
        sizes.range(self.all.len(), self.op.member)
    }

    /// Returns the device of this rank's tensor `index`.
    fn home(&self, index: usize) -> Device {
        let own = self.all[self.op.member].tensors.get(index);
        own.map_or_else(
            || self.device.clone(),
            |tensor| Device::new(tensor.device()),
        )
    }
}

/// Returns true if the reduction has a kernel; the others use burn's operations.
pub(in crate::comm) fn has_kernel(op: ReduceOp) -> bool {
    !matches!(
        op,
        ReduceOp::BitAnd | ReduceOp::BitOr | ReduceOp::BitXor | ReduceOp::PremulSum(_)
    )
}

fn full_block(tensor: &DispatchTensor) -> (&DispatchTensor, Ranges) {
    (tensor, full(&tensor.shape()[..]))
}
