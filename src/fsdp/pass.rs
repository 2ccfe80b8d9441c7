//! [`Pass`]: one forward through a unit, and the backward that belongs to it.

use std::sync::Arc;

use burn::backend::autodiff::NodeId;
use burn::backend::ops::FloatTensorOps;
use burn::backend::{Dispatch, DispatchTensor};
use parking_lot::Mutex;

use super::storage::{Refill, Slot};
use super::unit::{Gathering, Kept, Unit, zeros_like_whole};
use crate::Error;
use crate::comm::{CommError, Phase};

/// One forward through a unit: the shards it started from, what is gathered of them right now,
/// and the gradients collected for its reduction.
///
/// It holds plain tensors only. The graph's nodes own it, so a tensor of the graph inside would
/// keep an abandoned graph alive for ever.
///
/// | | gathered weights | slots |
/// |---|---|---|
/// | forward | all | full |
/// | after forward | none, or this rank's part of a few ranks' | empty |
/// | backward | all, each until its last reader | full until the reduction |
/// | after the reduction | none | empty |
#[derive(Debug)]
pub(super) struct Pass {
    pub(super) unit: Arc<Unit>,
    /// The unit's parameters that take part, as indices into the unit.
    members: Vec<usize>,
    shards: Vec<DispatchTensor>,
    /// The shards' leaves; `None` for a frozen parameter.
    leaves: Vec<Option<NodeId>>,
    kept: Kept,
    /// Whether the gathered weights live in slots, where the backend has them.
    in_slots: bool,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// Empty while the unit is sharded.
    wholes: Vec<Option<DispatchTensor>>,
    parts: Option<Vec<DispatchTensor>>,
    /// Of each weight, once it was gathered; `None` for one that cannot be in a slot.
    slots: Vec<Option<Arc<Slot>>>,
    gathered_again: bool,
    grads: Vec<Option<DispatchTensor>>,
    /// This rank's terms of gradients that the tensor-parallel ranks add up.
    terms: Vec<Term>,
    inputs_seen: Vec<bool>,
}

/// A rank's term of a gradient.
#[derive(Debug, Clone, Default)]
struct Term {
    /// Whether the weight was read for computations that differ between tensor-parallel ranks: on
    /// one of them and so on all.
    expected: bool,
    grad: Option<DispatchTensor>,
}

impl Pass {
    pub(super) fn new(
        unit: Arc<Unit>,
        members: Vec<usize>,
        shards: Vec<DispatchTensor>,
        leaves: Vec<Option<NodeId>>,
        kept: Kept,
        in_slots: bool,
    ) -> Arc<Self> {
        let n = members.len();
        let state = State {
            wholes: Vec::new(),
            parts: None,
            slots: Vec::new(),
            gathered_again: false,
            grads: vec![None; n],
            terms: vec![Term::default(); n],
            inputs_seen: Vec::new(),
        };
        Arc::new(Self { unit, members, shards, leaves, kept, in_slots, state: Mutex::new(state) })
    }

    pub(super) fn kept(&self) -> Kept {
        self.kept
    }

    /// Whether the graph may keep the weight at `position` at no cost: in a slot, or as the shard
    /// that every rank holds whole.
    pub(super) fn costs_nothing_kept(&self, position: usize) -> bool {
        let uncut = self.unit.params[self.members[position]].dim.is_none();
        uncut || self.state.lock().slots.get(position).is_some_and(Option::is_some)
    }

    /// Takes the result of an all-gather.
    pub(super) fn fill(self: &Arc<Self>, gathered: Vec<DispatchTensor>) {
        let wholes = self.unit.wholes(&self.members, gathered, &self.shards);
        let mut state = self.state.lock();
        if !self.in_slots {
            state.wholes = wholes.into_iter().map(Some).collect();
        } else if state.slots.is_empty() {
            let slots = wholes.into_iter().zip(&self.members).map(|(whole, &member)| {
                // One that every rank holds whole is the shard itself: nothing to free.
                if self.unit.params[member].dim.is_none() {
                    return (Some(whole), None);
                }
                let owner = Arc::downgrade(self);
                let (whole, slot) = Slot::place(whole, owner);
                (Some(whole), slot)
            });
            (state.wholes, state.slots) = slots.unzip();
        } else {
            let views = wholes.into_iter().zip(&state.slots).map(|(whole, slot)| match slot {
                Some(slot) => {
                    slot.fill(whole);
                    slot.view()
                }
                None => whole,
            });
            state.wholes = views.map(Some).collect();
        }
    }

    /// Gathers for forward, unless that has been done ahead.
    pub(super) fn unshard(self: &Arc<Self>) {
        if self.state.lock().wholes.is_empty() {
            self.gather(|| self.unit.all_gather(&self.members, self.shards.clone(), Phase::Forward));
        }
    }

    /// Gathers for backward, once.
    pub(super) fn unshard_again(self: &Arc<Self>) {
        let parts = {
            let mut state = self.state.lock();
            if self.kept == Kept::Whole || std::mem::replace(&mut state.gathered_again, true) {
                return;
            }
            state.parts.take()
        };
        self.gather(|| match parts {
            Some(parts) => self.unit.all_gather_parts(&self.members, parts),
            None => self.unit.all_gather(&self.members, self.shards.clone(), Phase::Backward),
        });
    }

    fn gather(self: &Arc<Self>, start: impl FnOnce() -> Gathering) {
        match start().wait() {
            Ok(gathered) => self.fill(gathered),
            Err(error) => Error::from(error).unwind(),
        }
    }

    /// The whole parameter during forward.
    pub(super) fn whole(self: &Arc<Self>, position: usize) -> DispatchTensor {
        self.unshard();
        self.state.lock().wholes[position].clone().expect("an all-gather returns every member")
    }

    /// The whole parameter during backward; given out once, so that its last reader frees it. One
    /// that has two nodes is freed with the unit.
    pub(super) fn whole_again(self: &Arc<Self>, position: usize) -> DispatchTensor {
        self.unshard_again();
        let mut state = self.state.lock();
        let whole = match state.terms[position].expected {
            true => state.wholes[position].clone(),
            false => state.wholes[position].take(),
        };
        whole.expect("a parameter is made again once a backward")
    }

    /// Forward is over: lets go of the whole parameters, but for the part to keep.
    pub(super) fn reshard(&self) {
        let mut state = self.state.lock();
        let wholes = std::mem::take(&mut state.wholes);
        if self.kept == Kept::Part
            && let Some(wholes) = wholes.into_iter().collect::<Option<Vec<_>>>()
        {
            state.parts = Some(self.unit.split(&self.members, &wholes));
        }
        state.slots.iter().flatten().for_each(|slot| slot.release());
    }

    /// Collects the gradient of a whole parameter until the unit's reduction.
    ///
    /// A frozen weight's is dropped.
    pub(super) fn collect(&self, position: usize, grad: DispatchTensor) {
        self.state.lock().grads[position] = self.leaves[position].is_some().then_some(grad);
    }

    /// The weight at `position` has been read for computations that differ between the
    /// tensor-parallel ranks.
    pub(super) fn expect_term(&self, position: usize) {
        self.state.lock().terms[position].expected = true;
    }

    /// Collects this rank's term of a gradient until the unit's reduction.
    pub(super) fn collect_term(&self, position: usize, grad: DispatchTensor) {
        self.state.lock().terms[position].grad = Some(grad);
    }

    /// Adds up the terms over the tensor-parallel ranks, in one all-reduce, and adds the sums to the
    /// gradients that are the same on all of them.
    fn add_terms(&self, grads: &mut [Option<DispatchTensor>], terms: Vec<Term>) -> Result<(), CommError> {
        let expected: Vec<_> = terms.into_iter().enumerate().filter(|(_, term)| term.expected).collect();
        if expected.is_empty() {
            return Ok(());
        }
        let positions: Vec<_> = expected.iter().map(|(position, _)| *position).collect();
        let own = expected.into_iter().map(|(position, term)| term.grad.unwrap_or_else(|| self.zeros(position)));
        let sums = self.unit.sum_terms(own.collect())?;
        for (position, sum) in positions.into_iter().zip(sums) {
            grads[position] = Some(match grads[position].take() {
                Some(grad) => Dispatch::float_add(grad, sum),
                None => sum,
            });
        }
        Ok(())
    }

    fn zeros(&self, position: usize) -> DispatchTensor {
        zeros_like_whole(&self.unit.params[self.members[position]].shape, &self.shards[position])
    }

    /// Reduces the collected gradients: the leaf and gradient shard of every trainable parameter.
    ///
    /// A parameter this rank did not use takes part with zeros, since others may have used it.
    pub(super) fn reduce(&self) -> Vec<(NodeId, DispatchTensor)> {
        let (mut grads, terms) = {
            let mut state = self.state.lock();
            state.wholes.clear();
            state.slots.iter().flatten().for_each(|slot| slot.release());
            (std::mem::take(&mut state.grads), std::mem::take(&mut state.terms))
        };
        if let Err(error) = self.add_terms(&mut grads, terms) {
            Error::from(error).unwind();
        }
        let mut leaves = Vec::new();
        let mut members = Vec::new();
        let mut wholes = Vec::new();
        for (position, grad) in grads.into_iter().enumerate() {
            if let Some(leaf) = self.leaves[position] {
                leaves.push(leaf);
                members.push(self.members[position]);
                wholes.push(grad.unwrap_or_else(|| self.zeros(position)));
            }
        }
        if leaves.is_empty() {
            return Vec::new();
        }
        let shards = self.unit.reduce(&members, wholes);
        let shards = shards.unwrap_or_else(|error| Error::from(error).unwind());
        leaves.into_iter().zip(shards).collect()
    }

    /// A new tracked input; returns its number.
    pub(super) fn add_input(&self) -> usize {
        let seen = &mut self.state.lock().inputs_seen;
        seen.push(false);
        seen.len() - 1
    }

    /// The input's gradient has been passed on.
    pub(super) fn see_input(&self, input: usize) {
        self.state.lock().inputs_seen[input] = true;
    }

    pub(super) fn input_seen(&self, input: usize) -> bool {
        self.state.lock().inputs_seen[input]
    }
}

/// Refills the slots of a pass that is still in the graph.
impl Refill for Pass {
    fn refill(self: Arc<Self>) {
        self.unshard_again();
    }
}
