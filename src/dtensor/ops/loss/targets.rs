//! [`ClassTargets`]: what a rank's class indices pick, and how they weigh.

use burn::tensor::{Bool, Int, Tensor};

use super::super::lookup::{moved, outside};
use crate::dtensor::local::zeros;

/// Class indices of this rank's samples, flat, in a type that
/// [holds](super::super::lookup::holding) every class.
pub(super) struct ClassTargets {
    pub(super) indices: Tensor<1, Int>,
    /// How many classes there are on all ranks.
    pub(super) classes: usize,
    /// Of every class.
    pub(super) weights: Option<Tensor<1>>,
    pub(super) ignored: Option<i64>,
}

impl ClassTargets {
    /// The score of each target, `[samples, 1]`, of scores that begin with class `start`: 0 where
    /// another rank has it. In the graph even if there are no classes: backward needs every rank.
    pub(super) fn picked(&self, scores: Tensor<2>, start: usize) -> Tensor<2> {
        let [samples, classes] = scores.dims();
        if classes == 0 {
            return scores.sum_dim(1);
        }
        let elsewhere = outside(&self.indices, &(start..start + classes));
        let indices = moved(self.indices.clone(), &elsewhere, start, 0);
        scores.gather(1, indices.reshape([samples, 1])).mask_fill(elsewhere.reshape([samples, 1]), 0)
    }

    /// The weight of each target's class, if classes have weights.
    pub(super) fn weights(&self) -> Option<Tensor<1>> {
        let indices = self.indices.clone().clamp(0, self.classes as i64 - 1);
        self.weights.clone().map(|weights| weights.select(0, indices))
    }

    /// `x` times the sum of the weights of all classes.
    pub(super) fn times_all_weights(&self, x: Tensor<1>) -> Tensor<1> {
        match &self.weights {
            Some(weights) => x * weights.clone().sum(),
            None => x.mul_scalar(self.classes as f64),
        }
    }

    /// Whether every sample weighs 1.
    pub(super) fn have_equal_weights(&self) -> bool {
        self.weights.is_none() && self.ignored.is_none()
    }

    /// The sum of this rank's weights, in the type of `losses`, of which there are as many.
    pub(super) fn weight(&self, losses: &Tensor<1>) -> Tensor<1> {
        if losses.dims() == [0] {
            return zeros([1].into(), losses);
        }
        let weights = self.weights().unwrap_or_else(|| losses.ones_like());
        self.without_ignored(weights).sum()
    }

    /// `x`, an element per sample, with 0 for those that are ignored.
    pub(super) fn without_ignored(&self, x: Tensor<1>) -> Tensor<1> {
        match self.ignored {
            Some(ignored) => x.mask_fill(self.indices.clone().equal_scalar(ignored), 0),
            None => x,
        }
    }

    /// Which samples have a target that is no class.
    pub(super) fn invalid(&self) -> Tensor<1, Bool> {
        outside(&self.indices, &(0..self.classes))
    }
}
