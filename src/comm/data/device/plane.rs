//! [`DevicePlane`]: ranks read each other's tensors on Cube devices by handle.

#[cfg(feature = "cuda")]
use std::sync::Arc;

use burn::backend::{DispatchTensor, DispatchTensorKind, TensorMetadata};
use burn::tensor::TensorData;
use burn_cubecl::tensor::CubeTensor;
use itertools::Itertools;

use super::CoalescedCopies;
#[cfg(feature = "cuda")]
use super::cuda_streams::CudaStreams;
#[cfg(test)]
use super::reads;
use super::submitted_work::{SubmittedWork, run_before};
use crate::comm::data::call::DataCall;
use crate::comm::data::contribution::{Contribution, ContributionSource};
use crate::comm::data::inputs::CollectiveInputs;
use crate::comm::data::plane::{DataPlane, gather_by_tensor, reduce_by_tensor};
use crate::comm::data::{PlaneContribution, has_kernel};
use crate::comm::{Capabilities, CollectivePlan, Op, ReduceOp, backend};
use crate::memory::cube;
use crate::placement::ShardSizes;

/// The plane for tensors on Cube devices.
#[derive(Debug, Default)]
pub(in crate::comm::data) struct DevicePlane;

/// Addition to a rank's tensors for other ranks on Cube devices.
#[derive(Debug, Default)]
pub(in crate::comm) struct DeviceContribution {
    /// Copies of this rank, before and after the collective.
    copies: Option<CoalescedCopies>,
    /// All tensors packed into one buffer, in addition to the tensors.
    pub flat: Option<CubeTensor>,
    /// Work that the rank had submitted to its GPU when it contributed.
    work: Option<SubmittedWork>,
}

/// Returns what the rank adds for others on Cube devices, if its own tensors are on one.
pub(super) fn of_device(contribution: &Contribution) -> Option<&DeviceContribution> {
    match &contribution.plane {
        PlaneContribution::Device(device) => Some(device),
        _ => None,
    }
}

/// Returns what the calling thread has submitted to the device of `tensor`; `None` if the threads
/// of the device need no order: wgpu has one queue for all of them, and a backend in host memory
/// runs work when it is called.
fn submitted_on(tensor: &DispatchTensor) -> Option<SubmittedWork> {
    #[cfg(feature = "cuda")]
    return CudaStreams::of(tensor).map(|streams| SubmittedWork::on(Arc::new(streams)));
    #[cfg(not(feature = "cuda"))]
    (tensor, None).1
}

/// Returns the work that the rank had submitted to a GPU whose streams need an order.
fn work(contribution: &Contribution) -> Option<&SubmittedWork> {
    of_device(contribution)?.work.as_ref()
}

/// Returns the copies of this rank.
fn copies<'a>(inputs: &CollectiveInputs<'a>) -> Option<&'a CoalescedCopies> {
    of_device(inputs.own())?.copies.as_ref()
}

/// Packs the tensors of a call into one buffer for each rank, if one kernel can. Also returns the
/// copies after the collective.
pub(in crate::comm::data) fn packed(
    call: &DataCall<'_>,
    tensors: &[DispatchTensor],
) -> (Option<CoalescedCopies>, Option<CubeTensor>) {
    match call.plan {
        Some(plan) if call.signature.op == Op::AllGather => {
            CoalescedCopies::pack_parts(call.is_deferred, tensors, plan, call.member)
        }
        Some(plan) => CoalescedCopies::pack_full(tensors, plan, call.member),
        None => (None, None),
    }
}

/// Returns the full tensors of an all-gather, if one kernel can build them.
pub(in crate::comm::data) fn gathered(
    inputs: &CollectiveInputs<'_>,
) -> Option<Vec<DispatchTensor>> {
    copies(inputs)?.gathered(inputs.all)
}

impl DeviceContribution {
    /// Creates an addition that has only the rank's work.
    #[cfg(test)]
    pub(super) fn of_work(work: SubmittedWork) -> Self {
        Self {
            work: Some(work),
            ..Self::default()
        }
    }

    /// Creates an addition that has only what is needed after the collective.
    #[cfg(any(feature = "nccl", feature = "testing"))]
    pub(in crate::comm::data) fn of_copies(copies: CoalescedCopies) -> Self {
        Self {
            copies: Some(copies),
            ..Self::default()
        }
    }
}

impl DataPlane for DevicePlane {
    fn name(&self) -> &'static str {
        "device"
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            stream_ordered: true,
            ..Capabilities::default()
        }
    }

    fn contribute(
        &self,
        call: &DataCall<'_>,
        tensors: Vec<DispatchTensor>,
        recipients: Vec<usize>,
    ) -> Contribution {
        let mut contribution =
            Contribution::new(tensors, PlaneContribution::Device(Box::default()))
                .with_recipients(recipients);
        let tensors = &contribution.tensors;
        // Ranks of other processes contribute host tensors without rows.
        let (copies, flat) = match call.is_distributed {
            true => (None, None),
            false => packed(call, tensors),
        };
        // After all that prepares the tensors.
        let work = tensors.first().and_then(submitted_on);
        contribution.plane =
            PlaneContribution::Device(Box::new(DeviceContribution { copies, flat, work }));
        contribution
    }

    fn all_gather(
        &self,
        inputs: &CollectiveInputs<'_>,
        plan: &CollectivePlan,
    ) -> Vec<DispatchTensor> {
        inputs
            .received()
            .or_else(|| gathered(inputs))
            .unwrap_or_else(|| gather_by_tensor(inputs, plan))
    }

    fn reduce_scatter(
        &self,
        inputs: &CollectiveInputs<'_>,
        shardings: &[(usize, ShardSizes)],
        op: ReduceOp,
    ) -> Vec<DispatchTensor> {
        copies(inputs)
            .filter(|_| has_kernel(op))
            .and_then(|copies| copies.reduced(inputs.all, op))
            .unwrap_or_else(|| reduce_by_tensor(self, inputs, shardings, op))
    }
}

/// Returns the result of `read`, which reads the contributions `all`. Its reads run after what the
/// contributing ranks had submitted, and before what ranks other than `own` submit from now on.
pub(in crate::comm::data) fn read_in_order<T>(
    all: &[Contribution],
    own: Option<usize>,
    read: impl FnOnce() -> T,
) -> T {
    all.iter().filter_map(work).for_each(SubmittedWork::wait);
    let value = read();
    let others = || {
        all.iter()
            .enumerate()
            .filter(move |(member, contribution)| {
                Some(*member) != own && contribution.source == ContributionSource::Local
            })
    };
    run_before(others().filter_map(|(_, contribution)| work(contribution)));
    others()
        .filter(|(_, contribution)| work(contribution).is_none())
        .filter_map(|(_, contribution)| contribution.tensors.first())
        .filter(|tensor| matches!(tensor.kind, DispatchTensorKind::Cube(_)))
        .dedup_by(|a, b| a.device() == b.device())
        .for_each(cube::run_before_others);
    value
}

/// Returns a function that copies the tensor to the host, after what the calling thread has
/// submitted so far.
pub(in crate::comm::data) fn reader(
    tensor: DispatchTensor,
) -> Box<dyn FnOnce() -> TensorData + Send> {
    let work = submitted_on(&tensor);
    Box::new(move || {
        work.iter().for_each(SubmittedWork::wait);
        #[cfg(test)]
        reads::note(&tensor);
        backend::into_data(tensor)
    })
}
