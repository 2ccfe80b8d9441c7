//! Connectionist temporal classification.

use burn::tensor::{Int, module};

use super::{EinsumRule, apply};
use crate::dtensor::DTensor;

/// Rule that shards the batch: each sequence is independent.
const CTC_LOSS: EinsumRule = EinsumRule::new("ctc_loss", "TnC, nS, n, n -> n");

/// Returns the loss of each sequence of a batch, as burn's [`ctc_loss`](module::ctc_loss).
///
/// Shapes: log-probabilities `[time, batch, classes]`, targets `[batch, targets]`, lengths of both
/// `[batch]`, result `[batch]`.
///
/// # Collective
/// If the rule has to redistribute: every rank of the mesh, in forward and in backward.
///
/// # Panics
/// Unwinds with a typed [`Error`](crate::Error) if the shapes do not fit.
#[must_use]
#[track_caller]
pub fn ctc_loss(
    log_probs: DTensor<3>,
    targets: DTensor<2, Int>,
    input_lengths: DTensor<1, Int>,
    target_lengths: DTensor<1, Int>,
    blank: usize,
) -> DTensor<1> {
    let inputs = (log_probs, targets, input_lengths, target_lengths);
    apply(
        &CTC_LOSS,
        inputs,
        |(log_probs, targets, input_lengths, target_lengths), _| {
            module::ctc_loss(log_probs, targets, input_lengths, target_lengths, blank)
        },
    )
}
