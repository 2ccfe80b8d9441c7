//! A unit's all-gathers: of shards, and of the parts that a few ranks have kept.

use std::ops::Range;

use burn::backend::ops::FloatTensorOps;
use burn::backend::{Dispatch, DispatchTensor, TensorMetadata};
use burn::tensor::Slice;

use super::offload::CpuOffload;
use super::pending_all_gather::{CopyIn, PendingAllGather};
use super::plan_cache::UnitCollectiveKind;
use super::unit::{DataParallelGroups, Unit};
use crate::comm::{Call, Communicator};
use crate::dtensor::own;
use crate::placement::ShardSizes;

impl Unit {
    /// Gathers the parameters at `members` from this rank's shards.
    ///
    /// The result is in the order of `members` without those every rank holds whole.
    pub(super) fn all_gather(&self, call: Call, members: &[usize], shards: Vec<DispatchTensor>) -> PendingAllGather {
        self.gather(UnitCollectiveKind::Shards, |data| &data.shard, call, members, shards, self.offloaded())
    }

    /// [`all_gather`](Self::all_gather) for backward, on a sequence of its own.
    pub(super) fn all_gather_again(
        &self,
        call: Call,
        members: &[usize],
        shards: Vec<DispatchTensor>,
    ) -> PendingAllGather {
        self.gather(UnitCollectiveKind::Shards, |data| &data.again, call, members, shards, self.offloaded())
    }

    /// The same, from the parts [`split`](Self::split) left where the ranks compute.
    pub(super) fn all_gather_parts(
        &self,
        call: Call,
        members: &[usize],
        parts: Vec<DispatchTensor>,
    ) -> PendingAllGather {
        self.gather(UnitCollectiveKind::Parts, |_| self.neighbours(), call, members, parts, None)
    }

    fn gather<'a>(
        &'a self,
        exchange: UnitCollectiveKind,
        group: impl FnOnce(&'a DataParallelGroups) -> &'a Communicator,
        call: Call,
        members: &[usize],
        shards: Vec<DispatchTensor>,
        offloaded: Option<&CpuOffload>,
    ) -> PendingAllGather {
        let shards = self.sharded_of(members, shards);
        if shards.is_empty() {
            return PendingAllGather::Done((Vec::new(), None));
        }
        let copy_in = offloaded.cloned().map(|offloaded| CopyIn { offloaded, label: call.label.clone() }.into());
        PendingAllGather::UnderWay(self.exchange(exchange, group(self.data()), call, members, shards), copy_in)
    }

    /// This rank's part of every whole, over the group of neighbours.
    pub(super) fn split(&self, members: &[usize], unsharded: &[DispatchTensor]) -> Vec<DispatchTensor> {
        let group = self.neighbours().group();
        let part = |(&member, full): (&usize, &DispatchTensor)| match &self.params[member].sharding {
            None => full.clone(),
            Some((dim, sizes)) => copy_range(full, *dim, over_neighbours(sizes).range(group.size(), group.rank())),
        };
        members.iter().zip(unsharded).map(part).collect()
    }

    fn neighbours(&self) -> &Communicator {
        self.data().post_forward_group.as_ref().expect("parts are kept only with a group of neighbours")
    }
}

/// How a whole falls on the ranks of [`ReshardAfterForward::Ranks`]: evenly, however ragged the shards
/// are that it was gathered from.
pub(super) fn over_neighbours(sharding: &ShardSizes) -> ShardSizes {
    ShardSizes::Chunked(sharding.total())
}

/// A copy of `range` of `dim`.
fn copy_range(tensor: &DispatchTensor, dim: usize, range: Range<usize>) -> DispatchTensor {
    let mut slices: Vec<_> = tensor.shape().iter().map(|&len| Slice::from(0..len)).collect();
    slices[dim] = Slice::from(range);
    own(Dispatch::float_slice(tensor.clone(), &slices))
}
