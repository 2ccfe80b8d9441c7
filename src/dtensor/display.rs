//! One line that says what a DTensor is. Never communicates.

use std::fmt;

use super::{DTensor, DTensorSpec, Kind};

/// `[8, 16] f32 on DeviceMesh(dp=2, tp=2): [S(0), R]`
impl fmt::Display for DTensorSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let dims: &[usize] = self.shape();
        write!(f, "{dims:?} {} on {}: {}", self.dtype().name(), self.mesh(), self.layout())
    }
}

/// `DTensor[8, 16] f32 on DeviceMesh(dp=2, tp=2): [S(0), R], local [4, 16]`
///
/// The values are those of [`local`](DTensor::local).
impl<const D: usize, K: Kind> fmt::Display for DTensor<D, K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DTensor{}, local {:?}", self.spec, self.local.dims())
    }
}

/// As [`Display`](fmt::Display).
impl<const D: usize, K: Kind> fmt::Debug for DTensor<D, K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
