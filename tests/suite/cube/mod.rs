//! On burn's Cube backend: the GPU of tests, of which every rank is a stream.

mod devices;
mod lists;
mod offload;
mod optim;
mod order;
mod precision;
mod tensor_parallel;
mod units;
mod untracked;
mod weights;

use std::time::Duration;

use burn::tensor::Device;
use burn_dtensor::Error;
use burn_dtensor::comm::{Launch, World, launch};

use crate::launched;

/// Returns how far results of the GPU may be from those of the CPU, where `single` is a bound for
/// sums in single precision. burn's matrix products on CUDA round their operands to TF32, which has
/// 10 bits of fraction.
fn rounding<F: From<f32> + PartialOrd>(single: F) -> F {
    let tf32 = F::from(5e-3);
    if cfg!(feature = "cuda") && tf32 > single {
        tf32
    } else {
        single
    }
}

/// Returns the word by which messages name the GPU's backend.
fn backend() -> &'static str {
    if cfg!(feature = "cuda") {
        "Cuda"
    } else {
        "Wgpu"
    }
}

fn run<T: Send>(
    ranks: usize,
    device: &Device,
    program: impl Fn(&World) -> Result<T, Error> + Sync,
) -> Vec<T> {
    let config = Launch::threads(ranks)
        .with_deadline(Duration::from_secs(120))
        .with_device(device.clone());
    launch(config, program)
        .map(launched::values)
        .unwrap_or_else(|error| panic!("{error}"))
}
