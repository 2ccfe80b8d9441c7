//! The bottom layer of [`burn_compat`](super): what relies on the inner workings of burn and cubecl
//! below the autodiff graph and the memory of tensors. It imports nothing of this crate, so that all
//! modules may use it.

mod backward_number;
#[cfg(feature = "cube")]
mod cube_memory;
mod node_numbers;

pub(crate) use backward_number::backward_number;
#[cfg(feature = "cuda")]
pub(crate) use cube_memory::CudaServer;
#[cfg(feature = "wgpu")]
pub(crate) use cube_memory::WgpuServer;
#[cfg(feature = "cube")]
pub(crate) use cube_memory::{RenameFailure, rename};
pub(crate) use node_numbers::NodeRange;
