//! `--device`: the devices of the ranks.

use std::str::FromStr;

use burn::tensor::Device;
#[cfg(feature = "wgpu")]
use burn::tensor::DeviceKind;
#[cfg(feature = "nccl")]
use burn_dtensor::comm::NcclReductions;
use burn_dtensor::prelude::*;
use clap::ValueEnum;

/// The devices of the ranks of a process, which take turns.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RankDevice {
    Flex,
    Wgpu,
    /// GPUs of CUDA, by number.
    Cuda(Vec<usize>),
}

impl RankDevice {
    /// Returns the devices. Fails if CUDA does not report them.
    pub fn devices(&self) -> Result<Vec<Device>> {
        match self {
            Self::Flex => Ok(vec![Device::flex()]),
            #[cfg(feature = "wgpu")]
            Self::Wgpu => Ok(vec![Device::wgpu(DeviceKind::DefaultDevice)]),
            #[cfg(feature = "cuda")]
            Self::Cuda(numbers) => gpus(numbers),
            #[allow(unreachable_patterns, reason = "built with every backend")]
            other => unreachable!("{other:?} was refused on the command line"),
        }
    }

    /// Gives the ranks of this process their devices. They exchange tensors by NCCL if that is
    /// requested, or if there are several GPUs and the program is built with it.
    pub fn launch(&self, launch: Launch, nccl: Option<Nccl>) -> Result<Launch> {
        let devices = self.devices()?;
        let ranks = launch.local_ranks();
        #[cfg(feature = "nccl")]
        let launch = match nccl.or((devices.len() > 1).then_some(Nccl::Native)) {
            Some(Nccl::Native) => launch.with_nccl(NcclReductions::Native)?,
            Some(Nccl::Tree) => launch.with_nccl(NcclReductions::FixedTree)?,
            Some(Nccl::Off) | None => launch,
        };
        #[cfg(not(feature = "nccl"))]
        if matches!(nccl, Some(Nccl::Native | Nccl::Tree)) {
            return Err(Error::other(
                "this program was built without NCCL. Build it with --features nccl",
            ));
        }
        Ok(launch.with_devices(devices.into_iter().cycle().take(ranks)))
    }
}

/// `--nccl`: how ranks on GPUs exchange tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Nccl {
    /// By NCCL, which also reduces them
    Native,
    /// By NCCL, and reduce them in the same order as on the CPU
    Tree,
    /// Without NCCL
    Off,
}

#[cfg(feature = "cuda")]
fn gpus(numbers: &[usize]) -> Result<Vec<Device>> {
    let known = burn_dtensor::comm::cuda_devices()?;
    let device = |number: &usize| {
        known.get(*number).cloned().ok_or_else(|| {
            Error::other(format!(
                "there is no GPU {number}: CUDA reports {}, numbered from 0",
                known.len()
            ))
        })
    };
    numbers.iter().map(device).collect()
}

impl FromStr for RankDevice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, numbers) = text.split_once(':').unwrap_or((text, "0"));
        let (device, built) = match name {
            "flex" if name == text => (Self::Flex, true),
            "wgpu" if name == text => (Self::Wgpu, cfg!(feature = "wgpu")),
            "cuda" => {
                let numbers = numbers.split(',').map(str::parse);
                let numbers = numbers.collect::<Result<_, _>>();
                let numbers =
                    numbers.map_err(|_| "expected numbers of GPUs, such as cuda:0,1".to_owned())?;
                (Self::Cuda(numbers), cfg!(feature = "cuda"))
            }
            _ => return Err("expected flex, wgpu, cuda, or cuda:0,1 and so on".into()),
        };
        match built {
            true => Ok(device),
            false => Err(format!(
                "this program was built without {name}. Build it with --features {name}"
            )),
        }
    }
}
