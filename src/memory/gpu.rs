use burn::tensor::Device;

/// Returns the GPU that tests use: the first NVIDIA GPU if the feature `cuda` is enabled, otherwise
/// burn's default wgpu device.
#[cfg(feature = "cuda")]
pub fn gpu() -> Device {
    Device::cuda(0)
}

/// Returns the GPU that tests use: the first NVIDIA GPU if the feature `cuda` is enabled, otherwise
/// burn's default wgpu device.
#[cfg(not(feature = "cuda"))]
pub fn gpu() -> Device {
    Device::wgpu(burn::tensor::DeviceKind::DefaultDevice)
}
