//! [`Pass`]: one forward through a unit, and the backward that belongs to it; [`Passes`]: those of one rank.

use std::collections::VecDeque;
use std::mem;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Weak};

use burn::backend::DispatchTensor;
use burn::backend::autodiff::NodeId;
use parking_lot::Mutex;

use super::buffer::UnitBuffer;
use super::events::{EventKind, TrainingState};
use super::order::{Order, Place};
use super::progress::Progress;
use super::reduce::{Advanced, Reduction};
use super::through::{Nodes, Through};
use super::unit::Unit;
use crate::Error;
use crate::autodiff::BackwardId;

/// One forward through a unit: what is gathered of it, whose gradients those are, and when they are reduced.
///
/// It holds plain tensors only. The graph's nodes own it, so a tensor of the graph inside would
/// keep an abandoned graph alive for ever.
#[derive(Debug)]
pub(super) struct Pass {
    pub(super) buffer: UnitBuffer,
    /// The shards' leaves; `None` for a frozen parameter.
    leaves: Vec<Option<NodeId>>,
    pub(super) passes: Arc<Passes>,
    /// Its place among them; `None` if nothing is reduced.
    place: Option<Place>,
    /// The pass through the unit around it, of which the graph may have no node.
    around: Option<Arc<Self>>,
    /// Whether backward has come to an output.
    is_started: AtomicBool,
    /// Of each tracked input, whether its gradient has been passed on.
    inputs_seen: Mutex<Vec<bool>>,
    pub(super) progress: Progress,
    /// The graph's nodes that are made while it is open.
    nodes: Mutex<Option<Nodes>>,
    /// Its gradients, while they are being reduced.
    pub(super) reduction: Mutex<Option<Box<Reduction>>>,
}

impl Pass {
    pub(super) fn new(
        buffer: UnitBuffer,
        leaves: Vec<Option<NodeId>>,
        passes: Arc<Passes>,
        place: Option<Place>,
        around: Option<Arc<Self>>,
    ) -> Arc<Self> {
        let (inputs_seen, progress, reduction) = (Mutex::default(), Progress::default(), Mutex::default());
        let (is_started, nodes) = (AtomicBool::new(false), Mutex::new(Some(Nodes::opened())));
        Arc::new(Self { buffer, leaves, passes, place, around, is_started, inputs_seen, progress, nodes, reduction })
    }

    /// Whether it trains a parameter.
    pub(super) fn is_reduced(&self) -> bool {
        self.place.is_some()
    }

    /// Whether it trains the parameter at `position`.
    pub(super) fn trains(&self, position: usize) -> bool {
        self.leaves[position].is_some()
    }

    /// Its number among all passes of the rank.
    #[cfg(feature = "testing")]
    pub(super) fn number(&self) -> Option<u64> {
        self.place.map(Place::number)
    }

    /// Collects the gradient of a whole parameter until the unit's reduction.
    ///
    /// A frozen weight's is dropped.
    pub(super) fn collect(&self, position: usize, grad: DispatchTensor) {
        if self.trains(position) {
            self.buffer.reduce_in(position, grad);
        }
    }

    /// Its forward begins.
    pub(super) fn begin(&self) {
        self.buffer.happened(EventKind::PreForward, TrainingState::Forward);
    }

    /// Its forward is over, and its outputs are made.
    pub(super) fn end_forward(&self) {
        self.nodes.lock().iter_mut().for_each(Nodes::close);
    }

    /// Backward has come to it: has its weights begin to move, and then those of the units named to be next, or of the
    /// one that forward has left before. That was done if backward has come to another of its outputs.
    pub(super) fn start_again(self: &Arc<Self>) {
        if self.is_started.swap(true, Relaxed) {
            return;
        }
        self.buffer.happened(EventKind::PreBackward, TrainingState::PreBackward);
        self.buffer.start_again();
        let named = self.buffer.unit().prefetch.lock().backward.clone();
        match named {
            Some(units) => {
                for unit in units.iter().filter_map(Weak::upgrade) {
                    self.passes.start_last(|pass| Arc::ptr_eq(pass.buffer.unit(), &unit));
                }
            }
            None => self.passes.start_before(self),
        }
    }

    /// What backward needs of the units around it is there: zeros are given to what is computed in them, maybe before
    /// backward has come to an output of theirs, and if it never does.
    pub(super) fn gather_around(&self) {
        let around = std::iter::successors(self.around.as_ref(), |pass| pass.around.as_ref());
        around.for_each(|pass| pass.buffer.gather_again());
    }

    /// All gradients are there: nobody of this backward reads the weights any more. Returns the passes
    /// to reduce now, in order.
    pub(super) fn finish(self: &Arc<Self>) -> Vec<Weak<Self>> {
        self.gone(true);
        self.buffer.end_backward();
        if self.passes.order.padded() {
            self.buffer.drop_zeros();
        }
        self.place.map_or_else(Vec::new, |place| self.passes.order.ready(place, Arc::downgrade(self)))
    }

    /// Issues the reduction of the collected gradients, of every trainable parameter; on a rank that did not use it, it
    /// counts as zeros. `None` if they wait with the unit instead.
    pub(super) fn issue_reduction(&self) -> Option<Reduction> {
        let trained = self.leaves.iter().enumerate().filter_map(|(position, leaf)| Some((position, (*leaf)?)));
        let (positions, leaves): (Vec<_>, Vec<_>) = trained.unzip();
        self.buffer.reduce(&positions, leaves).unwrap_or_else(|error| Error::from(error).unwind())
    }

    /// Its nodes are gone, consumed by a backward or not.
    fn gone(&self, consumed: bool) {
        if let Some(nodes) = self.nodes.lock().take() {
            self.passes.through.lock().add(nodes, self.buffer.unit().label(), consumed);
        }
    }

    /// A new tracked input; returns its number.
    pub(super) fn add_input(&self, node: Option<NodeId>) -> usize {
        let mut nodes = self.nodes.lock();
        nodes.iter_mut().zip(node).for_each(|(nodes, node)| nodes.input(node));
        let mut seen = self.inputs_seen.lock();
        seen.push(false);
        seen.len() - 1
    }

    /// The input's gradient has been passed on.
    pub(super) fn see_input(&self, input: usize) {
        self.inputs_seen.lock()[input] = true;
    }

    pub(super) fn input_seen(&self, input: usize) -> bool {
        self.inputs_seen.lock()[input]
    }
}

impl Drop for Pass {
    fn drop(&mut self) {
        self.gone(false);
        if let Some(place) = self.place {
            self.passes.order.leave(place);
        }
    }
}

/// The passes that a thread enters, and the reductions that its backwards have under way.
///
/// One reduction is waited for before the next is issued: meanwhile the rank computes the gradients between. So one unit's
/// whole gradients are in memory beside those that are being computed; two units', where another rank is late to take
/// its part.
#[derive(Debug, Default)]
pub(super) struct Passes {
    pub(super) order: Order<Weak<Pass>>,
    /// Oldest first. The passes hold what is under way: it goes with the graph of a backward that is given up.
    under_way: Mutex<VecDeque<(BackwardId, Weak<Pass>)>>,
    /// Those that a backward may follow, in the order in which forward has left them.
    left: Mutex<Vec<Weak<Pass>>>,
    /// Those whose graphs are gone.
    through: Mutex<Through>,
}

/// Gradients, each for its leaf.
pub(super) type Reduced = Vec<(NodeId, DispatchTensor)>;

impl Passes {
    /// Issues the reductions of `due`, and returns the gradients of those before.
    ///
    /// # Panics
    /// Unwinds with the typed error of a collective that fails.
    pub(super) fn reduce(&self, due: Vec<Weak<Pass>>, backward: BackwardId) -> Reduced {
        let mut reduced = Reduced::new();
        for weak in due {
            let Some(pass) = weak.upgrade() else { continue };
            // First: whoever meets a rank in a reduction knows that it has its part of the one before, whose gradients go.
            reduced.extend(self.advance(self.of(backward), backward));
            let issued = pass.issue_reduction();
            pass.buffer.happened(EventKind::PostBackward, TrainingState::PostBackward);
            let Some(issued) = issued else { continue };
            *pass.reduction.lock() = Some(Box::new(issued));
            self.under_way.lock().push_back((backward, weak));
        }
        reduced
    }

    /// Forward has left the pass, and a backward may follow.
    pub(super) fn left(&self, pass: &Arc<Pass>) {
        let mut left = self.left.lock();
        left.retain(|pass| pass.strong_count() > 0);
        left.push(Arc::downgrade(pass));
    }

    /// Starts gathering for backward the pass that forward has left before this one.
    pub(super) fn start_before(&self, pass: &Arc<Pass>) {
        let left = self.left.lock();
        let place = left.iter().rposition(|other| other.as_ptr() == Arc::as_ptr(pass));
        let before = place.and_then(|place| left.get(place.checked_sub(1)?)?.upgrade());
        drop(left);
        before.iter().for_each(|before| before.buffer.start_again());
    }

    /// Starts gathering for backward the last pass of these that has not been.
    pub(super) fn start_last(&self, of: impl Fn(&Pass) -> bool) {
        let passes: Vec<_> = self.left.lock().iter().rev().filter_map(Weak::upgrade).collect();
        if let Some(pass) = passes.iter().find(|pass| of(pass) && pass.buffer.is_to_start()) {
            pass.buffer.start_again();
        }
    }

    /// Whether what backward needs of the last pass through `unit` moves ahead of it, and is there.
    pub(super) fn is_gathered_again(&self, unit: &Arc<Unit>) -> bool {
        let left = self.left.lock();
        let mut of_unit =
            left.iter().rev().filter_map(Weak::upgrade).filter(|pass| Arc::ptr_eq(pass.buffer.unit(), unit));
        of_unit.next().is_some_and(|pass| pass.buffer.is_gathered_again())
    }

    /// Waits for all that `backward` has under way.
    ///
    /// # Panics
    /// As [`reduce`](Self::reduce).
    pub(super) fn finish(&self, backward: BackwardId) -> Reduced {
        let mut reduced = Reduced::new();
        loop {
            match self.of(backward) {
                none if none.is_empty() => return reduced,
                some => reduced.extend(self.advance(some, backward)),
            }
        }
    }

    /// The error behind a panic with this `text`, if a backward has come to what another has consumed.
    pub(super) fn explain(&self, text: &str) -> Option<Error> {
        self.through.lock().explain(text)
    }

    /// Lets go of what is under way: its backward was given up.
    pub(super) fn give_up(&self) {
        self.under_way.lock().clear();
    }

    /// Takes those of `backward` out of the queue, and lets go of those whose graph is gone.
    fn of(&self, backward: BackwardId) -> Vec<Weak<Pass>> {
        let mut under_way = self.under_way.lock();
        let alive = mem::take(&mut *under_way).into_iter().filter(|(_, pass)| pass.strong_count() > 0);
        let (own, others): (Vec<_>, Vec<_>) = alive.partition(|(of, _)| *of == backward);
        *under_way = others.into();
        own.into_iter().map(|(_, pass)| pass).collect()
    }

    /// Brings these reductions one stage further, oldest first; those that are not done go back into the queue, before
    /// what is there.
    fn advance(&self, passes: Vec<Weak<Pass>>, backward: BackwardId) -> Reduced {
        let mut reduced = Reduced::new();
        let mut left = VecDeque::new();
        for weak in passes {
            let Some(pass) = weak.upgrade() else { continue };
            let Some(reduction) = pass.reduction.lock().take() else { continue };
            match Reduction::advance(*reduction).unwrap_or_else(|error| error.unwind()) {
                Advanced::Done(grads) => reduced.extend(grads),
                Advanced::UnderWay(reduction) => {
                    *pass.reduction.lock() = Some(reduction);
                    left.push_back((backward, weak));
                }
            }
        }
        let mut under_way = self.under_way.lock();
        left.append(&mut under_way);
        *under_way = left;
        reduced
    }
}
