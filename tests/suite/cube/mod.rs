//! On burn's Cube backend: wgpu, on whatever Vulkan driver there is, of which every rank is a stream.

mod devices;
mod lists;
mod offload;
mod precision;
mod tensor_parallel;
mod units;
mod untracked;
mod weights;

use std::time::Duration;

use burn::tensor::{Device, DeviceKind};
use burn_dtensor::Error;
use burn_dtensor::comm::{Launch, World, launch};

use crate::launched;

/// The device of all tests.
fn wgpu() -> Device {
    Device::wgpu(DeviceKind::DefaultDevice)
}

fn run<T: Send>(ranks: usize, device: &Device, program: impl Fn(&World) -> Result<T, Error> + Sync) -> Vec<T> {
    let config = Launch::threads(ranks).with_deadline(Duration::from_secs(120)).with_device(device.clone());
    launch(config, program).map(launched::values).unwrap_or_else(|error| panic!("{error}"))
}
