//! Dropout.
//!
//! The mask is drawn by global position: a rank draws the mask of its shard, and all ranks drop the
//! same elements of a partial input.

use burn::tensor::Distribution;

use super::partial_rules::LINEAR;
use super::{EinsumRule, apply, random};
use crate::Error;
use crate::dtensor::{DTensor, DTensorError};

/// Sets elements of `x` to zero with probability `prob`, and divides the others by `1 - prob`.
///
/// The mask is a function of `seed` and the global positions alone, so the result has the same bits
/// on every mesh. Draw a new seed for every call with [`next_seed`](random::next_seed).
///
/// # Panics
/// Unwinds with [`DTensorError::Distribution`] unless `prob` is in `0..1`.
#[must_use]
#[track_caller]
pub fn dropout<const D: usize>(x: DTensor<D>, prob: f64, seed: u64) -> DTensor<D> {
    check_probability(prob);
    if prob == 0.0 {
        return x;
    }
    let keep = 1.0 - prob;
    apply(
        &const { EinsumRule::pointwise("dropout", LINEAR) },
        x,
        |x, op| {
            let mask = random::part(
                Distribution::Bernoulli(keep),
                seed,
                op.input_spec(0),
                &x,
                (1.0 / keep) as f32,
            );
            x * mask
        },
    )
}

/// Unwinds with [`DTensorError::Distribution`] unless `prob` is in `0..1`, so that some elements
/// are kept.
#[track_caller]
pub(crate) fn check_probability(prob: f64) {
    if !(0.0..1.0).contains(&prob) {
        let why = "a dropout probability must be at least 0 and less than 1";
        Error::from(DTensorError::Distribution {
            distribution: format!("dropout of {prob}"),
            why,
        })
        .unwind()
    }
}
