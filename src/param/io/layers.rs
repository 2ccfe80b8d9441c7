//! What burn's layers take and return, where its fields are public.

use burn::nn::attention::MhaOutput;
use burn::nn::{LstmState, RnnState};

crate::tensor_tree! {
    struct MhaOutput { weights, context }
    [const D: usize] struct LstmState<D> { cell, hidden }
    [const D: usize] struct RnnState<D> { hidden }
}
