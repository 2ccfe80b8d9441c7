//! Torch's operators, written with DTensors.
//!
//! A row's closure takes the golden inputs as they are typed, and returns the outputs. Operators
//! that burn does not have are composed, as a user of burn would compose them.

mod activations;
mod compare;
mod indexing;
mod layers;
mod losses;
mod norms;
mod order;
mod pointwise;
mod products;
mod reductions;
mod refused;
mod slices;
mod views;

use burn::tensor::Int;
use burn_dtensor::dtensor::DTensor;

use super::call::Row;

type F1 = DTensor<1>;
type F2 = DTensor<2>;
type F3 = DTensor<3>;
type F4 = DTensor<4>;
type I1 = DTensor<1, Int>;
type I2 = DTensor<2, Int>;

/// All rows.
pub fn rows() -> Vec<Row> {
    let families = [
        activations::rows(),
        compare::rows(),
        indexing::rows(),
        layers::rows(),
        losses::rows(),
        norms::rows(),
        order::rows(),
        pointwise::rows(),
        products::rows(),
        reductions::rows(),
        refused::rows(),
        slices::rows(),
        views::rows(),
    ];
    families.into_iter().flatten().collect()
}
