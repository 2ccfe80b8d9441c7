//! [`rename`]: gives memory of a cubecl device to another handle.
//!
//! # What it relies on
//! A handle identifies its memory by an id, and the device's server thread maps the id to an
//! address. The memory managers of its servers are public, and can bind memory to another id while
//! handles to both exist. An operation that uses a handle without memory gets an error.
//!
//! # The issue to file
//! *Evict the memory behind a handle.* Two calls of a client, one that removes the memory of a
//! handle and one that moves the memory of another handle there, would replace this file.

use std::any::TypeId;
use std::fmt::Display;
use std::sync::{Arc, OnceLock};

use cubecl::device_handle::DeviceHandle;
use cubecl::server::{Handle, ServerError};
use cubecl_server::memory_management::{ErrorGraph, ManagedMemoryHandle, MemoryManagement};
use cubecl_server::runtime::Runtime;
use cubecl_server::storage::ComputeStorage;
use cubecl_server::stream::WriteScoped;

#[cfg(feature = "wgpu")]
pub(crate) type WgpuServer = <cubecl::wgpu::WgpuRuntime as Runtime>::Server;
#[cfg(feature = "cuda")]
pub(crate) type CudaServer = <cubecl::cuda::CudaRuntime as Runtime>::Server;

/// Why the memory of a handle could not be given to another one. It is known once the device's
/// server thread has tried.
#[derive(Debug, Clone, Default)]
pub(crate) struct RenameFailure(Arc<OnceLock<String>>);

impl RenameFailure {
    pub(crate) fn get(&self) -> Option<&str> {
        self.0.get().map(String::as_str)
    }

    /// Records the failure. The first one is the cause of later ones.
    fn set(&self, error: &dyn Display) {
        let _ = self.0.set(reason(error));
    }
}

/// Binds the memory of handle `from` to `to`, on the device's server thread and in the order of
/// submitted work. `from` then has no memory.
///
/// Evicted memory returns to the pool. If the pool reuses it, writes run on the stream that owns
/// it, after what that stream has read. Other streams read such memory if other threads of the
/// program use it. On wgpu those streams have already submitted their work to the queue. On CUDA
/// the program must have waited for those threads.
pub(crate) fn rename(from: Handle, to: ManagedMemoryHandle, failure: RenameFailure) {
    let device = from.service.device;
    let server = from.service.service;
    #[cfg(feature = "wgpu")]
    if server == TypeId::of::<WgpuServer>() {
        return DeviceHandle::<WgpuServer>::new(device).submit(move |server| {
            let streams = server.write_streams();
            if from.memory.is_bound() {
                streams.flush_all();
            }
            let (stream, failures) = streams.stream_and_failures(&from.stream);
            rename_in(&mut stream.memory, from.memory, to, failures, &failure);
        });
    }
    #[cfg(feature = "cuda")]
    if server == TypeId::of::<CudaServer>() {
        return DeviceHandle::<CudaServer>::new(device).submit(move |server| {
            match server
                .write_streams()
                .resolve(from.stream, std::iter::empty())
            {
                Ok(mut streams) => {
                    let (stream, failures) = streams.current_and_failures();
                    rename_in(
                        &mut stream.memory_management_gpu,
                        from.memory,
                        to,
                        failures,
                        &failure,
                    );
                }
                // The device has no place for the failure, but a handle without memory is an error.
                Err(error) => failure.set(&error),
            }
        });
    }
    unreachable!("only allocations of supported runtimes are evictable");
}

fn rename_in<S: ComputeStorage>(
    memory: &mut MemoryManagement<S>,
    from: ManagedMemoryHandle,
    to: ManagedMemoryHandle,
    failures: &mut ErrorGraph,
    failure: &RenameFailure,
) {
    let cursor = memory.get_cursor(from.clone().binding());
    let bound = cursor.and_then(|cursor| memory.bind(from, to.clone(), cursor, failures));
    if let Err(error) = bound {
        failure.set(&error);
        // An operation that reads the handle reports the reason.
        failures.fail_unallocated(
            &to,
            ServerError::Generic {
                reason: reason(&error),
                backtrace: Default::default(),
            },
        );
    }
}

fn reason(error: &dyn Display) -> String {
    format!("cannot bind the memory of a gathered weight to another handle: {error}")
}

#[cfg(test)]
#[cfg(feature = "wgpu")]
mod tests {
    use burn::tensor::Tensor;

    use super::*;
    use crate::memory::cube::primitive;
    use crate::memory::gpu::gpu;

    fn handle(tensor: &Tensor<1>) -> Handle {
        let tensor = tensor.clone().into_dispatch();
        primitive(&tensor).expect("a Cube tensor").handle.clone()
    }

    #[test]
    fn a_handle_reads_the_memory_that_was_given_to_it() {
        let device = gpu();
        let a = Tensor::<1>::from_floats([1.0, 2.0, 3.0], &device);
        let b = Tensor::<1>::from_floats([4.0, 5.0, 6.0], &device);
        let failure = RenameFailure::default();
        rename(handle(&a), ManagedMemoryHandle::new(), failure.clone());
        rename(handle(&b), handle(&a).memory, failure.clone());
        assert_eq!(a.into_data().try_to_vec::<f32>().unwrap(), [4.0, 5.0, 6.0]);
        assert_eq!(failure.get(), None);
    }

    #[test]
    fn memory_that_is_not_there_cannot_be_given() {
        let device = gpu();
        let a = Tensor::<1>::from_floats([1.0, 2.0, 3.0], &device);
        let failure = RenameFailure::default();
        rename(handle(&a), ManagedMemoryHandle::new(), failure.clone());
        rename(handle(&a), ManagedMemoryHandle::new(), failure.clone());
        // Waits for the device's server thread.
        let _ = Tensor::<1>::ones([1], &device).into_data();
        let reason = failure.get().expect("the second call fails");
        assert!(reason.contains("cannot bind the memory"), "{reason}");
    }
}
