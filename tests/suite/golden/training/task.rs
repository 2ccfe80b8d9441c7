//! The models that are trained: what one builds, its loss on a batch, and its plan.

use std::ops::Range;

use burn::module::Module;
use burn::tensor::{DType, Device, Int, Tensor};
use burn_dtensor::Result;
use burn_dtensor::mesh::DeviceMesh;
use burn_dtensor::parallel::Plan;

use super::file::{Array, Golden, Run, TIED};
use crate::models::{Gpt, GptSize, Mlp, plan};

/// A model of the goldens, with its batches.
pub trait Task: Module + Sync + 'static {
    fn build(golden: &Golden, run: &Run, device: &Device) -> Self;
    /// The loss of some rows of a batch, on the tensor-parallel ranks together if there are any.
    fn loss(
        &self,
        golden: &Golden,
        step: usize,
        rows: Range<usize>,
        tensor: Option<&DeviceMesh>,
        device: &Device,
    ) -> Result<Tensor<1>>;
    fn plan(golden: &Golden, run: &Run) -> Plan;
    fn batch(golden: &Golden) -> usize;
}

impl Task for Gpt {
    fn build(golden: &Golden, run: &Run, device: &Device) -> Self {
        let size = size(golden, run);
        Gpt::new(
            &golden.init[if size.tied { TIED } else { "gpt" }],
            size,
            device,
        )
    }

    fn loss(
        &self,
        golden: &Golden,
        step: usize,
        rows: Range<usize>,
        tensor: Option<&DeviceMesh>,
        device: &Device,
    ) -> Result<Tensor<1>> {
        let ints = |array: &Array| {
            Tensor::<2, Int>::from_data(
                array.batch(step, rows.clone()).convert_dtype(DType::I64),
                (device, DType::I64),
            )
        };
        let (inputs, targets) = (ints(&golden.gpt_inputs), ints(&golden.gpt_targets));
        match tensor {
            Some(mesh) => self.loss_on(mesh, inputs, targets),
            None => Ok(Gpt::loss(self, inputs, targets)),
        }
    }

    fn plan(golden: &Golden, run: &Run) -> Plan {
        plan(size(golden, run), run.is("sp"), run.is("lossp"))
    }

    fn batch(golden: &Golden) -> usize {
        golden.gpt_inputs.shape[1]
    }
}

fn size(golden: &Golden, run: &Run) -> GptSize {
    GptSize {
        layers: golden.config.layers,
        heads: golden.config.heads,
        tied: run.is_tied(),
    }
}

impl Task for Mlp {
    fn build(golden: &Golden, _: &Run, device: &Device) -> Self {
        Mlp::new(&golden.init["mlp"], golden.mlp_dims.len() - 1, device)
    }

    fn loss(
        &self,
        golden: &Golden,
        step: usize,
        rows: Range<usize>,
        _: Option<&DeviceMesh>,
        device: &Device,
    ) -> Result<Tensor<1>> {
        let floats = |array: &Array| {
            Tensor::<2>::from_data(
                array.batch(step, rows.clone()).convert_dtype(DType::F32),
                (device, DType::F32),
            )
        };
        Ok(Mlp::loss(
            self,
            floats(&golden.mlp_inputs),
            floats(&golden.mlp_targets),
        ))
    }

    fn plan(_: &Golden, run: &Run) -> Plan {
        panic!("no plan for an mlp, {}", run.par)
    }

    fn batch(golden: &Golden) -> usize {
        golden.mlp_inputs.shape[1]
    }
}
