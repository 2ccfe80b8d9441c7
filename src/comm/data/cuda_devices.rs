//! [`cuda_devices`]: the GPUs of this process.

use burn::tensor::Device;
#[cfg(feature = "cuda")]
use cudarc::driver::{result, sys};

use crate::comm::StartError;

/// Returns the devices of all GPUs that CUDA reports to this process, in its order. Local.
///
/// ```no_run
/// use burn_dtensor::comm::{Launch, cuda_devices, launch};
///
/// let devices = cuda_devices()?;
/// launch(Launch::threads(devices.len()).with_devices(devices), |world| {
///     println!("rank {} has {:?}", world.rank(), world.device());
///     Ok(())
/// })?;
/// # Ok::<_, burn_dtensor::Error>(())
/// ```
///
/// # Errors
/// [`StartError::NoGpu`] if there is none, CUDA cannot be used, or the feature `cuda` is off. To use
/// a device that CUDA does not report panics.
pub fn cuda_devices() -> Result<Vec<Device>, StartError> {
    reported().map_err(|problem| StartError::NoGpu { problem })
}

#[cfg(feature = "cuda")]
fn reported() -> Result<Vec<Device>, String> {
    // SAFETY: the library that is looked for is the driver.
    if !unsafe { sys::is_culib_present() } {
        return Err(
            "NVIDIA's driver library, `libcuda.so.1` or `nvcuda.dll`, could not be loaded".into(),
        );
    }
    match result::init().and_then(|()| result::device::get_count()) {
        Ok(0) => Err("CUDA reports none (CUDA_VISIBLE_DEVICES)".into()),
        Ok(count) => Ok((0..count as usize).map(Device::cuda).collect()),
        Err(problem) => Err(format!("CUDA cannot be used: {problem}")),
    }
}

#[cfg(not(feature = "cuda"))]
fn reported() -> Result<Vec<Device>, String> {
    Err("the program was built without the feature `cuda`".into())
}
