//! Data plane for lists of tensors on one Cube device. For any number of tensors, each rank runs
//! one kernel before the ranks exchange data and one after.
//!
//! ```text
//! all-gather        shards       --copy-in-->  a row of each rank   --copy-out-->  full tensors
//! deferred          shards       --------------------------------------------->   full tensors
//! reduce-scatter    full tensors --copy-in-->  rows for all ranks   --reduce-->    shards, views of the reduced row
//! ```
//!
//! Ranks exchange tensors by handle, without a copy through the host. Ranks are streams of the
//! device, which wait for each other's kernels. A deferred all-gather, such as those of backward
//! that forward posts, has no row, because the row would take as much memory as the shards until
//! the gather starts. A contribution keeps the tensors in addition to the flat buffer. If ranks are
//! on different devices and one of them does not support this path, they can still use burn's own
//! operations.

#[cfg(feature = "cuda")]
mod cuda_streams;
mod plane;
#[cfg(test)]
mod reads;
mod reduce;
mod submitted_work;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use burn::backend::DispatchTensor;
use burn::tensor::DType;
use burn_cubecl::CubeDevice;
use burn_cubecl::tensor::CubeTensor;

use super::contribution::Contribution;
use crate::comm::backend::GroupMember;
use crate::comm::{CollectivePlan, Ledger, PackStats, ReduceOp};
use crate::kernels::FlatLayout;
use crate::kernels::cube::{CopySide, CubePlan, alignment, plan};
use crate::memory::cube::{primitive, wrap};
pub(super) use plane::{DeviceContribution, DevicePlane, read_in_order, reader};
#[cfg(any(feature = "nccl", feature = "testing"))]
pub(super) use plane::{gathered, packed};

/// Copies before and after one collective of a list of tensors.
#[derive(Debug, Clone)]
pub(super) struct CoalescedCopies {
    layout: FlatLayout,
    device: CubeDevice,
    dtype: DType,
    member: usize,
    ledger: Arc<Ledger>,
}

impl CoalescedCopies {
    /// Prepares an all-gather: returns the copies, and this rank's row, unless the call is
    /// `deferred`.
    pub fn pack_parts(
        deferred: bool,
        tensors: &[DispatchTensor],
        plan: &CollectivePlan,
        member: &GroupMember,
    ) -> (Option<Self>, Option<CubeTensor>) {
        let coalesced = Self::new(tensors, plan, member);
        let now = coalesced.as_ref().filter(|_| !deferred);
        let row = now
            .and_then(|coalesced| coalesced.pack(CopySide::PackParts(coalesced.member), tensors));
        (coalesced, row)
    }

    /// Prepares a reduce-scatter: returns the copies, and this rank's rows for all ranks, if the
    /// device can reduce them.
    pub fn pack_full(
        tensors: &[DispatchTensor],
        plan: &CollectivePlan,
        member: &GroupMember,
    ) -> (Option<Self>, Option<CubeTensor>) {
        let coalesced = Self::new(tensors, plan, member);
        let coalesced = coalesced.filter(|coalesced| {
            reduce::is_possible(
                &coalesced.device.client(),
                member.group.size(),
                coalesced.dtype,
            )
        });
        let rows = coalesced
            .as_ref()
            .and_then(|coalesced| coalesced.pack(CopySide::PackFull, tensors));
        (coalesced, rows)
    }

    /// Returns the copies for at least two float tensors of one dtype on one Cube device; `None`
    /// for other lists.
    fn new(
        tensors: &[DispatchTensor],
        plan: &CollectivePlan,
        member: &GroupMember,
    ) -> Option<Self> {
        let [first, _, ..] = tensors else { return None };
        let CubeTensor {
            device,
            dtype,
            client,
            ..
        } = primitive(first)?;
        let all_same = tensors.iter().all(|tensor| {
            primitive(tensor)
                .is_some_and(|tensor| tensor.device == *device && tensor.dtype == *dtype)
        });
        if !all_same || !matches!(dtype, DType::F64 | DType::F32 | DType::F16 | DType::BF16) {
            return None;
        }
        let tensors = plan.sharded_tensors().map(|(_, tensor)| tensor).collect();
        let layout = FlatLayout::new(
            member.group.size(),
            tensors,
            alignment(client) / dtype.size(),
        );
        let device = device.clone();
        let dtype = *dtype;
        let ledger = member.ledger.clone();
        Some(Self {
            layout,
            device,
            dtype,
            member: member.group.rank(),
            ledger,
        })
    }

    fn pack(&self, side: CopySide, tensors: &[DispatchTensor]) -> Option<CubeTensor> {
        let sources: Vec<_> = tensors
            .iter()
            .map(|tensor| primitive(tensor).cloned())
            .collect::<Option<_>>()?;
        Some(self.run(side, &sources)?.remove(0))
    }

    /// Returns the full tensors of an all-gather, if every rank has contributed its row, or shards
    /// that this device can read.
    fn gathered(&self, contributions: &[Contribution]) -> Option<Vec<DispatchTensor>> {
        let full_tensors = match self.flats(contributions) {
            Some(rows) => self.run(CopySide::UnpackRows, &rows),
            None => self.run(CopySide::JoinParts, &self.parts(contributions)?),
        };
        Some(full_tensors?.into_iter().map(wrap).collect())
    }

    /// Returns the shards of all ranks, if they are on this device.
    fn parts(&self, contributions: &[Contribution]) -> Option<Vec<CubeTensor>> {
        let parts = contributions
            .iter()
            .flat_map(|contribution| &contribution.tensors);
        parts
            .map(|part| {
                primitive(part)
                    .filter(|part| part.device == self.device)
                    .cloned()
            })
            .collect()
    }

    /// Returns this rank's shards of a reduce-scatter, if every rank has contributed its rows.
    fn reduced(&self, contributions: &[Contribution], op: ReduceOp) -> Option<Vec<DispatchTensor>> {
        let flats = self.flats(contributions)?;
        let bytes = self.layout.row() * self.dtype.size();
        let row = reduce::reduce_row(&flats, self.member, op);
        let parts = self.layout.parts_in_row(self.member);
        let copied: usize = parts
            .iter()
            .map(|(_, shape)| shape.num_elements() * self.dtype.size())
            .sum();
        self.count(usize::from(bytes > 0), copied, bytes - copied);
        Some(
            parts
                .into_iter()
                .map(|(offset, shape)| wrap(reduce::view_of(&row, offset, shape)))
                .collect(),
        )
    }

    /// Returns the flat buffers of all ranks, if all exist and are on this device.
    fn flats(&self, contributions: &[Contribution]) -> Option<Vec<CubeTensor>> {
        contributions
            .iter()
            .map(|contribution| {
                plane::of_device(contribution)?
                    .flat
                    .clone()
                    .filter(|flat| flat.device == self.device)
            })
            .collect()
    }

    fn run(&self, side: CopySide, sources: &[CubeTensor]) -> Option<Vec<CubeTensor>> {
        let plan: Arc<CubePlan> = plan(&self.device, &self.layout, side, self.dtype).ok()?;
        self.count(plan.launches(), plan.copied(), plan.padding());
        Some(plan.run(sources).tensors)
    }

    fn count(&self, launches: usize, bytes: usize, padding: usize) {
        let [launches, bytes, padding] = [launches, bytes, padding].map(|count| count as u64);
        self.ledger.copied_by(PackStats {
            launches,
            bytes,
            padding,
        });
    }
}
