//! Explicit padding of burn-nn's padding configurations for a given input size, which burn-nn
//! computes in private functions.

use burn::nn::{PaddingConfig1d, PaddingConfig2d, PaddingConfig3d};

/// Number of elements added before and after one dimension.
type Pair = (usize, usize);

/// Padding configuration for `N` spatial dimensions.
pub(super) trait Padding<const N: usize> {
    /// Returns the padding for spatial dimensions of these lengths.
    fn pairs(&self, lens: [usize; N], kernel: [usize; N], stride: [usize; N]) -> [Pair; N];
}

/// Returns the padding with which the output is `len / stride` long, rounded up. If the total is
/// odd, the extra element goes to the end.
fn same<const N: usize>(lens: [usize; N], kernel: [usize; N], stride: [usize; N]) -> [Pair; N] {
    std::array::from_fn(|at| {
        let needed = lens[at].div_ceil(stride[at]).saturating_sub(1) * stride[at] + kernel[at];
        let total = if lens[at] == 0 {
            0
        } else {
            needed.saturating_sub(lens[at])
        };
        (total / 2, total - total / 2)
    })
}

impl Padding<1> for PaddingConfig1d {
    fn pairs(&self, lens: [usize; 1], kernel: [usize; 1], stride: [usize; 1]) -> [Pair; 1] {
        match *self {
            Self::Valid => [(0, 0)],
            Self::Same => same(lens, kernel, stride),
            Self::Explicit(left, right) => [(left, right)],
        }
    }
}

impl Padding<2> for PaddingConfig2d {
    fn pairs(&self, lens: [usize; 2], kernel: [usize; 2], stride: [usize; 2]) -> [Pair; 2] {
        match *self {
            Self::Valid => [(0, 0); 2],
            Self::Same => same(lens, kernel, stride),
            Self::Explicit(top, left, bottom, right) => [(top, bottom), (left, right)],
        }
    }
}

impl Padding<3> for PaddingConfig3d {
    fn pairs(&self, lens: [usize; 3], kernel: [usize; 3], stride: [usize; 3]) -> [Pair; 3] {
        match *self {
            Self::Valid => [(0, 0); 3],
            Self::Same => same(lens, kernel, stride),
            Self::Explicit(depth, height, width) => [depth, height, width].map(|each| (each, each)),
        }
    }
}
