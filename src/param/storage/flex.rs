//! Evictable storage for Flex tensors.
//!
//! # What it relies on
//! A Flex tensor reads its bytes through the controller of its allocation at every access, and no
//! operation keeps a pointer to them when it has returned; views and what burn's graph saves share
//! the controller. burn promises neither. The tests below read views after an eviction;
//! `tests/memory` measures that what the graph saves is freed.
//!
//! # The issue to file
//! *Hooks on saved tensors.* A function that is called when an operation saves a tensor for backward,
//! and another when backward reads it, would replace this storage.

use std::mem::MaybeUninit;
use std::sync::Arc;

use burn::backend::flex::{FlexTensor, Layout};
use burn::backend::{
    BackendTensor, DispatchAutodiffContext, DispatchTensor, DispatchTensorKind, TensorMetadata,
};
use burn::tensor::{Bytes, DType, Shape};
use burn_std::{AccessError, AccessPolicy, AllocationController, AllocationProperty};

use super::evictable::{Refill, Storage};
use super::slot::{self, StorageMemory, StorageReadError};
use crate::memory::flex as memory;

/// Evictable storage of one gathered weight.
pub(super) type FlexStorage = slot::EvictableStorage<Arc<Bytes>, WeightMeta>;

/// Size, shape and element type of a gathered weight.
pub(super) struct WeightMeta {
    len: usize,
    shape: Shape,
    dtype: DType,
}

/// The bytes may be shared by several ranks.
impl StorageMemory for Arc<Bytes> {
    fn copy(&self) -> Self {
        Self::new(Bytes::clone(self))
    }
}

impl std::fmt::Debug for FlexStorage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EvictableStorage")
            .field("len", &self.layout.len)
            .field("full", &self.is_full())
            .finish()
    }
}

impl Storage for FlexStorage {
    fn release(&self) {
        slot::EvictableStorage::evict(self);
    }

    fn fill(&self, full: DispatchTensor) {
        self.restore(bytes(full));
    }

    #[cfg(feature = "testing")]
    fn is_full(&self) -> bool {
        slot::EvictableStorage::is_full(self)
    }
}

impl FlexStorage {
    /// Moves a Flex tensor into separate evictable storage.
    pub(super) fn place(tensor: DispatchTensor, source: Arc<dyn Refill>) -> Arc<Self> {
        let shape = tensor.shape();
        let dtype = tensor.dtype();
        let bytes = bytes(tensor);
        let full = WeightMeta {
            len: bytes.len(),
            shape,
            dtype,
        };
        Self::new(bytes, full, source)
    }

    /// Creates a tensor that reads this storage.
    pub(super) fn view(self: &Arc<Self>) -> DispatchTensor {
        let WeightMeta { len, shape, dtype } = &self.layout;
        let view = FlexView(slot::StorageView::new(self.clone()));
        // SAFETY: a view's memory has `len` bytes, all initialized: it is a weight's, or a copy.
        let bytes = unsafe { Bytes::from_controller(Box::new(view), *len) };
        let tensor = FlexTensor::new(bytes, Layout::contiguous(shape.clone()), *dtype);
        DispatchTensor {
            kind: DispatchTensorKind::Flex(BackendTensor::Float(tensor)),
            autodiff: DispatchAutodiffContext::Disabled,
        }
    }
}

/// Returns the bytes of a gathered Flex tensor, without a copy if the tensor covers its allocation.
fn bytes(tensor: DispatchTensor) -> Arc<Bytes> {
    match tensor.kind {
        DispatchTensorKind::Flex(BackendTensor::Float(tensor)) if memory::is_alone(&tensor) => {
            tensor.data_arc()
        }
        DispatchTensorKind::Flex(BackendTensor::Float(tensor)) => {
            Arc::new(tensor.into_data().into_bytes())
        }
        other => unreachable!("evictable storage holds Flex floats, not {other:?}"),
    }
}

/// Allocation behind a tensor whose bytes are in evictable storage.
struct FlexView(slot::StorageView<Arc<Bytes>, WeightMeta>);

impl From<StorageReadError> for AccessError {
    fn from(unread: StorageReadError) -> Self {
        match unread {
            StorageReadError::WouldCopy => Self::WouldCopy,
            StorageReadError::NotRestored => Self::Read(GONE.into()),
        }
    }
}

const GONE: &str = "a sharded parameter was read after its unit's forward or all-gather had failed. \
                    See the first error of the launch.";

impl AllocationController for FlexView {
    fn alloc_align(&self) -> usize {
        self.0.slot.layout.dtype.size()
    }

    fn property(&self) -> AllocationProperty {
        AllocationProperty::Other
    }

    fn capacity(&self) -> usize {
        self.0.slot.layout.len
    }

    fn memory(&self, policy: AccessPolicy) -> Result<&[MaybeUninit<u8>], AccessError> {
        let place = self.0.read(policy.copy_allowed())?;
        let bytes: &[u8] = &place;
        // SAFETY: `u8` is a valid `MaybeUninit<u8>`. The bytes stay valid as long as the view, with
        // one exception. Forward's memory is read only on the storage's thread, and only until
        // `evict`. `evict` frees it on this thread only, between operations, while no handle to
        // this view is the only one. See `slot::StorageRef`.
        Ok(unsafe { std::slice::from_raw_parts(bytes.as_ptr().cast(), bytes.len()) })
    }

    unsafe fn memory_mut(
        &mut self,
        policy: AccessPolicy,
    ) -> Result<&mut [MaybeUninit<u8>], AccessError> {
        let own = Arc::get_mut(self.0.write(policy.copy_allowed())?)
            .expect("the view's private copy is not shared");
        // SAFETY: the caller only writes initialized bytes, as this function's contract says.
        Ok(unsafe { std::slice::from_raw_parts_mut(own.as_mut_ptr().cast(), own.len()) })
    }
}

const _: fn() = || {
    // `Bytes` requires both of its controller.
    fn shared<T: Send + Sync>() {}
    shared::<FlexView>();
};

#[cfg(test)]
mod tests {
    use std::sync::Weak;
    use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
    use std::thread;

    use burn::tensor::{Device, Tensor};
    use parking_lot::Mutex;

    use super::*;

    /// Restores one storage, and counts the calls.
    #[derive(Default)]
    struct Source {
        slot: Mutex<Weak<FlexStorage>>,
        refills: AtomicUsize,
    }

    impl Refill for Source {
        fn refill(&self) {
            self.refills.fetch_add(1, SeqCst);
            if let Some(slot) = self.slot.lock().upgrade() {
                slot.restore(bytes(values()));
            }
        }
    }

    fn values() -> DispatchTensor {
        Tensor::<2>::from_data([[1.0, 2.0], [3.0, 4.0]], &Device::flex()).into_dispatch()
    }

    fn slot() -> (Arc<Source>, Arc<FlexStorage>) {
        let source = Arc::new(Source::default());
        let slot = FlexStorage::place(values(), source.clone());
        *source.slot.lock() = Arc::downgrade(&slot);
        (source, slot)
    }

    fn read(tensor: Tensor<2>) -> Vec<f32> {
        tensor.into_data().try_to_vec().unwrap()
    }

    #[test]
    fn views_read_a_slot_that_was_emptied_and_filled() {
        let (source, slot) = slot();
        let turned = Tensor::<2>::from_dispatch(slot.view()).transpose();
        slot.evict();
        assert!(slot.forward.read().is_none());
        assert_eq!(read(turned.clone() * 2.0), [2.0, 6.0, 4.0, 8.0]);
        assert_eq!(source.refills.load(SeqCst), 1, "the reader restored it");
        assert_eq!(
            (read(turned), source.refills.load(SeqCst)),
            (vec![1.0, 3.0, 2.0, 4.0], 1)
        );
    }

    #[test]
    fn what_was_gathered_again_stays_as_long_as_a_view() {
        let (_, slot) = slot();
        let view = Tensor::<2>::from_dispatch(slot.view());
        slot.evict();
        slot.restore(bytes(values()));
        slot.evict();
        let weak = Arc::downgrade(&slot);
        drop(slot);
        let data = view.into_data();
        assert_eq!(data.as_slice::<f32>().unwrap(), [1.0, 2.0, 3.0, 4.0]);
        drop(data);
        assert!(weak.upgrade().is_none());
    }

    #[test]
    fn another_thread_gets_a_copy_of_what_may_be_taken_back() {
        let (source, slot) = slot();
        let view = slot.view();
        let copy = thread::spawn({
            let view = view.clone();
            move || Tensor::<2>::from_dispatch(view) * 1.0
        });
        let copy = copy.join().unwrap();
        slot.evict();
        assert_eq!(
            (read(copy), source.refills.load(SeqCst)),
            (vec![1.0, 2.0, 3.0, 4.0], 0)
        );
        // Another thread cannot evict it.
        let (_, slot) = self::slot();
        thread::scope(|scope| scope.spawn(|| slot.evict()).join().unwrap());
        assert!(slot.forward.read().is_some());
    }

    #[test]
    fn writing_to_a_view_leaves_the_slot_alone() {
        let (_, slot) = slot();
        // The view is the only handle, so burn adds in place.
        assert_eq!(
            read(Tensor::<2>::from_dispatch(slot.view()) + 1.0),
            [2.0, 3.0, 4.0, 5.0]
        );
        assert_eq!(
            read(Tensor::<2>::from_dispatch(slot.view())),
            [1.0, 2.0, 3.0, 4.0]
        );
    }

    #[test]
    #[should_panic(expected = "unit's forward or all-gather had failed")]
    fn a_view_that_cannot_be_refilled_says_so() {
        let (source, slot) = slot();
        *source.slot.lock() = Weak::new();
        let view = Tensor::<2>::from_dispatch(slot.view());
        slot.evict();
        let _ = view + 1.0;
    }
}
