//! On burn's Cube backend: wgpu, on whatever Vulkan driver there is.

mod devices;
mod untracked;
mod weights;

use burn::tensor::{Device, DeviceKind};

/// The device of these tests.
fn device() -> Device {
    Device::wgpu(DeviceKind::DefaultDevice)
}
