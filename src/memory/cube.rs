//! Memory of Cube tensors.
//!
//! A handle identifies its memory by an id, and the device's server thread maps the id to an
//! address. So memory can be removed behind a handle and other memory bound in its place. An
//! operation that uses the handle in between gets an error, and one that uses it later sees the new
//! memory.

use std::any::{Any, TypeId};
use std::collections::HashSet;
use std::sync::LazyLock;

use burn::backend::tensor::FloatTensor;
use burn::backend::{
    BackendTensor, Cube, DispatchAutodiffContext, DispatchTensor, DispatchTensorKind,
    TensorMetadata,
};
use burn::tensor::Device;
use burn_cubecl::tensor::CubeTensor;
use cubecl::server::Handle;
use cubecl_server::memory_management::{ManagedMemoryHandle, ManagedMemoryId};
use parking_lot::RwLock;

use crate::Error;
#[cfg(feature = "cuda")]
use crate::burn_compat::internals::CudaServer;
#[cfg(feature = "wgpu")]
use crate::burn_compat::internals::WgpuServer;
use crate::burn_compat::internals::{RenameFailure, rename};

/// Ids of allocations whose memory can be evicted.
static LENT: LazyLock<RwLock<HashSet<ManagedMemoryId>>> = LazyLock::new(RwLock::default);

/// Returns true if the memory of `tensor` stays valid as long as a handle to it lives.
pub(crate) fn is_persistent(tensor: &CubeTensor) -> bool {
    !LENT.read().contains(&id(&tensor.handle))
}

/// Returns true if both start at the same offset of one allocation.
pub(super) fn is_same(a: &CubeTensor, b: &CubeTensor) -> bool {
    id(&a.handle) == id(&b.handle)
        && a.handle.offset_start.unwrap_or(0) == b.handle.offset_start.unwrap_or(0)
}

/// Returns the Cube primitive of a plain float tensor. Returns `None` for other backends, and for
/// all tensors if burn's fusion is enabled.
pub(crate) fn primitive(tensor: &DispatchTensor) -> Option<&CubeTensor> {
    match &tensor.kind {
        DispatchTensorKind::Cube(BackendTensor::Float(primitive)) => {
            (primitive as &dyn Any).downcast_ref()
        }
        _ => None,
    }
}

/// Returns the float tensor of a primitive.
pub(crate) fn wrap(tensor: CubeTensor) -> DispatchTensor {
    let mut tensor = Some(tensor);
    let float = (&mut tensor as &mut dyn Any).downcast_mut::<Option<FloatTensor<Cube>>>();
    let float = float
        .and_then(Option::take)
        .expect("`primitive` returned such tensors");
    DispatchTensor {
        kind: DispatchTensorKind::Cube(BackendTensor::Float(float)),
        autodiff: DispatchAutodiffContext::Disabled,
    }
}

/// Makes the device run what the calling thread has submitted before what other threads submit from
/// now on. Without it, a thread may write to memory in place although a read of another thread,
/// which has dropped its handle, is still to run.
pub(crate) fn run_before_others(tensor: &DispatchTensor) {
    // A failure is that of the submitted work, whose results have it.
    #[cfg(feature = "wgpu")]
    if let Some(tensor) = primitive(tensor)
        && tensor.handle.service.service == TypeId::of::<WgpuServer>()
    {
        // All threads submit to one queue.
        return drop(tensor.client.flush());
    }
    drop(Device::new(tensor.device()).sync());
}

/// Returns the tensor in persistent memory, and copies it if needed.
pub(crate) fn ensure_persistent(tensor: DispatchTensor) -> DispatchTensor {
    match primitive(&tensor) {
        Some(cube) if !is_persistent(cube) => wrap(cube.copy()),
        _ => tensor,
    }
}

/// Returns the id of the allocation of `handle`. Views of one allocation share it.
pub(crate) fn id(handle: &Handle) -> ManagedMemoryId {
    handle.memory.clone().binding().id()
}

/// Position of a tensor in its allocation: the bytes before it, the size of the allocation, and the
/// bytes after it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct AllocationOffset([u64; 3]);

impl AllocationOffset {
    pub(crate) fn of(tensor: &CubeTensor) -> Self {
        let handle = &tensor.handle;
        Self([
            handle.offset_start.unwrap_or(0),
            handle.size(),
            handle.offset_end.unwrap_or(0),
        ])
    }
}

/// An allocation whose memory can be removed and restored. After this is dropped, the memory stays
/// as it is.
#[derive(Debug)]
pub(crate) struct EvictableAllocation {
    /// While the allocation has memory, this handle, the pool's and that of any tensor make more
    /// than two, so no operation computes in place.
    handle: Handle,
    failure: RenameFailure,
}

impl EvictableAllocation {
    /// Makes the allocation of `tensor` evictable. Returns `None` on a runtime that does not
    /// support it.
    pub(crate) fn new(tensor: &CubeTensor) -> Option<Self> {
        let handle = tensor.handle.clone();
        is_movable(&handle).then(|| {
            LENT.write().insert(id(&handle));
            let failure = RenameFailure::default();
            Self { handle, failure }
        })
    }

    pub(crate) fn id(&self) -> ManagedMemoryId {
        id(&self.handle)
    }

    /// Removes the memory, after all work that the calling thread has submitted to the device so
    /// far.
    ///
    /// # Panics
    /// If the device could not move the memory before.
    pub(crate) fn take(&self) {
        self.check();
        self.rename(self.handle.clone(), ManagedMemoryHandle::new());
    }

    /// Restores the allocation with the memory of `tensor`, which no other handle uses.
    ///
    /// # Panics
    /// If the device could not move the memory before. If it cannot now, an operation that reads
    /// the allocation is an error of the device.
    pub(crate) fn give(&self, tensor: CubeTensor) {
        self.check();
        let tensor = match tensor.handle.stream == self.handle.stream {
            true => tensor,
            false => in_memory_of(tensor, &self.handle),
        };
        self.rename(tensor.handle, self.handle.memory.clone());
    }

    fn rename(&self, from: Handle, to: ManagedMemoryHandle) {
        rename(from, to, self.failure.clone());
    }

    /// Unwinds if the device could not move the memory. It tries after the call that asks for it,
    /// so the rank learns of it at its next call.
    fn check(&self) {
        if let Some(reason) = self.failure.get() {
            Error::other(reason).unwind();
        }
    }
}

impl Drop for EvictableAllocation {
    fn drop(&mut self) {
        LENT.write().remove(&self.id());
    }
}

/// Copies the full allocation of `tensor` to memory of the stream of `other`. Each stream has its
/// own pools.
fn in_memory_of(tensor: CubeTensor, other: &Handle) -> CubeTensor {
    let CubeTensor {
        mut client,
        handle: mut full,
        device,
        dtype,
        ..
    } = tensor;
    // SAFETY: the stream only decides in which pool the copy is, and in which order it runs. The
    // server thread makes streams wait for data of other streams that they read, whichever thread
    // calls.
    unsafe { client.set_stream(other.stream) };
    (full.offset_start, full.offset_end) = (None, None);
    let len = full.size() as usize / dtype.size();
    CubeTensor::new_contiguous(client, device, [len].into(), full, dtype).copy()
}

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

#[cfg(test)]
#[cfg(feature = "wgpu")]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use burn::tensor::Tensor;

    use super::*;
    use crate::memory::gpu::gpu;

    #[test]
    fn memory_that_could_not_be_moved_fails_the_rank_at_its_next_call() {
        let device = gpu();
        let tensor = Tensor::<1>::ones([3], &device).into_dispatch();
        let allocation = EvictableAllocation::new(primitive(&tensor).expect("a Cube tensor"))
            .expect("wgpu evicts memory");
        allocation.take();
        allocation.take();
        // Waits for the device's server thread.
        let _ = Tensor::<1>::ones([1], &device).into_data();
        let unwound = catch_unwind(AssertUnwindSafe(|| allocation.take()));
        assert!(unwound.is_err());
    }
}
