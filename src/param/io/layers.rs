//! Implements `TensorTree` for inputs and outputs of burn's layers that have public fields.

use burn::nn::attention::MhaOutput;
use burn::nn::{LstmState, RnnState};

crate::tensor_tree! {
    struct MhaOutput { weights, context }
    [const D: usize] struct LstmState<D> { cell, hidden }
    [const D: usize] struct RnnState<D> { hidden }
}
