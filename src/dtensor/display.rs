//! One-line descriptions of DTensors and their specs. Formatting never communicates.

use std::fmt;

use super::{DTensor, DTensorSpec, Kind};

/// Formats the spec as `[8, 16] f32 on DeviceMesh(dp=2, tp=2): [S(0), R]`.
impl fmt::Display for DTensorSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let dims: &[usize] = self.shape();
        write!(
            f,
            "{dims:?} {} on {}: {}",
            self.dtype().name(),
            self.mesh(),
            self.layout()
        )
    }
}

/// Formats the tensor as `DTensor[8, 16] f32 on DeviceMesh(dp=2, tp=2): [S(0), R], local [4, 16]`.
///
/// Values are not shown; [`local`](DTensor::local) returns them.
impl<const D: usize, K: Kind> fmt::Display for DTensor<D, K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DTensor{}, local {:?}", self.spec, self.local.dims())
    }
}

/// Formats the tensor as [`Display`](fmt::Display) does.
impl<const D: usize, K: Kind> fmt::Debug for DTensor<D, K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
