//! `Embedding`.

use burn::nn::Embedding;
use burn::tensor::Int;

use super::{DTensorForward, bring, read};
use crate::dtensor::DTensor;
use crate::dtensor::ops::module;
use crate::fsdp::ParamExt;

impl DTensorForward<DTensor<2, Int>> for Embedding {
    type Output = DTensor<3>;

    fn forward_dtensor(&self, indices: DTensor<2, Int>) -> DTensor<3> {
        let (style, weight) = (self.weight.style(), read(&self.weight));
        let spec = weight.spec().clone();
        let indices = bring(indices, &spec, style.and_then(|style| style.input()));
        let y = module::embedding(weight, indices);
        bring(y, &spec, style.and_then(|style| style.output()))
    }
}
