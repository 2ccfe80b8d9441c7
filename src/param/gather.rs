//! The all-gathers of a unit: of shards, and of the shards of a post-forward group
//! ([`ReshardAfterForward::Ranks`](super::ReshardAfterForward::Ranks)).

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
    /// Starts the all-gather of the parameters at `members` from this rank's shards.
    ///
    /// The result is in the order of `members`, without those that every rank replicates.
    pub(super) fn all_gather(&self, call: Call, members: &[usize], shards: Vec<DispatchTensor>) -> PendingAllGather {
        self.gather(UnitCollectiveKind::Shards, |data| &data.shard, call, members, shards, self.offloaded())
    }

    /// Does the same as [`all_gather`](Self::all_gather) for backward, on a separate sequence of collectives.
    pub(super) fn all_gather_again(
        &self,
        call: Call,
        members: &[usize],
        shards: Vec<DispatchTensor>,
    ) -> PendingAllGather {
        self.gather(UnitCollectiveKind::Shards, |data| &data.again, call, members, shards, self.offloaded())
    }

    /// Like [`all_gather`](Self::all_gather), but from the shards of the post-forward group that
    /// [`split`](Self::split) made, which are on the device on which the ranks compute.
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

    /// Returns this rank's shard of each unsharded parameter, over the post-forward group.
    pub(super) fn split(&self, members: &[usize], unsharded: &[DispatchTensor]) -> Vec<DispatchTensor> {
        let group = self.neighbours().group();
        let part = |(&member, full): (&usize, &DispatchTensor)| match &self.params[member].sharding {
            None => full.clone(),
            Some((dim, sizes)) => copy_range(full, *dim, over_neighbours(sizes).range(group.size(), group.rank())),
        };
        members.iter().zip(unsharded).map(part).collect()
    }

    fn neighbours(&self) -> &Communicator {
        self.data().post_forward_group.as_ref().expect("post-forward shards exist only with a post-forward group")
    }
}

/// Returns the shard sizes of a parameter over the ranks of
/// [`ReshardAfterForward::Ranks`](super::ReshardAfterForward::Ranks). They are even, also if the shards from which
/// the parameter was gathered are uneven.
pub(super) fn over_neighbours(sharding: &ShardSizes) -> ShardSizes {
    ShardSizes::Chunked(sharding.total())
}

/// Copies `range` of dimension `dim`.
fn copy_range(tensor: &DispatchTensor, dim: usize, range: Range<usize>) -> DispatchTensor {
    let mut slices: Vec<_> = tensor.shape().iter().map(|&len| Slice::from(0..len)).collect();
    slices[dim] = Slice::from(range);
    own(Dispatch::float_slice(tensor.clone(), &slices))
}
