//! Samples from categorical distributions.

use burn::tensor::{Distribution, Int, Tensor};

use super::args::operand_error;
use super::{EinsumRule, apply, random};
use crate::dtensor::local::reshape;
use crate::dtensor::{DTensor, DTensorSpec};

const CATEGORICAL: EinsumRule = EinsumRule::new("categorical", "..C -> ..K");

impl<const D: usize> DTensor<D> {
    /// Draws `num_samples` categories from each distribution, as burn's
    /// [`categorical`](Tensor::categorical). The last dimension contains the weights of the
    /// categories: `[.., categories] -> [.., num_samples]`.
    ///
    /// The seed is the next one of the thread's [random number state](random), so that the samples
    /// are the same on every mesh and under every placement.
    #[must_use]
    #[track_caller]
    pub fn categorical(self, num_samples: usize) -> DTensor<D, Int> {
        if num_samples == 0 || self.dims()[D - 1] == 0 {
            let why =
                format!("it draws at least 1 sample, not {num_samples}, from at least 1 category");
            operand_error("categorical", &[self.shape()], why).unwind();
        }
        let seed = random::next_seed_on(self.mesh());
        let mut shape = self.shape();
        shape[D - 1] = num_samples;
        apply(&CATEGORICAL.lens([num_samples]), self, |weights, op| {
            let mesh = op.input_spec(0).mesh();
            let spec =
                DTensorSpec::decided(mesh, op.output_layout(0).clone(), shape, weights.dtype());
            let uniform = random::part(Distribution::Uniform(0.0, 1.0), seed, &spec, &weights, 1.0);
            sample(weights, uniform)
        })
    }
}

/// Returns the category of each number of `uniform` in `0..1`: the number of cumulative shares that
/// are below it.
fn sample<const D: usize>(weights: Tensor<D>, uniform: Tensor<D>) -> Tensor<D, Int> {
    let categories = weights.dims()[D - 1];
    let shape = uniform.shape();
    let rows = shape.num_elements() / shape[D - 1];
    let samples = shape[D - 1];
    let total = weights.clone().sum_dim(D - 1);
    let shares: Tensor<3> = reshape(
        (weights / total).cumsum(D - 1),
        [rows, categories, 1].into(),
    );
    let below = shares.lower(reshape(uniform, [rows, 1, samples].into()));
    // Rounding may leave the total of the shares a little below 1.
    let category = below.int().sum_dim(1).clamp(0, categories as i64 - 1);
    reshape(category, shape)
}
