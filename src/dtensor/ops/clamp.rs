//! Clamping.
//!
//! It is increasing, and yet no extremum goes through: all terms beyond a bound become the bound, and
//! one that is the bound itself, where the slope is 1, would share the gradient that is the greatest's.

use burn::tensor::{ElementConversion, kind};

use super::pointwise::{NOTHING, Pointwise, map};
use crate::dtensor::{DTensor, Kind};

impl<const D: usize, K: Kind + kind::Ordered> DTensor<D, K> {
    /// Elements between `min` and `max`, as burn's [`clamp`](burn::tensor::Tensor::clamp).
    #[must_use]
    pub fn clamp<E: ElementConversion>(self, min: E, max: E) -> Self {
        map(const { Pointwise::new("clamp", NOTHING) }, self, |x| x.clamp(min, max))
    }

    /// Elements of at least `min`, as burn's [`clamp_min`](burn::tensor::Tensor::clamp_min).
    #[must_use]
    pub fn clamp_min<E: ElementConversion>(self, min: E) -> Self {
        map(const { Pointwise::new("clamp_min", NOTHING) }, self, |x| x.clamp_min(min))
    }

    /// Elements of at most `max`, as burn's [`clamp_max`](burn::tensor::Tensor::clamp_max).
    #[must_use]
    pub fn clamp_max<E: ElementConversion>(self, max: E) -> Self {
        map(const { Pointwise::new("clamp_max", NOTHING) }, self, |x| x.clamp_max(max))
    }
}
