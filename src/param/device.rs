//! [`check_devices`]: checks that a model and its inputs are on the device on which its ranks compute.

use std::fmt::Debug;

use burn::backend::{DispatchTensor, TensorMetadata};
use burn::tensor::Device;

use super::distributed::DistributedParameter;
use super::model_scan::ScannedParam;
use super::unit::Unit;
use super::{ModelScan, ParamError};
use crate::mesh::DeviceMesh;
use crate::{Error, autodiff, memory};

impl ModelScan {
    /// Checks that all parameters except those `ignored` are on the rank's device, and that gradients can be recorded
    /// there. A parameter that is `offloaded` already, or will be, may also be in host memory.
    ///
    /// # Errors
    /// [`ParamError::Backend`], [`ParamError::Device`].
    pub(crate) fn check_devices(
        &self,
        mesh: &DeviceMesh,
        ignored: impl Fn(&str) -> bool,
        offloaded: impl Fn(&ScannedParam) -> bool,
    ) -> Result<(), ParamError> {
        let is_in_place = |found: &&ScannedParam| {
            let is_offloaded = |param: &DistributedParameter| param.unit.offloaded().is_some();
            let may_be_on_host = found.distributed.as_ref().is_some_and(is_offloaded) || offloaded(found);
            may_be_on_host && memory::is_host(&found.device.clone().inner())
        };
        let params = self.params.iter().filter(|found| !is_in_place(found));
        let params = params.map(|found| (found.path(), found.device.clone().inner()));
        check_devices(mesh.device(), autodiff::is_supported, params.filter(|(path, _)| !ignored(path)))
    }
}

impl Unit {
    /// Checks that an input is on the device on which the unit computes.
    ///
    /// # Panics
    /// Unwinds with [`ParamError::InputDevice`].
    pub(super) fn check_input(&self, input: &DispatchTensor) {
        let Some(data) = &self.data else { return };
        let (device, own) = (Device::new(input.device()).inner(), data.shard.device());
        if device != *own {
            let (unit, device, own) = (self.label().to_string(), format!("{device:?}"), format!("{own:?}"));
            Error::from(ParamError::InputDevice { unit, device, own }).unwind();
        }
    }
}

/// Implements [`ModelScan::check_devices`] for any type of device.
fn check_devices<D: PartialEq + Debug>(
    own: &D,
    supported: impl Fn(&D) -> bool,
    params: impl IntoIterator<Item = (String, D)>,
) -> Result<(), ParamError> {
    let own_text = format!("{own:?}");
    if !supported(own) {
        return Err(ParamError::Backend { device: own_text });
    }
    match params.into_iter().find(|(_, device)| device != own) {
        Some((param, device)) => Err(ParamError::Device { param, device: format!("{device:?}"), own: own_text }),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checked(own: u8, params: [u8; 2]) -> Result<(), ParamError> {
        let params = ["first", "second"].map(String::from).into_iter().zip(params);
        check_devices(&own, |&device| device < 10, params)
    }

    #[test]
    fn parameters_are_on_the_ranks_device() {
        assert!(checked(3, [3, 3]).is_ok());
        let error = checked(3, [3, 4]).unwrap_err();
        let ParamError::Device { param, device, own } = &error else { panic!("{error}") };
        assert_eq!([param.as_str(), device, own], ["second", "4", "3"]);
        assert!(error.to_string().contains("world.device()"), "{error}");
    }

    #[test]
    fn a_backend_without_custom_operations_is_told() {
        let error = checked(12, [12, 12]).unwrap_err();
        assert!(matches!(&error, ParamError::Backend { device } if device == "12"), "{error}");
        assert!(["flex", "cuda", "wgpu"].iter().all(|feature| error.to_string().contains(feature)), "{error}");
    }

    #[cfg(feature = "flex")]
    #[test]
    fn flex_is_supported() {
        use burn::tensor::Device;
        assert!(autodiff::is_supported(&Device::flex()) && autodiff::is_supported(&Device::flex().autodiff()));
    }
}
