//! [`cuda_devices`]: the GPUs of this process.

use burn::tensor::Device;
use cudarc::driver::{result, sys};

use super::StartError;

/// Returns the devices of all GPUs that CUDA reports to this process, in its order.
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
/// [`StartError::NoGpu`] if there is none, or CUDA cannot be used. To use a device that CUDA does
/// not report panics.
pub fn cuda_devices() -> Result<Vec<Device>, StartError> {
    let no_gpu = |problem: String| StartError::NoGpu { problem };
    // SAFETY: the library that is looked for is the driver.
    if !unsafe { sys::is_culib_present() } {
        return Err(no_gpu(
            "NVIDIA's driver library, `libcuda.so.1` or `nvcuda.dll`, could not be loaded".into(),
        ));
    }
    let count = result::init().and_then(|()| result::device::get_count());
    match count {
        Ok(0) => Err(no_gpu("CUDA reports none (CUDA_VISIBLE_DEVICES)".into())),
        Ok(count) => Ok((0..count as usize).map(Device::cuda).collect()),
        Err(problem) => Err(no_gpu(format!("CUDA cannot be used: {problem}"))),
    }
}
