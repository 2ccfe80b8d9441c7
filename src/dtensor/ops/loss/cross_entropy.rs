//! [`CrossEntropyLoss`] for scores sharded over classes, samples or both.

use std::sync::Arc;

use burn::tensor::{Device, Float, FloatDType, Int, Shape, Tensor};

use super::super::activation::log_softmax;
use super::super::args::operand_error;
use super::super::lookup::holding;
use super::super::placements::{MAX, R, SUM};
use super::super::{EinsumRule, Operator, empty};
use super::targets::ClassTargets;
use super::{CrossEntropyLossConfig, Reduction};
use crate::Result;
use crate::dtensor::local::{associate, reshape};
use crate::dtensor::{DTensor, DTensorSpec};
use crate::error::OrUnwind;
use crate::placement::{Layout, Placement, Placements};

/// The cross-entropy of scores `[.., classes]` and class indices `[..]`, as in PyTorch's
/// `cross_entropy` and burn-nn's `CrossEntropyLoss`. Created by [`CrossEntropyLossConfig`].
///
/// Scores may be sharded over classes, over any leading dimension and, on a mesh of several
/// dimensions, over both; see [this module](super). Leading dimensions need not be flattened.
///
/// Half precision scores are copied to single precision, and the loss is rounded to half precision.
///
/// A target that is neither a class nor ignored makes its loss NaN.
#[derive(Debug, Clone)]
pub struct CrossEntropyLoss {
    /// Detached from the graph.
    weights: Option<Tensor<1>>,
    smoothing: f64,
    ignore_index: Option<i64>,
    reduction: Reduction,
    log_probs: bool,
}

impl CrossEntropyLossConfig {
    /// Creates the loss, with its weights on `device`.
    ///
    /// # Panics
    /// If the smoothing is not in `0..=1`, or if a weight is negative.
    pub fn init(self, device: &Device) -> CrossEntropyLoss {
        assert!(
            (0.0..=1.0).contains(&self.smoothing),
            "label smoothing must be in 0..=1, not {}",
            self.smoothing
        );
        let weights = self.weights.map(|weights| {
            assert!(
                weights.iter().all(|&weight| weight >= 0.0),
                "class weights must not be negative: {weights:?}"
            );
            Tensor::<1>::from_floats(weights.as_slice(), device).inner()
        });
        CrossEntropyLoss {
            weights,
            smoothing: f64::from(self.smoothing),
            ignore_index: self.ignore_index,
            reduction: self.reduction,
            log_probs: self.log_probs,
        }
    }
}

/// Returns the mean [cross-entropy](CrossEntropyLoss) of logits `[.., classes]` and class indices
/// `[..]`.
///
/// # Collective
/// Every rank of the mesh: as for [`CrossEntropyLoss::forward`].
///
/// # Panics
/// Unwinds with a typed [`Error`](crate::Error) if the shapes do not fit or a collective fails.
#[must_use]
#[track_caller]
pub fn cross_entropy<const D: usize, const T: usize>(
    logits: DTensor<D>,
    targets: DTensor<T, Int>,
) -> DTensor<1> {
    let device = targets.local.device();
    CrossEntropyLossConfig::new()
        .init(&device)
        .forward(logits, targets)
}

/// Returns the mean over all rows of `-sum(target_probs * log_softmax(logits))`, as burn's
/// [`cross_entropy_with_logits`](burn::tensor::loss::cross_entropy_with_logits). Logits and
/// probabilities are `[.., classes]`, and the result is `[1]`.
///
/// Sharded classes are not gathered; see [`log_softmax`].
///
/// # Collective
/// If the classes are sharded, or the inputs are placed differently: every rank of the mesh, in
/// forward and in backward.
///
/// # Panics
/// Unwinds with a typed [`Error`](crate::Error) if the shapes do not fit.
#[must_use]
#[track_caller]
pub fn cross_entropy_with_logits<const D: usize>(
    logits: DTensor<D>,
    target_probs: DTensor<D>,
) -> DTensor<1> {
    log_softmax(logits, D - 1)
        .mul(target_probs)
        .sum_dim(D - 1)
        .mean()
        .neg()
}

/// Returns the mean negative log-likelihood of log-probabilities `[.., classes]` and class indices
/// `[..]`.
///
/// # Collective
/// Every rank of the mesh: as for [`CrossEntropyLoss::forward`].
///
/// # Panics
/// Unwinds with a typed [`Error`](crate::Error) if the shapes do not fit or a collective fails.
#[must_use]
#[track_caller]
pub fn nll_loss<const D: usize, const T: usize>(
    log_probs: DTensor<D>,
    targets: DTensor<T, Int>,
) -> DTensor<1> {
    let device = targets.local.device();
    CrossEntropyLossConfig::new()
        .with_log_probs(true)
        .init(&device)
        .forward(log_probs, targets)
}

impl CrossEntropyLoss {
    /// Returns the reduced loss: `P(sum)` over mesh dimensions that shard a leading dimension, and
    /// `R` over the others.
    ///
    /// # Collective
    /// Every rank of the mesh, in forward only. If logits are sharded over classes: an
    /// all-reduce(max) of one element per sample, and an all-reduce(sum) of two, or three with
    /// smoothing. Log-probabilities need only the latter, with one element less. If samples are
    /// sharded and have weights or an ignored index, a mean needs another all-reduce(sum) of one
    /// element.
    ///
    /// # Panics
    /// Unwinds with a typed [`Error`](crate::Error) if the shapes do not fit or a collective fails.
    #[must_use]
    #[track_caller]
    pub fn forward<const D: usize, const T: usize>(
        &self,
        scores: DTensor<D>,
        targets: DTensor<T, Int>,
    ) -> DTensor<1> {
        self.reduced(self.samples(scores, targets)).or_unwind()
    }

    /// Returns the loss of each sample, in the shape of the targets; 0 for ignored samples.
    ///
    /// # Collective
    /// Every rank of the mesh: as for [`forward`](Self::forward).
    ///
    /// # Panics
    /// As [`forward`](Self::forward).
    #[must_use]
    #[track_caller]
    pub fn forward_no_reduction<const D: usize, const T: usize>(
        &self,
        scores: DTensor<D>,
        targets: DTensor<T, Int>,
    ) -> DTensor<T> {
        let Samples { losses, spec, .. } = self.samples(scores, targets);
        DTensor::from_parts(reshape(losses.cast(spec.dtype()), spec.local_shape()), spec)
    }

    #[track_caller]
    fn samples<const D: usize, const T: usize>(
        &self,
        scores: DTensor<D>,
        targets: DTensor<T, Int>,
    ) -> Samples {
        let rule =
            TERMS.lens([1 + usize::from(!self.log_probs) + usize::from(self.smoothing > 0.0)]);
        let op = Operator::resolve(&rule, &[(&scores).into(), (&targets).into()]).or_unwind();
        let scores = op.input(0, scores);
        let targets = op.input(1, targets);
        let dtype = scores.dtype();
        // A sum over many classes overflows in half precision.
        let scores = if dtype.size() < 4 {
            scores.cast(FloatDType::F32)
        } else {
            scores
        };
        let strategy = scores.gradient_checkpointing_strategy();
        let rows = Shape::new([targets.shape().num_elements()]);
        let classes = op.input_spec(0).shape()[D - 1];
        let targets = ClassTargets {
            indices: associate(
                holding(reshape::<T, 1, Int>(targets, rows).inner(), classes),
                strategy,
            ),
            classes,
            weights: self
                .weights
                .as_ref()
                .map(|weights| associate(weights.clone().cast(scores.dtype()), strategy)),
            ignored: self.ignore_index,
        };
        if let Some(weights) = targets
            .weights
            .as_ref()
            .filter(|weights| weights.dims() != [targets.classes])
        {
            let why = format!(
                "the loss has weights for {} classes. Pass one for each class",
                weights.dims()[0]
            );
            operand_error(
                "cross_entropy",
                &[
                    op.input_spec(0).shape().clone(),
                    op.input_spec(1).shape().clone(),
                ],
                why,
            )
            .unwind()
        }
        let losses = self.losses(&op, scores, &targets).or_unwind();
        let shape = Shape::from(op.input_spec(1).shape().to_vec());
        let layout = with_sums(op.output_layout(0), R)
            .expect("sums are replaced by a placement without a reduction");
        let spec = DTensorSpec::decided(op.input_spec(0).mesh(), layout, shape, dtype).shared();
        Samples {
            losses,
            targets,
            spec,
        }
    }

    /// Returns this rank's losses, flattened.
    fn losses<const D: usize>(
        &self,
        op: &Operator,
        scores: Tensor<D>,
        targets: &ClassTargets,
    ) -> Result<Tensor<1>> {
        let rows = targets.indices.dims()[0];
        let own = op.input_range(0, D - 1);
        let scores: Tensor<2> = reshape(scores, Shape::new([rows, own.len()]));
        let scores = if self.log_probs {
            scores
        } else {
            scores.clone() - largest::<D>(op, scores)?
        };
        let terms = if rows == 0 {
            empty::spread(empty::nothing(scores), op.output_shape(0).clone())
        } else {
            let mut terms = vec![targets.picked(scores.clone(), own.start)];
            if !self.log_probs {
                terms.push(scores.clone().exp().sum_dim(1));
            }
            if self.smoothing > 0.0 {
                let weights = targets
                    .weights
                    .clone()
                    .map(|weights| reshape(weights.slice(own.clone()), Shape::new([1, own.len()])));
                terms.push(
                    match weights {
                        Some(weights) => scores * weights,
                        None => scores,
                    }
                    .sum_dim(1),
                );
            }
            reshape(Tensor::cat(terms, 1), op.output_shape(0).clone())
        };
        let terms: DTensor<D> = op.output(0, terms);
        let full = with_sums(terms.layout(), R)?;
        let terms = reshape(
            terms.redistribute_to(&full)?.local,
            Shape::new([rows, op.output_shape(0)[D - 1]]),
        );
        if rows == 0 {
            return Ok(empty::spread(
                empty::nothing::<2, _>(terms),
                Shape::new([0]),
            ));
        }
        Ok(self.combine(terms, targets))
    }

    /// Computes the losses from the reduced sums of complete rows.
    fn combine(&self, terms: Tensor<2>, targets: &ClassTargets) -> Tensor<1> {
        let term = |at: usize| terms.clone().narrow(1, at, 1).squeeze_dim::<1>(1);
        let log_sum = (!self.log_probs).then(|| term(1).log());
        let mut losses = match &log_sum {
            Some(log_sum) => log_sum.clone() - term(0),
            None => term(0).neg(),
        };
        if let Some(weights) = targets.weights() {
            losses = losses * weights;
        }
        if self.smoothing > 0.0 {
            let all = term(1 + usize::from(!self.log_probs));
            let all = match log_sum {
                Some(log_sum) => targets.times_all_weights(log_sum) - all,
                None => all.neg(),
            };
            losses =
                losses * (1.0 - self.smoothing) + all * (self.smoothing / targets.classes as f64);
        }
        targets.without_ignored(losses.mask_fill(targets.invalid(), f32::NAN))
    }

    fn reduced(&self, samples: Samples) -> Result<DTensor<1>> {
        let Samples {
            losses,
            targets,
            spec,
        } = samples;
        let summed: Placements = spec
            .placements()
            .iter()
            .map(|own| if own.is_replicate() { R } else { SUM })
            .collect();
        let total = |local: Tensor<1>| DTensor::from_local(local, spec.mesh(), &summed);
        let sum = losses.clone().sum();
        let loss = match self.reduction {
            Reduction::Sum => sum,
            Reduction::Mean if targets.have_equal_weights() => {
                sum.div_scalar(spec.shape().num_elements() as f64)
            }
            // The total weight is replicated and has no gradient.
            Reduction::Mean => sum / total(targets.weight(&losses))?.full_tensor()?,
        };
        total(loss.cast(spec.dtype()))
    }
}

/// Rule for the sums over a row of scores: the score of its target, the sum of its exponentials
/// (for logits), and the weighted sum of its scores (for smoothing).
const TERMS: EinsumRule = EinsumRule::new("cross_entropy", "..c, .. -> ..T");

/// Losses of this rank's samples, flattened, and the spec of all losses in the shape of the
/// targets.
struct Samples {
    losses: Tensor<1>,
    targets: ClassTargets,
    spec: Arc<DTensorSpec>,
}

/// Returns the largest score of each row over all ranks. It is outside the graph, because it only
/// keeps exponentials small.
fn largest<const D: usize>(op: &Operator, scores: Tensor<2>) -> Result<Tensor<2>> {
    let strategy = scores.gradient_checkpointing_strategy();
    let scores = scores.inner();
    let column = Shape::new([scores.dims()[0], 1]);
    let local = scores.max_dim(1);
    let mut shape = op.input_spec(0).shape().clone();
    shape[D - 1] = 1;
    let spec = DTensorSpec::decided(
        op.input_spec(0).mesh(),
        with_sums(op.output_layout(0), MAX)?,
        shape,
        local.dtype(),
    );
    let local = reshape::<2, D, Float>(local, spec.local_shape());
    let full = with_sums(op.output_layout(0), R)?;
    let largest = DTensor::from_parts(local, spec.shared()).redistribute_to(&full)?;
    Ok(associate(reshape(largest.local, column), strategy))
}

/// Returns `layout` with `placement` instead of sums over ranks.
fn with_sums(layout: &Layout, placement: Placement) -> Result<Layout> {
    Ok(layout.replaced(|_, own| if own == SUM { placement } else { own })?)
}
