//! Slots of Flex tensors.

use std::mem::MaybeUninit;
use std::sync::{Arc, OnceLock, Weak};
use std::thread::{self, ThreadId};

use burn::backend::flex::{FlexTensor, Layout};
use burn::backend::{BackendTensor, DispatchAutodiffContext, DispatchTensor, DispatchTensorKind, TensorMetadata};
use burn::tensor::{Bytes, DType, Shape};
use burn_std::{AccessError, AccessPolicy, AllocationController, AllocationProperty};
use parking_lot::RwLock;

use super::Refill;
use crate::dtensor::own;

/// The memory of one gathered weight, there or not.
pub(in crate::fsdp) struct Slot {
    bytes: RwLock<Option<Bytes>>,
    len: usize,
    shape: Shape,
    dtype: DType,
    owner: Weak<dyn Refill>,
    /// The rank's thread: the only one on which the memory is taken back.
    thread: ThreadId,
}

impl std::fmt::Debug for Slot {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Slot").field("len", &self.len).field("full", &self.bytes.read().is_some()).finish()
    }
}

impl Slot {
    /// Moves `tensor` into a slot of its own; one without memory, or not of Flex, stays as it is.
    pub(in crate::fsdp) fn place(
        tensor: DispatchTensor,
        owner: Weak<dyn Refill>,
    ) -> (DispatchTensor, Option<Arc<Self>>) {
        let (shape, dtype) = (tensor.shape(), tensor.dtype());
        if shape.num_elements() == 0 || !matches!(tensor.kind, DispatchTensorKind::Flex(_)) {
            return (tensor, None);
        }
        let bytes = bytes(tensor);
        let slot = Arc::new(Self {
            len: bytes.len(),
            bytes: RwLock::new(Some(bytes)),
            shape,
            dtype,
            owner,
            thread: thread::current().id(),
        });
        (slot.view(), Some(slot))
    }

    /// Frees the memory.
    ///
    /// To be called between tensor operations of the rank, on its thread.
    pub(in crate::fsdp) fn release(&self) {
        self.bytes.write().take();
    }

    /// Gives the memory back, with the same values. A full slot stays as it is.
    pub(in crate::fsdp) fn fill(&self, tensor: DispatchTensor) {
        self.bytes.write().get_or_insert_with(|| bytes(tensor));
    }

    /// A tensor that lives in this slot.
    pub(in crate::fsdp) fn view(self: &Arc<Self>) -> DispatchTensor {
        let view = View { slot: self.clone(), own: OnceLock::new() };
        // SAFETY: a view's memory has `len` bytes, all initialized: see `View`.
        let bytes = unsafe { Bytes::from_controller(Box::new(view), self.len) };
        let tensor = FlexTensor::new(bytes, Layout::contiguous(self.shape.clone()), self.dtype);
        DispatchTensor {
            kind: DispatchTensorKind::Flex(BackendTensor::Float(tensor)),
            autodiff: DispatchAutodiffContext::Disabled,
        }
    }
}

/// The memory of a gathered Flex tensor, which has its buffer to itself: no copy.
fn bytes(tensor: DispatchTensor) -> Bytes {
    match tensor.kind {
        DispatchTensorKind::Flex(BackendTensor::Float(tensor)) => tensor.into_data().into_bytes(),
        other => unreachable!("a slot holds Flex floats, not {other:?}"),
    }
}

/// Bytes that are a slot's, until they are written to: then a copy of their own.
struct View {
    slot: Arc<Slot>,
    own: OnceLock<Bytes>,
}

impl View {
    /// Runs `f` on the slot's bytes, filled first if need be, while nobody can take them back.
    fn with_slot<T>(&self, f: impl FnOnce(&Bytes) -> T) -> Result<T, AccessError> {
        let empty = self.slot.bytes.read().is_none();
        if empty && let Some(owner) = self.slot.owner.upgrade() {
            owner.refill();
        }
        let guard = self.slot.bytes.read();
        guard.as_ref().map(f).ok_or_else(|| AccessError::Read(GONE.into()))
    }

    /// A copy of the slot's bytes, made once.
    fn own(&self) -> Result<&Bytes, AccessError> {
        if self.own.get().is_none() {
            let copy = self.with_slot(|bytes| Bytes::from_bytes_vec(bytes.to_vec()))?;
            let _ = self.own.set(copy);
        }
        Ok(self.own.get().expect("set above"))
    }

    fn slot_memory(&self) -> Result<&[MaybeUninit<u8>], AccessError> {
        let (ptr, len) = self.with_slot(|bytes| (bytes.as_ptr(), bytes.len()))?;
        // SAFETY: the pointer is to `len` initialized bytes, as `Bytes` promises. They stay where
        // they are until `release`, which the unit calls on the rank's thread, which is this one,
        // between tensor operations: Flex is eager and borrows a tensor's bytes for one operation
        // only. Other threads get a copy (`memory`), and other ranks too: a communicator copies a
        // tensor whose memory is not plain before it lends it out. `fill` never replaces bytes.
        Ok(unsafe { std::slice::from_raw_parts(ptr.cast(), len) })
    }
}

const GONE: &str = "a sharded parameter's value was read after its unit was resharded; read it inside \
    the unit's scope, or gather the model with `full_model`";

impl AllocationController for View {
    fn alloc_align(&self) -> usize {
        self.slot.dtype.size()
    }

    fn property(&self) -> AllocationProperty {
        AllocationProperty::Other
    }

    fn capacity(&self) -> usize {
        self.slot.len
    }

    fn memory(&self, _: AccessPolicy) -> Result<&[MaybeUninit<u8>], AccessError> {
        if self.own.get().is_none() && thread::current().id() == self.slot.thread {
            return self.slot_memory();
        }
        let own = self.own()?;
        // SAFETY: `u8` is a valid `MaybeUninit<u8>`.
        Ok(unsafe { std::slice::from_raw_parts(own.as_ptr().cast(), own.len()) })
    }

    unsafe fn memory_mut(&mut self, policy: AccessPolicy) -> Result<&mut [MaybeUninit<u8>], AccessError> {
        if self.own.get().is_none() && !policy.copy_allowed() {
            return Err(AccessError::WouldCopy);
        }
        self.own()?;
        let own = self.own.get_mut().expect("made above");
        // SAFETY: the caller only writes initialized bytes, as this function's contract says.
        Ok(unsafe { std::slice::from_raw_parts_mut(own.as_mut_ptr().cast(), own.len()) })
    }
}

/// A tensor that outlives its unit's scope: a copy, if its memory is a slot's.
pub(in crate::fsdp) fn leave(tensor: DispatchTensor) -> DispatchTensor {
    match &tensor.kind {
        DispatchTensorKind::Flex(BackendTensor::Float(flex))
            if flex.data_arc().property() == AllocationProperty::Other =>
        {
            own(tensor)
        }
        _ => tensor,
    }
}

/// Whether both tensors are one piece of memory. Other backends cannot tell: there it is assumed.
pub(in crate::fsdp) fn same_memory(a: &DispatchTensor, b: &DispatchTensor) -> bool {
    match (&a.kind, &b.kind) {
        (DispatchTensorKind::Flex(BackendTensor::Float(a)), DispatchTensorKind::Flex(BackendTensor::Float(b))) => {
            Arc::ptr_eq(&a.data_arc(), &b.data_arc())
        }
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

    use burn::tensor::{Device, Tensor};
    use parking_lot::Mutex;

    use super::*;

    /// Refills one slot, and counts.
    #[derive(Default)]
    struct Owner {
        slot: Mutex<Option<Arc<Slot>>>,
        refills: AtomicUsize,
    }

    impl Refill for Owner {
        fn refill(self: Arc<Self>) {
            self.refills.fetch_add(1, SeqCst);
            self.slot.lock().as_ref().unwrap().fill(values());
        }
    }

    fn values() -> DispatchTensor {
        Tensor::<2>::from_data([[1.0, 2.0], [3.0, 4.0]], &Device::flex()).into_dispatch()
    }

    fn slot(owner: &Arc<Owner>) -> Arc<Slot> {
        let weak: Weak<dyn Refill> = Arc::downgrade(&(owner.clone() as Arc<dyn Refill>));
        let slot = Slot::place(values(), weak).1.unwrap();
        *owner.slot.lock() = Some(slot.clone());
        slot
    }

    #[test]
    fn views_read_a_slot_that_was_emptied_and_filled() {
        let owner = Arc::new(Owner::default());
        let slot = slot(&owner);
        let turned = Tensor::<2>::from_dispatch(slot.view()).transpose();
        slot.release();
        assert!(slot.bytes.read().is_none());
        let doubled: Vec<f32> = (turned.clone() * 2.0).into_data().try_to_vec().unwrap();
        assert_eq!(doubled, [2.0, 6.0, 4.0, 8.0]);
        assert_eq!(owner.refills.load(SeqCst), 1, "the reader had it filled");
        let again: Vec<f32> = turned.into_data().try_to_vec().unwrap();
        assert_eq!((again, owner.refills.load(SeqCst)), (vec![1.0, 3.0, 2.0, 4.0], 1));
    }

    #[test]
    fn writing_to_a_view_leaves_the_slot_alone() {
        let owner = Arc::new(Owner::default());
        let slot = slot(&owner);
        // The only handle: burn adds in place.
        let sum: Vec<f32> = (Tensor::<2>::from_dispatch(slot.view()) + 1.0).into_data().try_to_vec().unwrap();
        assert_eq!(sum, [2.0, 3.0, 4.0, 5.0]);
        let kept: Vec<f32> = Tensor::<2>::from_dispatch(slot.view()).into_data().try_to_vec().unwrap();
        assert_eq!(kept, [1.0, 2.0, 3.0, 4.0]);
    }

    #[test]
    #[should_panic(expected = "read after its unit was resharded")]
    fn a_view_without_its_unit_says_so() {
        let owner = Arc::new(Owner::default());
        let slot = slot(&owner);
        let view = Tensor::<2>::from_dispatch(slot.view());
        slot.release();
        drop(owner);
        let _ = view + 1.0;
    }
}
