//! `CosineSimilarity` and `PairwiseDistance` of two tensors `[batch, features]`.

use burn::nn::{CosineSimilarity, PairwiseDistance};

use super::DTensorForward;
use crate::dtensor::DTensor;
use crate::dtensor::ops::linalg::{l2_norm, lp_norm};

impl DTensorForward<(DTensor<2>, DTensor<2>)> for CosineSimilarity {
    type Output = DTensor<1>;

    fn forward_dtensor(&self, (a, b): (DTensor<2>, DTensor<2>)) -> DTensor<1> {
        // Normalize each input separately, because the product of two small norms may be zero.
        let unit = |x: DTensor<2>| x.clone() / l2_norm(x, self.dim).clamp_min(self.eps);
        (unit(a) * unit(b)).sum_dim(self.dim).squeeze_dim(self.dim)
    }
}

impl DTensorForward<(DTensor<2>, DTensor<2>)> for PairwiseDistance {
    type Output = DTensor<1>;

    fn forward_dtensor(&self, (a, b): (DTensor<2>, DTensor<2>)) -> DTensor<1> {
        lp_norm((a - b).add_scalar(self.eps), self.p, 1).squeeze_dim(1)
    }
}
