//! [`EvictableStorage`]: memory that can be taken back under its views.
//!
//! Apart from burn, so that `tests/slot-model` can try it under many schedules. Nothing here is
//! unsafe; what the users of [`StorageView::read`] owe says [`StorageRef`].

use std::ops::Deref;
use std::sync::Arc;

use super::Refill;
use super::sync::{OnceLock, RwLock, RwLockReadGuard, ThreadId, thread};

/// Memory of a weight.
pub trait StorageMemory {
    /// The same bytes, elsewhere.
    fn copy(&self) -> Self;
}

/// The memory of one gathered weight, there or not; `L` is what it is laid out as.
pub struct EvictableStorage<M, L> {
    /// What forward gathered, until it is taken back.
    pub(super) forward: RwLock<Option<M>>,
    /// What was gathered again. Nobody takes it back: it goes with the last view.
    again: OnceLock<M>,
    pub(super) layout: L,
    source: Arc<dyn Refill>,
    /// The thread that gathered for forward: the only one on which that memory is taken back.
    thread: ThreadId,
}

impl<M, L> EvictableStorage<M, L> {
    /// Of memory that forward gathered on this very thread.
    pub fn new(memory: M, layout: L, source: Arc<dyn Refill>) -> Arc<Self> {
        let (forward, again) = (RwLock::new(Some(memory)), OnceLock::new());
        Arc::new(Self { forward, again, layout, source, thread: thread::current().id() })
    }

    /// Takes back what forward gathered, under every view. On another thread than that of
    /// [`new`](Self::new) it stays, until the last view goes.
    ///
    /// The caller still holds a clone of each view that it gave out: see [`StorageRef`].
    pub fn evict(&self) {
        if thread::current().id() == self.thread {
            self.forward.write().take();
        }
    }

    /// Gives memory back, with the same values. A slot that was filled again stays as it is.
    pub fn restore(&self, memory: M) {
        let _ = self.again.set(memory);
    }

    pub(super) fn is_full(&self) -> bool {
        self.forward.read().is_some() || self.again.get().is_some()
    }
}

/// Memory that is a slot's, until it is written to: then a copy of its own.
pub struct StorageView<M, L> {
    pub(super) slot: Arc<EvictableStorage<M, L>>,
    own: OnceLock<M>,
}

/// Where a view's memory is.
///
/// Who may read it, and how long:
///
/// | memory | on the slot's thread | on others |
/// |---|---|---|
/// | of forward | in place, until the unit is resharded on this very thread | a copy, made under the lock |
/// | gathered again | in place, as long as the view lives | the same |
///
/// Only the first is not plain borrowing. A borrow of a tensor's bytes ends with the operation that
/// reads them, and resharding is between operations: so forward's may be read on, on this thread, when
/// the lock is no longer held. What outlives an operation is what a program holds: a `Tensor`, whose
/// handle borrows nothing; or a `TensorData`, which has the bytes to itself. burn copies to make one,
/// unless the tensor is the only handle: it never is while forward's memory may be taken back, since
/// the unit's buffer holds another until then and after.
pub enum StorageRef<'a, M> {
    /// The view's own, or gathered again.
    Held(&'a M),
    Forward(Forward<'a, M>),
}

/// Forward's memory, locked.
pub struct Forward<'a, M>(RwLockReadGuard<'a, Option<M>>);

impl<M> Deref for StorageRef<'_, M> {
    type Target = M;

    fn deref(&self) -> &M {
        match self {
            Self::Held(memory) => memory,
            Self::Forward(Forward(memory)) => memory.as_ref().expect("there when it was locked"),
        }
    }
}

/// Why a view has nothing to read.
#[derive(Debug)]
pub enum StorageReadError {
    /// Only a copy could be read here.
    WouldCopy,
    /// The slot is empty, and its source has nothing more.
    Gone,
}

impl<M: StorageMemory, L> StorageView<M, L> {
    pub fn new(slot: Arc<EvictableStorage<M, L>>) -> Self {
        Self { slot, own: OnceLock::new() }
    }

    /// A copy of forward's memory, made once.
    fn own(&self) -> Option<&M> {
        if self.own.get().is_none() {
            let copy = self.slot.forward.read().as_ref()?.copy();
            let _ = self.own.set(copy);
        }
        self.own.get()
    }

    /// Forward's memory where it is, if it is there.
    fn in_place(&self) -> Option<StorageRef<'_, M>> {
        let forward = self.slot.forward.read();
        forward.is_some().then_some(StorageRef::Forward(Forward(forward)))
    }

    /// Where to read; has an empty slot filled first.
    pub fn read(&self, copy_allowed: bool) -> Result<StorageRef<'_, M>, StorageReadError> {
        let here = thread::current().id() == self.slot.thread;
        for gathered in [true, false] {
            if let Some(memory) = self.own.get().or_else(|| self.slot.again.get()) {
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
        Err(StorageReadError::Gone)
    }

    /// Memory to write to, which no other view sees.
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
