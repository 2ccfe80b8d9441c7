//! [`RowKernels`]: the kernels that pack the tensors of a rank, and join those of all ranks, on Cube
//! devices. Elsewhere tensors are copied one by one.

use burn::backend::DispatchTensor;

use super::layout::StagingLayout;
#[cfg(feature = "cube")]
use super::layout::Way;
#[cfg(feature = "cube")]
use crate::comm::Op;
use crate::comm::data::PlaneContribution;
use crate::comm::data::call::DataCall;
use crate::comm::data::contribution::Contribution;
#[cfg(feature = "cube")]
use crate::comm::data::device::{self, CoalescedCopies, DeviceContribution, DevicePlane};
use crate::comm::data::inputs::CollectiveInputs;
#[cfg(feature = "cube")]
use crate::comm::data::plane::DataPlane;
#[cfg(feature = "cube")]
use crate::memory::cube::wrap;

/// The kernels of one call.
#[derive(Debug, Clone, Default)]
pub(super) struct RowKernels {
    /// Copies after the collective, if one kernel makes them.
    #[cfg(feature = "cube")]
    copies: Option<CoalescedCopies>,
}

impl RowKernels {
    /// Packs the tensors of a rank. Also returns the buffer that has them, and its offset in the
    /// layout, if one kernel could pack them. A deferred call is not packed, because it takes no
    /// memory until it is started.
    #[cfg(feature = "cube")]
    pub fn pack(
        call: &DataCall<'_>,
        layout: &StagingLayout,
        tensors: &[DispatchTensor],
    ) -> (Self, Option<(DispatchTensor, usize)>) {
        let (copies, flat) = device::packed(call, tensors);
        let is_gathered = call.signature.op == Op::AllGather;
        let row = match &layout.way {
            Way::AllGather { row } => Some((*row, layout.row_of(*row))),
            Way::ReduceScatter { .. } => Some((layout.bytes, 0)),
            _ => None,
        };
        let rows = flat.zip(row).and_then(|(flat, (bytes, offset))| {
            let is_same = flat.meta.num_elements() * flat.dtype.size() == bytes;
            is_same.then(|| (wrap(flat), offset))
        });
        let copies = copies.filter(|_| is_gathered);
        (Self { copies }, rows)
    }

    /// Does nothing: there are no kernels.
    #[cfg(not(feature = "cube"))]
    pub fn pack(
        _call: &DataCall<'_>,
        _layout: &StagingLayout,
        _tensors: &[DispatchTensor],
    ) -> (Self, Option<(DispatchTensor, usize)>) {
        Default::default()
    }

    /// Adds the kernel that joins the tensors of all ranks to the contribution of the rank itself.
    pub fn add_to(self, own: &mut Contribution) {
        #[cfg(feature = "cube")]
        if let Some(copies) = self.copies {
            let copies = DeviceContribution::of_copies(copies);
            own.plane = PlaneContribution::Device(Box::new(copies));
        }
        let _ = own;
    }
}

/// Returns the full tensors of an all-gather, if one kernel can join them.
pub(super) fn joined(inputs: &CollectiveInputs<'_>) -> Option<Vec<DispatchTensor>> {
    #[cfg(feature = "cube")]
    return device::gathered(inputs);
    #[cfg(not(feature = "cube"))]
    (inputs, None).1
}

/// Returns the contribution of a message, which is read by handle, or sent as bytes.
pub(super) fn message(
    call: &DataCall<'_>,
    tensors: Vec<DispatchTensor>,
    recipients: Vec<usize>,
) -> Contribution {
    #[cfg(feature = "cube")]
    return DevicePlane.contribute(call, tensors, recipients);
    #[cfg(not(feature = "cube"))]
    {
        let _ = call;
        Contribution::new(tensors, PlaneContribution::bytes(None)).with_recipients(recipients)
    }
}
