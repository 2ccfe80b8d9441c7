//! Connectionist temporal classification: each sequence of a batch by itself.

use burn::tensor::{Int, module};

use super::{Axes, apply};
use crate::dtensor::DTensor;

const CTC_LOSS: Axes = Axes::new("ctc_loss", "_n_, n_, n, n -> n");

/// The loss of each sequence, as burn's [`ctc_loss`](module::ctc_loss).
///
/// # Shapes
/// - `log_probs`: `[time, batch, classes]`
/// - `targets`: `[batch, longest target]`
/// - `input_lengths`, `target_lengths` and output: `[batch]`
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
    apply(&CTC_LOSS, (log_probs, targets, input_lengths, target_lengths), |(log_probs, targets, inputs, lengths), _| {
        module::ctc_loss(log_probs, targets, inputs, lengths, blank)
    })
}
