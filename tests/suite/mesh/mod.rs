//! Meshes from outside: what they are made of, and what goes over them.

mod collectives;
mod current;
mod deadlines;
mod groups;
mod part;

use std::time::Duration;

use burn::tensor::{Tensor, TensorData};
use burn_dtensor::comm::{Launch, World, launch};
use burn_dtensor::{Error, Result};

use crate::launched;

/// Runs `program` on so many ranks.
fn on<T: Send>(ranks: usize, program: impl Fn(&World) -> Result<T> + Sync) -> Vec<T> {
    let launched = launch(
        Launch::threads(ranks).with_deadline(Duration::from_secs(60)),
        program,
    );
    launched
        .map(launched::values)
        .unwrap_or_else(|error| panic!("{error}"))
}

fn error_of<T>(result: Result<T>) -> Error {
    result.err().expect("must be refused")
}

fn tensor<const D: usize>(shape: [usize; D], values: Vec<f32>, world: &World) -> Tensor<D> {
    Tensor::from_data(TensorData::new(values, shape), world.device())
}

fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.into_data().iter::<f32>().collect()
}
