//! Memory of Cube tensors.
//!
//! A handle names its memory, and the device's thread knows where that is. So memory can be taken from under a name,
//! and other memory be put there: whoever uses the name meanwhile gets an error, and later what is there then.

use std::any::{Any, TypeId};
use std::collections::HashSet;
use std::sync::LazyLock;

use burn::backend::tensor::FloatTensor;
use burn::backend::{BackendTensor, Cube, DispatchAutodiffContext, DispatchTensor, DispatchTensorKind};
use burn_cubecl::tensor::CubeTensor;
use cubecl::device_handle::DeviceHandle;
use cubecl::server::Handle;
use cubecl_server::memory_management::{ErrorGraph, ManagedMemoryHandle, ManagedMemoryId, MemoryManagement};
use cubecl_server::runtime::Runtime;
use cubecl_server::storage::ComputeStorage;
use cubecl_server::stream::WriteScoped;
use parking_lot::RwLock;

/// The names whose memory comes and goes.
static LENT: LazyLock<RwLock<HashSet<ManagedMemoryId>>> = LazyLock::new(RwLock::default);

/// Whether the memory of `tensor` stays as it is for as long as a handle to it lives.
pub(crate) fn is_persistent(tensor: &CubeTensor) -> bool {
    !LENT.read().contains(&id(&tensor.handle))
}

/// Whether both start at one place of one allocation.
pub(super) fn is_same(a: &CubeTensor, b: &CubeTensor) -> bool {
    id(&a.handle) == id(&b.handle) && a.handle.offset_start.unwrap_or(0) == b.handle.offset_start.unwrap_or(0)
}

/// The Cube primitive of a plain float tensor, if it is one; with burn's fusion on, none is.
pub(crate) fn primitive(tensor: &DispatchTensor) -> Option<&CubeTensor> {
    match &tensor.kind {
        DispatchTensorKind::Cube(BackendTensor::Float(primitive)) => (primitive as &dyn Any).downcast_ref(),
        _ => None,
    }
}

/// The float tensor of a primitive.
pub(crate) fn wrap(tensor: CubeTensor) -> DispatchTensor {
    let mut tensor = Some(tensor);
    let float = (&mut tensor as &mut dyn Any).downcast_mut::<Option<FloatTensor<Cube>>>();
    let float = float.and_then(Option::take).expect("tensors came as primitives");
    DispatchTensor {
        kind: DispatchTensorKind::Cube(BackendTensor::Float(float)),
        autodiff: DispatchAutodiffContext::Disabled,
    }
}

/// The same tensor, in memory that lasts.
pub(crate) fn ensure_persistent(tensor: DispatchTensor) -> DispatchTensor {
    match primitive(&tensor) {
        Some(cube) if !is_persistent(cube) => wrap(cube.copy()),
        _ => tensor,
    }
}

/// What names the memory of `handle`: views of one allocation share it.
pub(crate) fn id(handle: &Handle) -> ManagedMemoryId {
    handle.memory.clone().binding().id()
}

/// Where in its allocation a tensor lies: the bytes before it, of the allocation, and behind it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct AllocationOffset([u64; 3]);

impl AllocationOffset {
    pub(crate) fn of(tensor: &CubeTensor) -> Self {
        let handle = &tensor.handle;
        Self([handle.offset_start.unwrap_or(0), handle.size(), handle.offset_end.unwrap_or(0)])
    }
}

/// A name whose memory comes and goes, until this is dropped: from then on it is as it is.
#[derive(Debug)]
pub(crate) struct EvictableAllocation {
    /// While the name has memory there are more than two handles with what the pool and any tensor hold, so that no
    /// operation computes in place.
    handle: Handle,
}

impl EvictableAllocation {
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

    /// Takes the memory away, after everything that the calling thread has asked of the device so far.
    pub(crate) fn take(&self) {
        rename(self.handle.clone(), ManagedMemoryHandle::new());
    }

    /// Puts the memory that `tensor` is in, which nobody else uses, under the name.
    pub(crate) fn give(&self, tensor: CubeTensor) {
        let tensor = match tensor.handle.stream == self.handle.stream {
            true => tensor,
            false => in_memory_of(tensor, &self.handle),
        };
        rename(tensor.handle, self.handle.memory.clone());
    }
}

impl Drop for EvictableAllocation {
    fn drop(&mut self) {
        LENT.write().remove(&self.id());
    }
}

/// A copy of the whole allocation that `tensor` is in, in memory of the stream of `other`: each has pools of its own.
fn in_memory_of(tensor: CubeTensor, other: &Handle) -> CubeTensor {
    let CubeTensor { mut client, handle: mut full, device, dtype, .. } = tensor;
    // SAFETY: the stream only decides where the copy is and in which order it is made; the device's thread makes
    // streams wait for what they read of others, whichever thread asks.
    unsafe { client.set_stream(other.stream) };
    (full.offset_start, full.offset_end) = (None, None);
    let len = full.size() as usize / dtype.size();
    CubeTensor::new_contiguous(client, device, [len].into(), full, dtype).copy()
}

#[cfg(feature = "wgpu")]
type WgpuServer = <cubecl::wgpu::WgpuRuntime as Runtime>::Server;
#[cfg(feature = "cuda")]
type CudaServer = <cubecl::cuda::CudaRuntime as Runtime>::Server;

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

/// Has the device's own thread give the memory named `from` the name `to`, in the order of what it is asked. Nothing
/// is named `from` any more.
///
/// What the pool then hands out again is written to by the stream that the memory is of, after what that stream has
/// read. Other streams read such memory where other threads of the program do. wgpu's have handed their work to the
/// queue first; CUDA's must have been waited for by those threads.
fn rename(from: Handle, to: ManagedMemoryHandle) {
    let (device, server) = (from.service.device, from.service.service);
    #[cfg(feature = "wgpu")]
    if server == TypeId::of::<WgpuServer>() {
        return DeviceHandle::<WgpuServer>::new(device).submit(move |server| {
            let streams = server.write_streams();
            if from.memory.is_bound() {
                streams.flush_all();
            }
            let (stream, failures) = streams.stream_and_failures(&from.stream);
            rename_in(&mut stream.memory, from.memory, to, failures);
        });
    }
    #[cfg(feature = "cuda")]
    if server == TypeId::of::<CudaServer>() {
        return DeviceHandle::<CudaServer>::new(device).submit(move |server| {
            match server.write_streams().resolve(from.stream, std::iter::empty()) {
                Ok(mut streams) => {
                    let (stream, failures) = streams.current_and_failures();
                    rename_in(&mut stream.memory_management_gpu, from.memory, to, failures);
                }
                Err(error) => log::error!("the memory of a gathered weight stays where it is: {error}"),
            }
        });
    }
    unreachable!("only what is movable is lent");
}

fn rename_in<S: ComputeStorage>(
    memory: &mut MemoryManagement<S>,
    from: ManagedMemoryHandle,
    to: ManagedMemoryHandle,
    failures: &mut ErrorGraph,
) {
    let cursor = memory.get_cursor(from.clone().binding());
    if let Err(error) = cursor.and_then(|cursor| memory.bind(from, to, cursor, failures)) {
        log::error!("the memory of a gathered weight has no name: {error}");
    }
}
