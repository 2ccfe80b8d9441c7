//! [`CollectiveInputs`]: the contributions of all ranks, as one rank builds its result from them.

use std::cell::Cell;
use std::ops::Range;
use std::time::Duration;

use burn::backend::{DispatchTensor, TensorMetadata};
use burn::tensor::Device;

use super::contribution::{Contribution, ContributionSource};
use super::result_buffer::ResultBuffer;
use crate::comm::backend::ranges::{Ranges, full, slice};
use crate::comm::control::match_table::OpHandle;
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
    /// Result buffer that already has this rank's own shards.
    pub result_buffer: Option<&'a ResultBuffer>,
    /// Time that the rank has waited for others that build its result with it.
    pub waited: Cell<Duration>,
}

impl<'a> CollectiveInputs<'a> {
    /// Returns this rank's own contribution.
    pub fn own(&self) -> &'a Contribution {
        &self.all[self.op.member]
    }

    /// Returns tensor `index` of every rank.
    pub fn each(&self, index: usize) -> impl Iterator<Item = &'a DispatchTensor> {
        self.all
            .iter()
            .map(move |contribution| &contribution.tensors[index])
    }

    /// Returns true if several ranks are in this process.
    pub fn has_local_peers(&self) -> bool {
        self.all
            .iter()
            .filter(|contribution| contribution.source == ContributionSource::Local)
            .nth(1)
            .is_some()
    }

    /// Returns true if some contributions have only the shards of this process's ranks, because
    /// ranks of other processes sent no more.
    pub fn has_shards_only(&self) -> bool {
        self.is_distributed
            && self
                .all
                .iter()
                .any(|contribution| !contribution.recipients.is_empty())
    }

    /// Returns the results if some remote data was received in place: copies the missing
    /// contributions into the result buffer and takes it.
    pub fn received(&self) -> Option<Vec<DispatchTensor>> {
        if !self.is_distributed {
            return None;
        }
        let received = |contribution: &'a Contribution| contribution.plane.result_buffer();
        let buffer = self
            .result_buffer
            .or_else(|| self.all.iter().find_map(received))?;
        for (member, contribution) in self.all.iter().enumerate() {
            let has_own = member == self.op.member && self.result_buffer.is_some();
            if received(contribution).is_none() && !has_own {
                // SAFETY: the contributions are complete, and the tensors of this one are in this
                // process.
                unsafe { buffer.put(member, contribution.tensors_for(self.op.member), || ()) };
            }
        }
        // SAFETY: all contributions are in the buffer now.
        Some(unsafe { buffer.take(self.device) })
    }

    /// Like [`received`](Self::received), for one tensor.
    pub fn received_one(&self) -> Option<DispatchTensor> {
        self.received()
            .map(|mut tensors| tensors.pop().expect("the result buffer has one tensor"))
    }

    /// Returns a tensor of a contribution and the ranges in it that are this rank's shard, along
    /// `dim`, of tensor `index`.
    pub fn block_of<'b>(
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

    /// Returns the interval of this rank's shard.
    pub fn range(&self, sizes: &ShardSizes) -> Range<usize> {
        sizes.range(self.all.len(), self.op.member)
    }

    /// Returns the device of this rank's tensor `index`.
    pub fn home(&self, index: usize) -> Device {
        let own = self.own().tensors.get(index);
        own.map_or_else(
            || self.device.clone(),
            |tensor| Device::new(tensor.device()),
        )
    }
}

/// Returns a tensor with the ranges of all its elements.
pub(in crate::comm) fn full_block(tensor: &DispatchTensor) -> (&DispatchTensor, Ranges) {
    (tensor, full(&tensor.shape()[..]))
}
