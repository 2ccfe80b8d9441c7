//! Selection by mask: the result's length depends on the values, so every rank needs all of them.

use burn::tensor::{Bool, Shape};

use super::args::misfit;
use super::{Rule, Strategy, resolve};
use crate::Result;
use crate::dtensor::{DTensor, DTensorSpec, Kind};

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct MaskSelect;

impl Rule for MaskSelect {
    fn name(&self) -> &'static str {
        "mask_select"
    }

    /// At most.
    fn outputs(&self, inputs: &[Shape]) -> Result<Vec<Shape>> {
        if inputs[0] != inputs[1] {
            return Err(misfit(self.name(), inputs, "tensor and mask must have the same shape; expand the mask"));
        }
        Ok(vec![[inputs[0].num_elements()].into()])
    }

    fn strategies(&self, _: &[Shape], _: &[Shape]) -> Vec<Strategy> {
        Vec::new()
    }
}

impl<const D: usize, K: Kind> DTensor<D, K> {
    /// The elements where `mask` is true, as burn's [`mask_select`](burn::tensor::Tensor::mask_select):
    /// Replicate, of Replicate inputs.
    #[must_use]
    pub fn mask_select(self, mask: DTensor<D, Bool>) -> DTensor<1, K> {
        let op = resolve(&MaskSelect, &[&self.spec, &mask.spec]).unwrap_or_else(|error| error.unwind());
        let mesh = self.mesh().clone();
        let local = self.enter(&op, 0).mask_select(mask.enter(&op, 1));
        let spec = DTensorSpec::decided(&mesh, op.output(0).clone(), local.shape(), local.dtype());
        DTensor::from_parts(local, spec.shared())
    }
}
