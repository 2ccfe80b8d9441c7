//! Assertions on the full value of a distributed tensor.

use burn::tensor::{Tensor, TensorData, Tolerance};

use crate::dtensor::{DTensor, Kind};
use crate::error::OrUnwind;

/// Asserts that the full value of the tensor is close to `expected`. Every rank gathers and checks
/// it.
///
/// Ranks with replicas each check their own, so a replica that has drifted fails too. The check
/// records no gradients.
///
/// # Collective
/// Every rank of the mesh must call it, because it gathers the tensor.
///
/// # Panics
/// If the shapes differ, or an element is further from its expected value than `tolerance`.
#[track_caller]
pub fn assert_full_close<const D: usize>(
    actual: &DTensor<D>,
    expected: impl Into<TensorData>,
    tolerance: Tolerance<f64>,
) {
    full(actual.clone().detach()).assert_approx_eq(&expected.into(), tolerance);
}

/// Asserts that the full value of the tensor equals `expected` exactly. Every rank gathers and
/// checks it.
///
/// # Collective
/// Every rank of the mesh must call it, because it gathers the tensor.
///
/// # Panics
/// If the shapes or any elements differ.
#[track_caller]
pub fn assert_full_eq<const D: usize, K: Kind>(
    actual: &DTensor<D, K>,
    expected: impl Into<TensorData>,
) {
    full(actual.clone()).assert_eq(&expected.into(), false);
}

fn full<const D: usize, K: Kind>(tensor: DTensor<D, K>) -> TensorData {
    let full: Tensor<D, K> = tensor.full_tensor().or_unwind();
    full.into_data()
}
