//! Clamping: increasing, so it goes through `P(max)` and `P(min)`.

use burn::tensor::{ElementConversion, kind};

use super::pointwise::{INCREASING, Pointwise, map};
use crate::dtensor::{DTensor, Kind};

impl<const D: usize, K: Kind + kind::Ordered> DTensor<D, K> {
    /// Elements between `min` and `max`, as burn's [`clamp`](burn::tensor::Tensor::clamp).
    #[must_use]
    pub fn clamp<E: ElementConversion>(self, min: E, max: E) -> Self {
        map(const { Pointwise::new("clamp", INCREASING) }, self, |x| x.clamp(min, max))
    }

    /// Elements of at least `min`, as burn's [`clamp_min`](burn::tensor::Tensor::clamp_min).
    #[must_use]
    pub fn clamp_min<E: ElementConversion>(self, min: E) -> Self {
        map(const { Pointwise::new("clamp_min", INCREASING) }, self, |x| x.clamp_min(min))
    }

    /// Elements of at most `max`, as burn's [`clamp_max`](burn::tensor::Tensor::clamp_max).
    #[must_use]
    pub fn clamp_max<E: ElementConversion>(self, max: E) -> Self {
        map(const { Pointwise::new("clamp_max", INCREASING) }, self, |x| x.clamp_max(max))
    }
}
