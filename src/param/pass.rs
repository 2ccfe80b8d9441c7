//! [`Pass`]: one forward through a unit, and the backward that belongs to it.

use std::sync::{Arc, Weak};

use burn::backend::autodiff::NodeId;
use burn::backend::ops::FloatTensorOps;
use burn::backend::{Dispatch, DispatchTensor, TensorMetadata};
use burn::tensor::Tensor;
use parking_lot::Mutex;

use super::order::{Order, Place};
use super::source::Source;
use super::storage::Slot;
use super::unit::{Kept, zeros_like_whole};
use crate::Error;
use crate::comm::{CommError, Phase};

/// One forward through a unit: what is gathered of it right now, and the gradients collected for
/// its reduction.
///
/// It holds plain tensors only. The graph's nodes own it, so a tensor of the graph inside would
/// keep an abandoned graph alive for ever.
///
/// | | weights | slots |
/// |---|---|---|
/// | forward | all | full |
/// | after forward | none, or this rank's part of a few ranks' | empty |
/// | backward | all, each until its last reader | full until the last view goes |
/// | when all gradients are there | none | dropped |
#[derive(Debug)]
pub(super) struct Pass {
    pub(super) source: Arc<Source>,
    /// The shards' leaves; `None` for a frozen parameter.
    leaves: Vec<Option<NodeId>>,
    kept: Kept,
    /// Whether the gathered weights live in slots, where the backend has them.
    in_slots: bool,
    pub(super) passes: Arc<Passes>,
    /// Its place among them; `None` if nothing is reduced.
    place: Option<Place>,
    weights: Mutex<Weights>,
    gradients: Mutex<Gradients>,
}

/// The order of a rank's passes.
pub(super) type Passes = Order<Weak<Pass>>;

#[derive(Debug, Default)]
struct Weights {
    /// As forward reads them. Of a weight in a slot the view stays after forward: see
    /// [`storage`](super::storage).
    forward: Vec<Option<DispatchTensor>>,
    slots: Vec<Option<Arc<Slot>>>,
}

#[derive(Debug)]
struct Gradients {
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
        source: Arc<Source>,
        leaves: Vec<Option<NodeId>>,
        kept: Kept,
        in_slots: bool,
        passes: Arc<Passes>,
        place: Option<Place>,
    ) -> Arc<Self> {
        let n = leaves.len();
        let gradients = Gradients { grads: vec![None; n], terms: vec![Term::default(); n], inputs_seen: Vec::new() };
        let (weights, gradients) = (Mutex::default(), Mutex::new(gradients));
        Arc::new(Self { source, leaves, kept, in_slots, passes, place, weights, gradients })
    }

    pub(super) fn kept(&self) -> Kept {
        self.kept
    }

    /// Whether it trains a parameter.
    pub(super) fn is_reduced(&self) -> bool {
        self.place.is_some()
    }

    /// Whether the graph may keep the weight at `position` at no cost: where the unit keeps it, in a
    /// slot, or as the shard that every rank holds whole.
    pub(super) fn costs_nothing_kept(&self, position: usize) -> bool {
        let uncut = self.source.unit.params[self.source.members[position]].dim.is_none();
        let in_slot = || self.weights.lock().slots.get(position).is_some_and(Option::is_some);
        self.kept == Kept::Whole || uncut || in_slot()
    }

    /// Takes weights that were gathered ahead of forward.
    pub(super) fn fill(&self, wholes: Vec<DispatchTensor>) {
        let mut weights = self.weights.lock();
        if !self.in_slots {
            weights.forward = wholes.into_iter().map(Some).collect();
            return;
        }
        let placed = wholes.into_iter().zip(&self.source.members).map(|(whole, &member)| {
            // One that every rank holds whole is the shard itself: nothing to free.
            if self.source.unit.params[member].dim.is_none() {
                return (Some(whole), None);
            }
            let (whole, slot) = Slot::place(whole, self.source.clone());
            (Some(whole), slot)
        });
        (weights.forward, weights.slots) = placed.unzip();
        self.source.fills(&weights.slots);
    }

    /// Gathers for forward, unless that has been done ahead.
    pub(super) fn unshard(&self) {
        if self.weights.lock().forward.is_empty() {
            self.fill(self.source.gather());
        }
    }

    /// Gathers for backward, once.
    pub(super) fn unshard_again(&self) {
        self.source.take();
    }

    /// The whole parameter during forward.
    pub(super) fn whole(&self, position: usize) -> DispatchTensor {
        self.unshard();
        self.weights.lock().forward[position].clone().expect("forward has every weight until it ends")
    }

    /// The whole parameter during backward. One in no slot is given out once, so that its last reader
    /// frees it; one that has two nodes is freed with the unit.
    pub(super) fn whole_again(&self, position: usize) -> DispatchTensor {
        self.unshard_again();
        // In a slot, or inside the unit's own forward.
        if let Some(whole) = self.weights.lock().forward.get(position).cloned().flatten() {
            return whole;
        }
        let whole = match self.gradients.lock().terms[position].expected {
            true => self.source.again(position),
            false => self.source.take_again(position),
        };
        whole.expect("a parameter is made again once a backward")
    }

    /// Forward is over: lets go of the whole parameters, but for the part to keep, and issues the
    /// all-gather that backward will need.
    pub(super) fn reshard(&self, backward: bool) {
        let mut weights = self.weights.lock();
        let Weights { forward, slots } = &mut *weights;
        let ahead = (backward && self.kept != Kept::Whole).then(|| {
            let wholes = || forward.iter().cloned().collect::<Option<Vec<_>>>().filter(|wholes| !wholes.is_empty());
            let wholes = (self.kept == Kept::Part).then(wholes).flatten();
            self.source.gather_ahead(wholes.map(|wholes| self.source.unit.split(&self.source.members, &wholes)))
        });
        let in_slots = slots.iter().map(Option::is_some).chain(std::iter::repeat(false));
        forward.iter_mut().zip(in_slots).filter(|(_, in_slot)| !in_slot).for_each(|(whole, _)| *whole = None);
        self.source.leave(ahead, slots);
    }

    /// All gradients are there: nobody of this backward reads the weights any more. Returns the passes
    /// to reduce now, in order.
    pub(super) fn finish(self: &Arc<Self>) -> Vec<Weak<Self>> {
        *self.weights.lock() = Weights::default();
        self.source.forget();
        if self.passes.padded() {
            let mut gradients = self.gradients.lock();
            let Gradients { grads, terms, .. } = &mut *gradients;
            for grad in grads.iter_mut().chain(terms.iter_mut().map(|term| &mut term.grad)) {
                grad.take_if(|grad| is_zero(grad));
            }
        }
        self.place.map_or_else(Vec::new, |place| self.passes.ready(place, Arc::downgrade(self)))
    }

    /// Collects the gradient of a whole parameter until the unit's reduction.
    ///
    /// A frozen weight's is dropped.
    pub(super) fn collect(&self, position: usize, grad: DispatchTensor) {
        self.gradients.lock().grads[position] = self.leaves[position].is_some().then_some(grad);
    }

    /// The weight at `position` has been read for computations that differ between the
    /// tensor-parallel ranks.
    pub(super) fn expect_term(&self, position: usize) {
        self.gradients.lock().terms[position].expected = true;
    }

    /// Collects this rank's term of a gradient until the unit's reduction.
    pub(super) fn collect_term(&self, position: usize, grad: DispatchTensor) {
        self.gradients.lock().terms[position].grad = Some(grad);
    }

    /// Adds up the terms over the tensor-parallel ranks, in one all-reduce, and adds the sums to the
    /// gradients that are the same on all of them.
    fn add_terms(&self, grads: &mut [Option<DispatchTensor>], terms: Vec<Term>) -> Result<(), CommError> {
        let expected: Vec<_> = terms.into_iter().enumerate().filter(|(_, term)| term.expected).collect();
        if expected.is_empty() {
            return Ok(());
        }
        let (positions, own): (Vec<_>, Vec<_>) = expected.into_iter().map(|(at, term)| (at, term.grad)).unzip();
        let zeros = |at: usize| self.zeros(positions[at]);
        let sums = self.source.unit.sum_terms(self.source.call(Phase::Backward), own, zeros)?;
        for (position, sum) in positions.iter().zip(sums) {
            grads[*position] = match (grads[*position].take(), sum) {
                (Some(grad), Some(sum)) => Some(Dispatch::float_add(grad, sum)),
                (grad, sum) => grad.or(sum),
            };
        }
        Ok(())
    }

    fn zeros(&self, position: usize) -> DispatchTensor {
        let Source { unit, members, shards, .. } = &*self.source;
        zeros_like_whole(&unit.params[members[position]].shape, &shards[position])
    }

    /// Reduces the collected gradients: the leaf and gradient shard of every trainable parameter that
    /// a rank used. On one that did not use it, it counts as zeros.
    pub(super) fn reduce(&self) -> Vec<(NodeId, DispatchTensor)> {
        self.try_reduce().unwrap_or_else(|error| Error::from(error).unwind())
    }

    fn try_reduce(&self) -> Result<Vec<(NodeId, DispatchTensor)>, CommError> {
        let (mut grads, terms) = {
            let mut gradients = self.gradients.lock();
            (std::mem::take(&mut gradients.grads), std::mem::take(&mut gradients.terms))
        };
        self.add_terms(&mut grads, terms)?;
        let trained: Vec<_> = (0..grads.len()).filter(|&position| self.leaves[position].is_some()).collect();
        let members: Vec<_> = trained.iter().map(|&position| self.source.members[position]).collect();
        let own: Vec<_> = trained.iter().map(|&position| grads[position].take()).collect();
        let zeros = |at: usize| self.zeros(trained[at]);
        let shards = self.source.unit.reduce(self.source.call(Phase::Backward), &members, own, zeros)?;
        Ok(trained.iter().zip(shards).filter_map(|(&position, shard)| Some((self.leaves[position]?, shard?))).collect())
    }

    /// A new tracked input; returns its number.
    pub(super) fn add_input(&self) -> usize {
        let seen = &mut self.gradients.lock().inputs_seen;
        seen.push(false);
        seen.len() - 1
    }

    /// The input's gradient has been passed on.
    pub(super) fn see_input(&self, input: usize) {
        self.gradients.lock().inputs_seen[input] = true;
    }

    pub(super) fn input_seen(&self, input: usize) -> bool {
        self.gradients.lock().inputs_seen[input]
    }
}

/// Whether every element is zero. Waits for the device.
fn is_zero(grad: &DispatchTensor) -> bool {
    if grad.shape().num_elements() == 0 {
        return true;
    }
    let largest = Dispatch::float_max(Dispatch::float_abs(grad.clone()));
    Tensor::<1>::from_dispatch(largest).into_scalar::<f64>() == 0.0
}

impl Drop for Pass {
    fn drop(&mut self) {
        if let Some(place) = self.place {
            self.passes.leave(place);
        }
    }
}
