//! [`ClassTargets`]: the class indices of a rank's samples, with their scores and weights.

use burn::tensor::{Bool, Int, Tensor};

use super::super::lookup::{moved, outside};
use crate::dtensor::local::zeros;

/// Class indices of this rank's samples, flattened, in a type that
/// [holds](super::super::lookup::holding) every class.
pub(super) struct ClassTargets {
    pub(super) indices: Tensor<1, Int>,
    /// Number of classes over all ranks.
    pub(super) classes: usize,
    /// A weight for each class.
    pub(super) weights: Option<Tensor<1>>,
    pub(super) ignored: Option<i64>,
}

impl ClassTargets {
    /// Returns the score of each target, `[samples, 1]`, from scores whose first class is `start`.
    /// It is 0 if another rank holds the class. The result is in the graph even if this rank holds
    /// no classes, because backward needs every rank.
    pub(super) fn picked(&self, scores: Tensor<2>, start: usize) -> Tensor<2> {
        let [samples, classes] = scores.dims();
        if classes == 0 {
            return scores.sum_dim(1);
        }
        let elsewhere = outside(&self.indices, &(start..start + classes));
        let indices = moved(self.indices.clone(), &elsewhere, start, 0);
        scores
            .gather(1, indices.reshape([samples, 1]))
            .mask_fill(elsewhere.reshape([samples, 1]), 0)
    }

    /// Returns the weight of each target's class, if classes have weights.
    pub(super) fn weights(&self) -> Option<Tensor<1>> {
        let indices = self.indices.clone().clamp(0, self.classes as i64 - 1);
        self.weights
            .clone()
            .map(|weights| weights.select(0, indices))
    }

    /// Returns `x` times the sum of the weights of all classes.
    pub(super) fn times_all_weights(&self, x: Tensor<1>) -> Tensor<1> {
        match &self.weights {
            Some(weights) => x * weights.clone().sum(),
            None => x.mul_scalar(self.classes as f64),
        }
    }

    /// Returns true if every sample has weight 1.
    pub(super) fn have_equal_weights(&self) -> bool {
        self.weights.is_none() && self.ignored.is_none()
    }

    /// Returns the sum of the weights of this rank's samples, in the type of `losses`, which has an
    /// element per sample.
    pub(super) fn weight(&self, losses: &Tensor<1>) -> Tensor<1> {
        if losses.dims() == [0] {
            return zeros([1].into(), losses);
        }
        let weights = self.weights().unwrap_or_else(|| losses.ones_like());
        self.without_ignored(weights).sum()
    }

    /// Returns `x`, which has an element per sample, with 0 for ignored samples.
    pub(super) fn without_ignored(&self, x: Tensor<1>) -> Tensor<1> {
        // No index of an unsigned type is negative.
        let ignored = self
            .ignored
            .filter(|&ignored| ignored >= 0 || !self.indices.dtype().is_uint());
        match ignored {
            Some(ignored) => x.mask_fill(self.indices.clone().equal_scalar(ignored), 0),
            None => x,
        }
    }

    /// Returns true for samples whose target is not a class.
    pub(super) fn invalid(&self) -> Tensor<1, Bool> {
        outside(&self.indices, &(0..self.classes))
    }
}
