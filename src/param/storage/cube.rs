//! Slots of Cube tensors.
//!
//! A weight keeps its name, and its memory is taken from under it; see [`memory::cube`](crate::memory::cube). A view
//! that is read while its slot is empty is an error of the device's, which names no parameter: the device's thread
//! cannot gather.

use std::sync::Arc;

use burn::backend::DispatchTensor;
use parking_lot::Mutex;
use smallvec::SmallVec;

use super::slots;
use crate::memory::cube::{AllocationOffset, EvictableAllocation, id, primitive};

/// One allocation with gathered weights in it.
#[derive(Debug)]
pub(super) struct CubeStorage {
    memory: EvictableAllocation,
    /// Of the weights.
    places: Mutex<SmallVec<[AllocationOffset; 1]>>,
    state: Mutex<StorageState>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum StorageState {
    /// Forward's.
    Full,
    Empty,
    Again,
}

/// The slots of one unit: weights that share an allocation share a slot.
#[derive(Debug, Default)]
pub(super) struct UnitAllocations(SmallVec<[Arc<CubeStorage>; 1]>);

impl UnitAllocations {
    /// The slot of the memory that `weight` is in; `None` on a runtime that does not let it be taken.
    pub(super) fn slot(&mut self, weight: &DispatchTensor) -> Option<Arc<CubeStorage>> {
        let weight = primitive(weight)?;
        let memory = id(&weight.handle);
        let slot = match self.0.iter().find(|slot| slot.memory.id() == memory) {
            Some(slot) => slot.clone(),
            None => {
                let (places, state) = (Mutex::default(), Mutex::new(StorageState::Full));
                let slot = Arc::new(CubeStorage { memory: EvictableAllocation::new(weight)?, places, state });
                self.0.push(slot.clone());
                slot
            }
        };
        slot.places.lock().push(AllocationOffset::of(weight));
        Some(slot)
    }
}

impl slots::Storage for CubeStorage {
    fn release(&self) {
        let mut state = self.state.lock();
        if *state == StorageState::Full {
            self.memory.take();
            *state = StorageState::Empty;
        }
    }

    /// Of the weights of one allocation the first brings the memory for all: what is gathered again is laid out as
    /// it was. One that was alone in it, and now is among others, is copied: a few ranks may gather where others than
    /// all do, or from elsewhere.
    ///
    /// # Panics
    /// If several weights are laid out as they were not.
    fn fill(&self, full: DispatchTensor) {
        let mut state = self.state.lock();
        if *state != StorageState::Empty {
            return;
        }
        let Some(cube) = primitive(&full) else { unreachable!("a slot holds Cube floats, not {full:?}") };
        let places = self.places.lock();
        let is_as_it_was = |cube| places.contains(&AllocationOffset::of(cube));
        let cube = if is_as_it_was(cube) || places.len() > 1 { cube.clone() } else { cube.copy() };
        assert!(
            is_as_it_was(&cube),
            "a unit is gathered again as it was: {:?} is none of {places:?}",
            AllocationOffset::of(&cube)
        );
        self.memory.give(cube);
        *state = StorageState::Again;
    }

    #[cfg(feature = "testing")]
    fn is_full(&self) -> bool {
        *self.state.lock() != StorageState::Empty
    }
}
