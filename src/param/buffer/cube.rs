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
use crate::memory::cube::{Lent, id, primitive};

/// One allocation with gathered weights in it.
#[derive(Debug)]
pub(super) struct Slot {
    memory: Lent,
    state: Mutex<State>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Forward's.
    Full,
    Empty,
    Again,
}

/// The slots of one unit: weights that share an allocation share a slot.
#[derive(Debug, Default)]
pub(super) struct Blocks(SmallVec<[Arc<Slot>; 1]>);

impl Blocks {
    /// The slot of the memory that `weight` is in; `None` on a runtime that does not let it be taken.
    pub(super) fn slot(&mut self, weight: &DispatchTensor) -> Option<Arc<Slot>> {
        let weight = primitive(weight)?;
        let memory = id(&weight.handle);
        if let Some(slot) = self.0.iter().find(|slot| slot.memory.id() == memory) {
            return Some(slot.clone());
        }
        let slot = Arc::new(Slot { memory: Lent::new(weight)?, state: Mutex::new(State::Full) });
        self.0.push(slot.clone());
        Some(slot)
    }
}

impl slots::Slot for Slot {
    fn release(&self) {
        let mut state = self.state.lock();
        if *state == State::Full {
            self.memory.take();
            *state = State::Empty;
        }
    }

    /// Of the weights of one allocation the first brings the memory for all: what is gathered again is laid out as
    /// it was.
    fn fill(&self, whole: DispatchTensor) {
        let mut state = self.state.lock();
        if *state != State::Empty {
            return;
        }
        match primitive(&whole) {
            Some(cube) => self.memory.give(cube.clone()),
            None => unreachable!("a slot holds Cube floats, not {whole:?}"),
        }
        *state = State::Again;
    }

    #[cfg(feature = "testing")]
    fn is_full(&self) -> bool {
        *self.state.lock() != State::Empty
    }
}
