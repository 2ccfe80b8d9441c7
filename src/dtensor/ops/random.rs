//! Random numbers that do not depend on the mesh, and the seeds they are drawn with.
//!
//! Element `i` (row-major, in the global tensor) of what a seed draws is a function of the seed
//! and `i` alone. So replicas agree, shards differ, and a tensor has the same bits on every mesh
//! and under every placement.
//!
//! Operators that take no seed draw one from the calling rank's stream, which [`seed`] starts.
//! A program that is the same on all ranks draws the same seeds on all of them, without a word
//! between ranks. It starts at seed 0.
//!
//! Ranks along a data-parallel dimension that each make DTensors of their own, of their own part
//! of the batch, are different programs in this sense: give each its own stream, and all ranks
//! that share a DTensor the same one.
//!
//! ```
//! use burn_dtensor::dtensor::ops::random;
//! # let (step, dp_rank) = (3, 1);
//! // At the start of a step, so that a resumed run draws what an uninterrupted one does.
//! random::seed(random::fold_in(random::fold_in(42, step), dp_rank));
//! ```

use std::cell::Cell;

use burn::tensor::{Distribution, Shape, Tensor, TensorData};

use crate::dtensor::factory::check_distribution;
use crate::dtensor::philox::philox4x32;
use crate::dtensor::random::{fill, float};
use crate::dtensor::{DTensor, DTensorSpec};

thread_local! {
    /// The stream's seed, and how many seeds were drawn from it.
    static STREAM: Cell<(u64, u64)> = const { Cell::new((0, 0)) };
}

/// Numbers of one seed for different ends, by the last word of the counter. Elements have 0.
#[derive(Debug, Clone, Copy)]
enum Purpose {
    Draw = 1,
    Fold = 2,
}

/// Starts the calling rank's stream of seeds anew.
///
/// Every rank that holds a part of one DTensor must do so with the same seed.
pub fn seed(seed: u64) {
    STREAM.set((seed, 0));
}

/// The next seed of the calling rank's stream, for an operator or a factory that takes one.
pub fn next_seed() -> u64 {
    let (seed, drawn) = STREAM.get();
    STREAM.set((seed, drawn + 1));
    derived(seed, drawn, Purpose::Draw)
}

/// A seed made of another and a number: a step, a layer, a data-parallel rank.
pub fn fold_in(seed: u64, number: u64) -> u64 {
    derived(seed, number, Purpose::Fold)
}

fn derived(seed: u64, number: u64, purpose: Purpose) -> u64 {
    let halves = |number: u64| [number as u32, (number >> 32) as u32];
    let ([low, high], key) = (halves(number), halves(seed));
    let [low, high, ..] = philox4x32([low, high, 0, purpose as u32], key);
    u64::from(low) | u64::from(high) << 32
}

/// This rank's part of the `distribution` that `seed` draws, in the layout and type of `spec`.
pub(super) fn part<const D: usize>(
    distribution: Distribution,
    seed: u64,
    spec: &DTensorSpec,
    like: &Tensor<D>,
    scale: f32,
) -> Tensor<D> {
    let slices = spec.layout().local_slices(spec.shape(), spec.coordinate());
    let values = fill(seed, spec.shape(), &slices, |words, lane| scale * float(distribution, words, lane));
    let shape = Shape::from(slices.iter().map(|slice| slice.len()).collect::<Vec<_>>());
    Tensor::from_data(TensorData::new(values, shape), (&like.device(), spec.dtype()))
}

impl<const D: usize> DTensor<D> {
    /// Random values in the shape, type and layout of this tensor, as burn's
    /// [`random_like`](Tensor::random_like): drawn with the next seed of the rank's
    /// [stream](self). `R` where this tensor is a pending reduction.
    ///
    /// # Panics
    /// Unwinds with [`DTensorError::Distribution`](crate::dtensor::DTensorError::Distribution).
    #[must_use]
    pub fn random_like(&self, distribution: Distribution) -> Self {
        check_distribution(distribution).unwrap_or_else(|error| crate::Error::from(error).unwind());
        let spec = self.reduced_spec();
        Self::from_parts(part(distribution, next_seed(), &spec, &self.local, 1.0), spec)
    }
}
