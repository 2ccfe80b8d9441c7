//! [`Ahead`]: the all-gather that is issued when forward ends, and where its weights go.
//!
//! Apart from burn, as [`slot`](super::slot) is.

use std::sync::{Arc, Weak};

use super::sync::Mutex;

/// An all-gather `G` of weights `T`, whose result is taken once, into slots `S`.
#[derive(Debug)]
pub struct Ahead<G, S, T>(Mutex<State<G, S, T>>);

#[derive(Debug)]
struct State<G, S, T> {
    /// Issued, not taken.
    issued: Option<G>,
    /// Of each weight; `None` for one that is in no slot.
    slots: Vec<Option<Weak<S>>>,
    /// Gathered again, of the weights in no slot.
    again: Vec<Option<T>>,
}

impl<G, S, T> Ahead<G, S, T> {
    pub fn new() -> Self {
        Self(Mutex::new(State { issued: None, slots: Vec::new(), again: Vec::new() }))
    }

    /// The slots to fill.
    pub fn fills(&self, slots: &[Option<Arc<S>>]) {
        self.0.lock().slots = slots.iter().map(|slot| slot.as_ref().map(Arc::downgrade)).collect();
    }

    /// Forward is over: `issued` is for backward, and the slots are released. In this order, so that
    /// whoever finds a slot empty finds what fills it.
    pub fn leave(&self, issued: Option<G>, slots: &[Option<Arc<S>>], release: impl Fn(&S)) {
        if issued.is_some() {
            self.0.lock().issued = issued;
        }
        slots.iter().flatten().for_each(|slot| release(slot));
    }

    /// Takes the result, once. Every slot is full then, whoever took it.
    pub fn take(&self, wait: impl FnOnce(G) -> Vec<T>, fill: impl Fn(&S, T)) {
        let mut state = self.0.lock();
        let Some(issued) = state.issued.take() else { return };
        let wholes = wait(issued);
        let slots = std::mem::take(&mut state.slots).into_iter().chain(std::iter::repeat_with(|| None));
        let again = wholes.into_iter().zip(slots).map(|(whole, slot)| match slot {
            None => Some(whole),
            Some(slot) => {
                if let Some(slot) = slot.upgrade() {
                    fill(&slot, whole);
                }
                None
            }
        });
        state.again = again.collect();
    }

    /// Of the weights in no slot, the one at `position`, gathered again.
    pub fn again(&self, position: usize) -> Option<T>
    where
        T: Clone,
    {
        self.0.lock().again.get(position).cloned().flatten()
    }

    /// [`again`](Self::again), given away.
    pub fn take_again(&self, position: usize) -> Option<T> {
        self.0.lock().again.get_mut(position).and_then(Option::take)
    }

    /// Drops what was gathered again and nobody holds.
    pub fn forget(&self) {
        self.0.lock().again.clear();
    }
}
