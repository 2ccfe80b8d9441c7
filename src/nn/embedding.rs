//! Forward of `Embedding` over DTensors.

use burn::nn::Embedding;
use burn::tensor::Int;

use super::{DTensorForward, apply_style};
use crate::dtensor::DTensor;
use crate::dtensor::ops::module;

impl DTensorForward<DTensor<2, Int>> for Embedding {
    type Output = DTensor<3>;

    fn forward_dtensor(&self, indices: DTensor<2, Int>) -> DTensor<3> {
        apply_style(&self.weight, indices, |indices, weight| {
            module::embedding(weight, indices)
        })
    }
}
