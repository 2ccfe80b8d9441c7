//! [`EvictableStorage`]: memory that can be freed while views of it exist.
//!
//! Independent of burn, so that `tests/slot-model` can run it under many schedules. This file has
//! no unsafe code. [`StorageRef`] documents the obligations of callers of [`StorageView::read`].

use std::ops::Deref;
use std::sync::Arc;

use super::Refill;
use super::sync::{OnceLock, RwLock, RwLockReadGuard, ThreadId, thread};

/// Memory of a weight.
pub trait StorageMemory {
    /// Returns a copy of the bytes in other memory.
    fn copy(&self) -> Self;
}

/// Memory of one gathered weight, present or evicted. `L` describes its layout.
pub struct EvictableStorage<M, L> {
    /// Memory that forward gathered, until it is evicted.
    pub(super) forward: RwLock<Option<M>>,
    /// Memory that was gathered for backward. It is never evicted, and is freed with the last view.
    restored: OnceLock<M>,
    pub(super) layout: L,
    source: Arc<dyn Refill>,
    /// The thread that gathered for forward, and the only one that can evict that memory.
    thread: ThreadId,
}

impl<M, L> EvictableStorage<M, L> {
    /// Stores memory that forward gathered on the calling thread.
    pub fn new(memory: M, layout: L, source: Arc<dyn Refill>) -> Arc<Self> {
        let forward = RwLock::new(Some(memory));
        let restored = OnceLock::new();
        Arc::new(Self {
            forward,
            restored,
            layout,
            source,
            thread: thread::current().id(),
        })
    }

    /// Frees the memory that forward gathered, under every view. On any thread other than that of
    /// [`new`](Self::new), does nothing: the memory is then freed with the last view.
    ///
    /// The caller still holds a clone of each view that it returned: see [`StorageRef`].
    pub fn evict(&self) {
        if thread::current().id() == self.thread {
            self.forward.write().take();
        }
    }

    /// Restores the memory, with the same values. Does nothing if it was restored before.
    pub fn restore(&self, memory: M) {
        let _ = self.restored.set(memory);
    }

    pub(super) fn is_full(&self) -> bool {
        self.forward.read().is_some() || self.restored.get().is_some()
    }
}

/// A view of evictable storage. Writing to it first makes a private copy.
pub struct StorageView<M, L> {
    pub(super) slot: Arc<EvictableStorage<M, L>>,
    own: OnceLock<M>,
}

/// Borrowed memory of a view.
///
/// Rules for reading it:
///
/// | memory | on the storage's thread | on other threads |
/// |---|---|---|
/// | gathered for forward | in place, until this thread reshards the unit | a copy, made under the lock |
/// | gathered for backward | in place, as long as the view lives | the same |
///
/// Only the first case is more than an ordinary borrow. A borrow of a tensor's bytes ends with the
/// operation that reads them, and resharding runs between operations. So on this thread, forward's
/// memory may be read after the lock is released. Only two kinds of objects outlive an operation: a
/// `Tensor`, whose handle borrows nothing, and a `TensorData`, which owns its bytes. burn copies
/// the bytes into a `TensorData` unless the tensor is the only handle. While forward's memory can
/// be evicted, a tensor is never the only handle, because `UnshardedParams` holds another one.
pub enum StorageRef<'a, M> {
    /// The view's private copy, or memory gathered for backward.
    Held(&'a M),
    Forward(Forward<'a, M>),
}

/// Read lock on forward's memory.
pub struct Forward<'a, M>(RwLockReadGuard<'a, Option<M>>);

impl<M> Deref for StorageRef<'_, M> {
    type Target = M;

    fn deref(&self) -> &M {
        match self {
            Self::Held(memory) => memory,
            Self::Forward(Forward(memory)) => memory.as_ref().expect("present when it was locked"),
        }
    }
}

/// Reason why a view cannot be read.
#[derive(Debug)]
pub enum StorageReadError {
    /// Only a copy could be read on this thread, and the caller did not allow one.
    WouldCopy,
    /// The storage is empty, and its source cannot restore it.
    NotRestored,
}

impl<M: StorageMemory, L> StorageView<M, L> {
    pub fn new(slot: Arc<EvictableStorage<M, L>>) -> Self {
        Self {
            slot,
            own: OnceLock::new(),
        }
    }

    /// Returns a private copy of forward's memory, made at the first call.
    fn own(&self) -> Option<&M> {
        if self.own.get().is_none() {
            let copy = self.slot.forward.read().as_ref()?.copy();
            let _ = self.own.set(copy);
        }
        self.own.get()
    }

    /// Borrows forward's memory in place, if it is present.
    fn in_place(&self) -> Option<StorageRef<'_, M>> {
        let forward = self.slot.forward.read();
        forward
            .is_some()
            .then_some(StorageRef::Forward(Forward(forward)))
    }

    /// Borrows the memory to read, and restores evicted storage first.
    pub fn read(&self, copy_allowed: bool) -> Result<StorageRef<'_, M>, StorageReadError> {
        let here = thread::current().id() == self.slot.thread;
        for gathered in [true, false] {
            if let Some(memory) = self.own.get().or_else(|| self.slot.restored.get()) {
                return Ok(StorageRef::Held(memory));
            }
            if here && let Some(place) = self.in_place() {
                return Ok(place);
            }
            if !here && self.slot.forward.read().is_some() {
                if !copy_allowed {
                    return Err(StorageReadError::WouldCopy);
                }
                if let Some(memory) = self.own() {
                    return Ok(StorageRef::Held(memory));
                }
            }
            if gathered {
                self.slot.source.refill();
            }
        }
        Err(StorageReadError::NotRestored)
    }

    /// Returns the view's private memory for writing. The first call copies, because other views
    /// must not see the writes.
    pub fn write(&mut self, copy_allowed: bool) -> Result<&mut M, StorageReadError> {
        if self.own.get().is_none() {
            if !copy_allowed {
                return Err(StorageReadError::WouldCopy);
            }
            let copy = self.read(true)?.copy();
            let _ = self.own.set(copy);
        }
        Ok(self.own.get_mut().expect("made above"))
    }
}
