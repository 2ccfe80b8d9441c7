//! `--device`: the device of the ranks.

use std::str::FromStr;

use burn::tensor::Device;
#[cfg(feature = "wgpu")]
use burn::tensor::DeviceKind;

/// The device of all ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RankDevice {
    Flex,
    Wgpu,
    Cuda,
}

impl RankDevice {
    pub fn device(self) -> Device {
        match self {
            Self::Flex => Device::flex(),
            #[cfg(feature = "wgpu")]
            Self::Wgpu => Device::wgpu(DeviceKind::DefaultDevice),
            #[cfg(feature = "cuda")]
            Self::Cuda => Device::cuda(0),
            #[allow(unreachable_patterns, reason = "built with every backend")]
            other => unreachable!("{other:?} was refused on the command line"),
        }
    }
}

impl FromStr for RankDevice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (device, built) = match text {
            "flex" => (Self::Flex, true),
            "wgpu" => (Self::Wgpu, cfg!(feature = "wgpu")),
            "cuda" => (Self::Cuda, cfg!(feature = "cuda")),
            _ => return Err("expected flex, wgpu or cuda".into()),
        };
        match built {
            true => Ok(device),
            false => Err(format!(
                "this program was built without {text}. Build it with --features {text}"
            )),
        }
    }
}
