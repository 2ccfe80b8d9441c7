//! Memory of Cube tensors.
//!
//! A handle names its memory, and the device's thread knows where that is. So memory can be taken from under a name,
//! and other memory be put there: whoever uses the name meanwhile gets an error, and later what is there then.

use std::any::TypeId;
use std::collections::HashSet;
use std::sync::LazyLock;

use burn_cubecl::tensor::CubeTensor;
use cubecl::device_handle::DeviceHandle;
use cubecl::environment::stream::StreamId;
use cubecl::server::Handle;
use cubecl_server::memory_management::{ManagedMemoryHandle, ManagedMemoryId};
use parking_lot::RwLock;

/// The names whose memory comes and goes.
static LENT: LazyLock<RwLock<HashSet<ManagedMemoryId>>> = LazyLock::new(RwLock::default);

/// Whether the memory of `tensor` stays as it is for as long as a handle to it lives.
pub(crate) fn is_lasting(tensor: &CubeTensor) -> bool {
    !LENT.read().contains(&id(&tensor.handle))
}

/// Whether both start at one place of one allocation.
pub(super) fn is_same(a: &CubeTensor, b: &CubeTensor) -> bool {
    id(&a.handle) == id(&b.handle) && a.handle.offset_start.unwrap_or(0) == b.handle.offset_start.unwrap_or(0)
}

/// What names the memory of `handle`: views of one allocation share it.
pub(crate) fn id(handle: &Handle) -> ManagedMemoryId {
    handle.memory.clone().binding().id()
}

/// A name whose memory comes and goes, until this is dropped: from then on it is as it is.
#[derive(Debug)]
pub(crate) struct Lent {
    /// While the name has memory there are more than two handles with what the pool and any tensor hold, so that no
    /// operation computes in place.
    handle: Handle,
}

impl Lent {
    /// The memory that `tensor` is in; `None` on runtimes that do not let it be taken.
    pub(crate) fn new(tensor: &CubeTensor) -> Option<Self> {
        let handle = tensor.handle.clone();
        is_movable(&handle).then(|| {
            LENT.write().insert(id(&handle));
            Self { handle }
        })
    }

    pub(crate) fn id(&self) -> ManagedMemoryId {
        id(&self.handle)
    }

    /// Takes the memory away, after everything that was asked of the device so far.
    pub(crate) fn take(&self) {
        move_memory(self.handle.clone(), ManagedMemoryHandle::new());
    }

    /// Puts the memory that `tensor` is in, which nobody else uses, under the name.
    pub(crate) fn give(&self, tensor: CubeTensor) {
        let tensor = match tensor.handle.stream == self.handle.stream {
            true => tensor,
            false => on_stream(tensor, self.handle.stream),
        };
        move_memory(tensor.handle, self.handle.memory.clone());
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        LENT.write().remove(&self.id());
    }
}

/// A copy of the whole allocation that `tensor` is in, in memory of `stream`: each stream has pools of its own.
fn on_stream(tensor: CubeTensor, stream: StreamId) -> CubeTensor {
    let CubeTensor { mut client, handle, device, dtype, .. } = tensor;
    // SAFETY: the stream only decides where the copy is and in which order it is made; the device's thread makes
    // streams wait for what they read of others, whichever thread asks.
    unsafe { client.set_stream(stream) };
    let len = handle.size() as usize / dtype.size();
    let whole = Handle { offset_start: None, offset_end: None, ..handle };
    CubeTensor::new_contiguous(client, device, [len].into(), whole, dtype).copy()
}

#[cfg(feature = "wgpu")]
type WgpuServer = <cubecl::wgpu::WgpuRuntime as cubecl_server::runtime::Runtime>::Server;
#[cfg(feature = "cuda")]
type CudaServer = <cubecl::cuda::CudaRuntime as cubecl_server::runtime::Runtime>::Server;

fn is_movable(handle: &Handle) -> bool {
    let runs_on = |server| handle.service.service == server;
    #[cfg(feature = "wgpu")]
    if runs_on(TypeId::of::<WgpuServer>()) {
        return true;
    }
    #[cfg(feature = "cuda")]
    if runs_on(TypeId::of::<CudaServer>()) {
        return true;
    }
    false
}

/// Renames the memory of `from` to `to`, on the device's own thread. What had the name `from` has none any more.
fn move_memory(from: Handle, to: ManagedMemoryHandle) {
    let (device, server) = (from.service.device, from.service.service);
    #[cfg(feature = "wgpu")]
    if server == TypeId::of::<WgpuServer>() {
        DeviceHandle::<WgpuServer>::new(device).submit(move |server| {
            let (stream, failures) = cubecl_server::stream::WriteScoped::write_streams(server).stream_and_failures(&from.stream);
            rename(&mut stream.memory, from.memory, to, failures);
        });
        return;
    }
    #[cfg(feature = "cuda")]
    if server == TypeId::of::<CudaServer>() {
        DeviceHandle::<CudaServer>::new(device).submit(move |server| {
            use cubecl_server::stream::FailureStore;
            let (pool, failures) = cubecl_server::stream::WriteScoped::write_streams(server).split();
            if let Some(stream) = pool.try_get_mut(&from.stream) {
                rename(&mut stream.memory_management_gpu, from.memory, to, failures.graph_mut());
            }
        });
        return;
    }
    unreachable!("memory is lent on runtimes that know how to move it");
}

/// Renames an allocation. One that another stream still reads keeps its name, and its memory.
fn rename<S: cubecl_server::storage::ComputeStorage>(
    memory: &mut cubecl_server::memory_management::MemoryManagement<S>,
    from: ManagedMemoryHandle,
    to: ManagedMemoryHandle,
    failures: &mut cubecl_server::memory_management::ErrorGraph,
) {
    if from.is_bound() {
        return;
    }
    let cursor = memory.get_cursor(from.clone().binding()).unwrap_or(0);
    if let Err(error) = memory.bind(from, to, cursor, failures) {
        log::error!("a unit's memory cannot be taken back: {error}");
    }
}
