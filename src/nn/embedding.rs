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
        let style = self.weight.style();
        let indices = bring(indices, style.and_then(|style| style.input()));
        bring(module::embedding(read(&self.weight), indices), style.and_then(|style| style.output()))
    }
}
