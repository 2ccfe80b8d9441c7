//! Evictable storage for Cube tensors.
//!
//! A weight keeps its handle while the memory behind it is removed: see
//! [`memory::cube`](crate::memory::cube). Reading a view of evicted storage is an error of the
//! device, which names no parameter. The device's server thread cannot gather.

use std::sync::Arc;

use burn::backend::DispatchTensor;
use parking_lot::Mutex;
use smallvec::SmallVec;

use super::evictable::Storage;
use crate::memory::cube::{AllocationOffset, EvictableAllocation, id, primitive};

/// One allocation that contains gathered weights.
#[derive(Debug)]
pub(super) struct CubeStorage {
    memory: EvictableAllocation,
    /// Positions of the weights in the allocation.
    places: Mutex<SmallVec<[AllocationOffset; 1]>>,
    state: Mutex<StorageState>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum StorageState {
    /// Holds the memory that forward gathered.
    Full,
    Empty,
    Restored,
}

/// Evictable allocations of one unit. Weights in the same allocation share one storage.
#[derive(Debug, Default)]
pub(super) struct UnitAllocations(SmallVec<[Arc<CubeStorage>; 1]>);

impl UnitAllocations {
    /// Returns the storage for the allocation that contains `weight`, or `None` on a runtime that
    /// does not support eviction.
    pub(super) fn slot(&mut self, weight: &DispatchTensor) -> Option<Arc<CubeStorage>> {
        let weight = primitive(weight)?;
        let memory = id(&weight.handle);
        let slot = match self.0.iter().find(|slot| slot.memory.id() == memory) {
            Some(slot) => slot.clone(),
            None => {
                let places = Mutex::default();
                let state = Mutex::new(StorageState::Full);
                let slot = Arc::new(CubeStorage {
                    memory: EvictableAllocation::new(weight)?,
                    places,
                    state,
                });
                self.0.push(slot.clone());
                slot
            }
        };
        slot.places.lock().push(AllocationOffset::of(weight));
        Some(slot)
    }
}

impl Storage for CubeStorage {
    fn release(&self) {
        let mut state = self.state.lock();
        if *state == StorageState::Full {
            self.memory.take();
            *state = StorageState::Empty;
        }
    }

    /// Restores the allocation. The first weight of an allocation restores it for all, because the
    /// second gather uses the same layout. A weight that was alone in its allocation may now be in
    /// a larger one, and is then copied: the gather may use fewer ranks or another source than the
    /// first.
    ///
    /// # Panics
    /// If an allocation of several weights has a different layout than before.
    fn fill(&self, full: DispatchTensor) {
        let mut state = self.state.lock();
        if *state != StorageState::Empty {
            return;
        }
        let Some(cube) = primitive(&full) else {
            unreachable!("evictable storage holds Cube floats, not {full:?}")
        };
        let places = self.places.lock();
        let is_as_it_was = |cube| places.contains(&AllocationOffset::of(cube));
        let cube = if is_as_it_was(cube) || places.len() > 1 {
            cube.clone()
        } else {
            cube.copy()
        };
        assert!(
            is_as_it_was(&cube),
            "the second gather of a unit uses the layout of the first, but {:?} is not in {places:?}",
            AllocationOffset::of(&cube)
        );
        self.memory.give(cube);
        *state = StorageState::Restored;
    }

    #[cfg(feature = "testing")]
    fn is_full(&self) -> bool {
        *self.state.lock() != StorageState::Empty
    }
}
