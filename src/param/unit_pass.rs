//! [`UnitPass`]: one forward through a unit, and the backward that belongs to it; [`BackwardScheduler`]: those of one rank.

use std::collections::VecDeque;
use std::mem;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Weak};

use burn::backend::DispatchTensor;
use burn::backend::autodiff::NodeId;
use parking_lot::Mutex;
use smallvec::SmallVec;

use super::accumulated_grads::GradStage;
use super::events::{EventKind, TrainingState};
use super::progress::Progress;
use super::reduce::{Advanced, GradReducer, Issued, PutOff};
use super::reduction_order::{OrderKey, ReductionOrder};
use super::storage::UnshardedParams;
use super::through::{Nodes, Through};
use super::trained::Trained;
use super::unit::Unit;
use crate::Error;
use crate::autodiff::BackwardId;

/// One forward through a unit: what is gathered of it, whose gradients those are, and when they are reduced.
///
/// It holds plain tensors only. The graph's nodes own it, so a tensor of the graph inside would
/// keep an abandoned graph alive for ever.
#[derive(Debug)]
pub(super) struct UnitPass {
    pub(super) buffer: UnshardedParams,
    /// The shards' leaves; `None` for a frozen parameter.
    leaves: Vec<Option<NodeId>>,
    pub(super) passes: Arc<BackwardScheduler>,
    /// Its place among them; `None` if nothing is reduced.
    place: Option<OrderKey>,
    /// The pass through the unit around it, of which the graph may have no node.
    around: Option<Arc<Self>>,
    /// Whether backward has come to an output.
    is_started: AtomicBool,
    /// True if forward has left it, and a backward may follow.
    is_left: AtomicBool,
    /// Of each tracked input, whether its gradient has been passed on.
    inputs_seen: Mutex<Vec<bool>>,
    pub(super) progress: Progress,
    /// The graph's nodes that are made while it is open.
    nodes: Mutex<Option<Nodes>>,
    /// The reductions that go with its graph: of its gradients, and of those that have waited for the end of its backward.
    reductions: Mutex<SmallVec<[Arc<UnderWay>; 1]>>,
}

/// A reduction that is under way, until it is done.
type UnderWay = Mutex<Option<Box<GradReducer>>>;

impl UnitPass {
    pub(super) fn new(
        buffer: UnshardedParams,
        leaves: Vec<Option<NodeId>>,
        passes: Arc<BackwardScheduler>,
        place: Option<OrderKey>,
        around: Option<Arc<Self>>,
    ) -> Arc<Self> {
        let (inputs_seen, progress, reductions) = (Mutex::default(), Progress::default(), Mutex::default());
        let (is_started, is_left, nodes) =
            (AtomicBool::default(), AtomicBool::default(), Mutex::new(Some(Nodes::opened())));
        Arc::new(Self {
            buffer,
            leaves,
            passes,
            place,
            around,
            is_started,
            is_left,
            inputs_seen,
            progress,
            nodes,
            reductions,
        })
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
        self.place.map(OrderKey::number)
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
        let Some(place) = self.place else { return Vec::new() };
        self.passes.trains(self.buffer.unit());
        self.passes.order.ready(place, Arc::downgrade(self))
    }

    /// Issues the reduction of the collected gradients, of every trainable parameter; on a rank that did not use it, it
    /// counts as zeros. They may wait with the unit instead.
    fn issue_reduction(&self) -> Issued {
        let grads = self.buffer.take_gradients().unwrap_or_else(|error| Error::from(error).unwind());
        let trained = Trained::new(self.buffer.source().clone(), &self.leaves);
        let grads = trained.take(grads);
        GradReducer::issue(trained, grads)
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

impl Drop for UnitPass {
    fn drop(&mut self) {
        self.gone(false);
        if *self.is_left.get_mut() {
            self.buffer.unit().left.fetch_sub(1, Relaxed);
        }
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
pub(super) struct BackwardScheduler {
    pub(super) order: ReductionOrder<Weak<UnitPass>>,
    /// Oldest first. The passes hold what is under way: it goes with the graph of a backward that is given up.
    under_way: Mutex<VecDeque<(BackwardId, Weak<UnderWay>)>>,
    /// The models of which this backward trains units.
    models: Mutex<SmallVec<[Arc<str>; 1]>>,
    /// The reductions that wait for a later backward: in one order on all ranks, also on one that has none of the gradients.
    put_off: Mutex<Vec<PutOff>>,
    /// Those that a backward may follow, in the order in which forward has left them.
    left: Mutex<Vec<FinishedForward>>,
    /// Those whose graphs are gone.
    through: Mutex<Through>,
}

/// A pass that forward has left.
#[derive(Debug)]
struct FinishedForward {
    pass: Weak<UnitPass>,
    /// The leaf [of its own](super::sweep) in the graph, if it is in one.
    leaf: Option<DispatchTensor>,
}

/// Gradients, each for its leaf.
pub(super) type Reduced = Vec<(NodeId, DispatchTensor)>;

impl BackwardScheduler {
    /// Issues the reductions of `due`, and returns the gradients of those before.
    ///
    /// # Panics
    /// Unwinds with the typed error of a collective that fails.
    pub(super) fn reduce(&self, due: Vec<Weak<UnitPass>>, backward: BackwardId) -> Reduced {
        let mut reduced = Reduced::new();
        for weak in due {
            let Some(pass) = weak.upgrade() else { continue };
            // First: whoever meets a rank in a reduction knows that it has its part of the one before, whose gradients go.
            reduced.extend(self.advance(self.of(backward), backward));
            let issued = pass.issue_reduction();
            pass.buffer.happened(EventKind::PostBackward, TrainingState::PostBackward);
            self.add(issued, backward, &pass);
        }
        reduced
    }

    /// A reduction is under way, in a backward through `pass`, or put off.
    fn add(&self, issued: Issued, backward: BackwardId, pass: &UnitPass) {
        match issued {
            Issued::PutOff(put_off) => self.put_off(put_off),
            Issued::UnderWay(reduction) => {
                let reduction = Arc::new(Mutex::new(Some(reduction)));
                self.under_way.lock().push_back((backward, Arc::downgrade(&reduction)));
                pass.reductions.lock().push(reduction);
            }
        }
    }

    /// A reduction waits, in the place of those that it takes along.
    fn put_off(&self, new: PutOff) {
        let mut put_off = self.put_off.lock();
        let takes = |leaf: &NodeId| new.trained.leaves.contains(leaf);
        put_off.retain(|old| old.waits() && (old.stage != new.stage || !old.trained.leaves.iter().all(takes)));
        put_off.push(new);
    }

    /// The next place in forward, of a pass that trains a parameter.
    pub(super) fn enter(&self, tied: bool) -> OrderKey {
        // A backward that was given up has left them.
        self.models.lock().clear();
        self.order.enter(tied)
    }

    /// The backward trains the unit.
    fn trains(&self, unit: &Unit) {
        let model = unit.model_root();
        let mut models = self.models.lock();
        if let Some(model) = model.filter(|model| !models.iter().any(|known| Arc::ptr_eq(known, model))) {
            models.push(model);
        }
    }

    /// Issues the reductions that earlier backwards have put off, of the models of which this one trains units, and returns
    /// the gradients of those before. So a step lacks no gradient of a unit that its last backward does not enter. Called at
    /// the end of a backward through `pass`.
    ///
    /// # Panics
    /// As [`reduce`](Self::reduce).
    pub(super) fn reduce_waiting(&self, backward: BackwardId, pass: &UnitPass) -> Reduced {
        let mut reduced = Reduced::new();
        let models = mem::take(&mut *self.models.lock());
        let is_trained = |put_off: &PutOff| {
            let model = put_off.trained.unit().model_root();
            model.is_some_and(|model| models.iter().any(|known| Arc::ptr_eq(known, &model)))
        };
        let is_due = |put_off: &PutOff| put_off.is_due() && is_trained(put_off);
        while self.put_off.lock().iter().any(is_due) {
            // What is under way may take along what waits.
            reduced.extend(self.advance(self.of(backward), backward));
            let next = {
                let mut put_off = self.put_off.lock();
                put_off.retain(PutOff::waits);
                let first = |stage| put_off.iter().position(|put_off| put_off.stage == stage && is_due(put_off));
                let at = first(GradStage::Full).or_else(|| first(GradStage::Scattered));
                at.map(|at| put_off.remove(at))
            };
            next.into_iter().for_each(|next| self.add(GradReducer::issue_waiting(next), backward, pass));
        }
        reduced
    }

    /// Forward has left the pass, and a backward may follow. In the graph it hangs on this leaf, if on any yet.
    pub(super) fn left(&self, pass: &Arc<UnitPass>, leaf: Option<DispatchTensor>) {
        let mut left = self.left.lock();
        left.retain(|left| left.pass.strong_count() > 0);
        left.push(FinishedForward { pass: Arc::downgrade(pass), leaf });
        pass.is_left.store(true, Relaxed);
        pass.buffer.unit().left.fetch_add(1, Relaxed);
    }

    /// A pass that forward has left hangs on this leaf.
    pub(super) fn hang(&self, pass: &Weak<UnitPass>, leaf: DispatchTensor) {
        let mut left = self.left.lock();
        if let Some(left) = left.iter_mut().rfind(|left| left.pass.ptr_eq(pass)) {
            left.leaf = Some(leaf);
        }
    }

    /// Returns the passes through `unit` that forward has left, with the leaves that they hang on.
    pub(super) fn leaves_of(&self, unit: &Arc<Unit>) -> Vec<(Weak<UnitPass>, DispatchTensor)> {
        let left = self.left.lock();
        let is_of = |pass: Arc<UnitPass>| Arc::ptr_eq(pass.buffer.unit(), unit);
        let of_unit = left.iter().filter(|left| left.pass.upgrade().is_some_and(is_of));
        of_unit.filter_map(|left| Some((left.pass.clone(), left.leaf.clone()?))).collect()
    }

    /// Starts gathering for backward the pass that forward has left before this one.
    pub(super) fn start_before(&self, pass: &Arc<UnitPass>) {
        let left = self.left.lock();
        let place = left.iter().rposition(|left| left.pass.as_ptr() == Arc::as_ptr(pass));
        let before = place.and_then(|place| left.get(place.checked_sub(1)?)?.pass.upgrade());
        drop(left);
        before.iter().for_each(|before| before.buffer.start_again());
    }

    /// Starts gathering for backward the last pass of these that has not been.
    pub(super) fn start_last(&self, of: impl Fn(&UnitPass) -> bool) {
        let passes: Vec<_> = self.left.lock().iter().rev().filter_map(|left| left.pass.upgrade()).collect();
        if let Some(pass) = passes.iter().find(|pass| of(pass) && pass.buffer.is_to_start()) {
            pass.buffer.start_again();
        }
    }

    /// Whether what backward needs of the last pass through `unit` moves ahead of it, and is there.
    pub(super) fn is_gathered_again(&self, unit: &Arc<Unit>) -> bool {
        let left = self.left.lock();
        let passes = left.iter().rev().filter_map(|left| left.pass.upgrade());
        let mut of_unit = passes.filter(|pass| Arc::ptr_eq(pass.buffer.unit(), unit));
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
    fn of(&self, backward: BackwardId) -> Vec<Weak<UnderWay>> {
        let mut under_way = self.under_way.lock();
        let alive = mem::take(&mut *under_way).into_iter().filter(|(_, reduction)| reduction.strong_count() > 0);
        let (own, others): (Vec<_>, Vec<_>) = alive.partition(|(of, _)| *of == backward);
        *under_way = others.into();
        own.into_iter().map(|(_, reduction)| reduction).collect()
    }

    /// Brings these reductions one stage further, oldest first; those that are not done go back into the queue, before
    /// what is there.
    fn advance(&self, reductions: Vec<Weak<UnderWay>>, backward: BackwardId) -> Reduced {
        let mut reduced = Reduced::new();
        let mut left = VecDeque::new();
        for weak in reductions {
            let Some(under_way) = weak.upgrade() else { continue };
            let Some(reduction) = under_way.lock().take() else { continue };
            match GradReducer::advance(*reduction).unwrap_or_else(|error| error.unwind()) {
                Advanced::Done(grads) => reduced.extend(grads),
                Advanced::PutOff(put_off) => self.put_off(put_off),
                Advanced::UnderWay(reduction) => {
                    *under_way.lock() = Some(reduction);
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
