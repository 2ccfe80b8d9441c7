//! Collectives of a group of ranks.

mod collectives;
mod flight;
mod groups;
mod ledger;
mod memory;
mod numbers;
mod only;
mod waits;
mod works;

use std::time::Duration;

use burn::backend::DispatchTensor;
use burn::tensor::{Tensor, TensorData};
use burn_dtensor::Error;
use burn_dtensor::comm::{Launch, World, launch};

fn run(ranks: usize, program: impl Fn(&World) -> Result<(), Error> + Sync) {
    launch(
        Launch::threads(ranks).with_deadline(Duration::from_secs(60)),
        program,
    )
    .unwrap_or_else(|error| panic!("{error}"));
}

/// What a one-dimensional tensor of floats holds.
fn into_data(tensor: DispatchTensor) -> TensorData {
    Tensor::<1>::from_dispatch(tensor).into_data()
}
