//! Norms of vectors.

use burn::tensor::Tensor;
use burn_dtensor::dtensor::{DTensor, ops::linalg};
use burn_dtensor::testing::prove::{Case, case};

pub fn cases() -> Vec<Case> {
    vec![
        case!("l0_norm", (x: 2 = [3, 5]) => x.clamp_min(0.0).lp(0.0, &[1])),
        case!("l1_norm", (x: 2 = [3, 5]) => x.lp(1.0, &[1])),
        case!("l2_norm", (x: 2 = [3, 5]) => x.lp(2.0, &[0])),
        case!("max_abs_norm", (x: 2 = [3, 5]) => x.lp(f64::INFINITY, &[1])),
        case!("min_abs_norm", (x: 2 = [3, 5]) => x.lp(f64::NEG_INFINITY, &[1])),
        case!("lp_norm", (x: 2 = [3, 5]) => x.lp(3.0, &[1])),
        case!("l0_norm_dims", (x: 3 = [3, 2, 3]) => x.clamp_min(0.0).lp(0.0, &[0, 2])),
        case!("l1_norm_dims", (x: 3 = [3, 2, 3]) => x.lp(1.0, &[0, 2])),
        case!("l2_norm_dims", (x: 3 = [3, 2, 3]) => x.lp(2.0, &[0, 1])),
        case!("max_abs_norm_dims", (x: 3 = [3, 2, 3]) => x.lp(f64::INFINITY, &[0, 2])),
        case!("min_abs_norm_dims", (x: 3 = [3, 2, 3]) => x.lp(f64::NEG_INFINITY, &[0, 2])),
        case!("lp_norm_dims", (x: 3 = [3, 2, 3]) => x.lp(1.5, &[0, 2])),
    ]
}

/// Burn's own are behind a feature.
pub trait Norm {
    fn lp(self, p: f64, dims: &[usize]) -> Self;
}

impl<const D: usize> Norm for DTensor<D> {
    fn lp(self, p: f64, dims: &[usize]) -> Self {
        match (p, dims) {
            (0.0, &[dim]) => linalg::l0_norm(self, dim),
            (1.0, &[dim]) => linalg::l1_norm(self, dim),
            (2.0, &[dim]) => linalg::l2_norm(self, dim),
            (f64::INFINITY, &[dim]) => linalg::max_abs_norm(self, dim),
            (f64::NEG_INFINITY, &[dim]) => linalg::min_abs_norm(self, dim),
            (_, &[dim]) => linalg::lp_norm(self, p, dim),
            (0.0, _) => linalg::l0_norm_dims(self, dims),
            (1.0, _) => linalg::l1_norm_dims(self, dims),
            (2.0, _) => linalg::l2_norm_dims(self, dims),
            (f64::INFINITY, _) => linalg::max_abs_norm_dims(self, dims),
            (f64::NEG_INFINITY, _) => linalg::min_abs_norm_dims(self, dims),
            _ => linalg::lp_norm_dims(self, p, dims),
        }
    }
}

impl<const D: usize> Norm for Tensor<D> {
    fn lp(self, p: f64, dims: &[usize]) -> Self {
        match p {
            0.0 => self.clone().not_equal_scalar(0.0).float().cast(self.dtype()).sum_dims(dims),
            f64::INFINITY => self.abs().max_dims(dims),
            f64::NEG_INFINITY => self.abs().min_dims(dims),
            _ => self.abs().powf_scalar(p).sum_dims(dims).powf_scalar(1.0 / p),
        }
    }
}
