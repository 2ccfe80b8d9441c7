//! [`UnitPass`]: one forward through a unit with its backward. [`BackwardScheduler`]: the passes and reductions of
//! a thread.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, OnceLock, Weak};
use std::thread;

use burn::backend::DispatchTensor;
use burn::backend::autodiff::NodeId;
use parking_lot::Mutex;

use super::counts::ProgramCounts;
use super::events::{EventKind, TrainingState};
use super::finished_graphs::FinishedGraphs;
use super::progress::Progress;
use super::reduction::gradients::{CollectedGrads, Trained};
use super::reduction::order::{OrderKey, ReductionOrder};
use super::reduction::padding::ZeroPadding;
use super::reduction::{GradReducer, OwnedReductions, Reduced};
use super::unit::Unit;
use super::unsharded::UnshardedParams;
use crate::Error;
use crate::autodiff::{self, BackwardId};
use crate::burn_compat::internals::NodeRange;
use crate::comm::note_interrupted;
use crate::error::OrUnwind;

/// One forward through a unit and its backward: its gathered parameters, the leaves that receive
/// its gradients, and its position in the order of reductions.
///
/// It holds plain tensors only. The graph's nodes own it, so a tensor of the graph in it would be a
/// reference cycle, and an abandoned graph would never be freed.
#[derive(Debug)]
pub(super) struct UnitPass {
    pub(super) unsharded: UnshardedParams,
    /// The shards' leaves, by position; `None` for a frozen parameter.
    leaves: Vec<Option<NodeId>>,
    pub(super) passes: Arc<BackwardScheduler>,
    /// Position of the pass in the order of reductions; `None` if it trains no parameter.
    place: Option<OrderKey>,
    /// The pass through the enclosing unit, which may have no node in the graph.
    pub(super) around: Option<Arc<Self>>,
    /// True if backward has reached an output.
    is_started: AtomicBool,
    /// True if forward has left the unit, and a backward may follow that has not run.
    awaits_backward: AtomicBool,
    /// True if the pass's backward has run.
    is_ended: AtomicBool,
    /// The pass's token in the graph.
    token: OnceLock<NodeId>,
    pub(super) progress: Progress,
    /// Numbers of the graph's nodes that are made while the unit is open.
    nodes: Mutex<Option<NodeRange>>,
    /// The gradients that backward has collected.
    pub(super) grads: Mutex<CollectedGrads>,
    pub(super) reductions: OwnedReductions,
}

impl UnitPass {
    pub(super) fn new(
        unsharded: UnshardedParams,
        leaves: Vec<Option<NodeId>>,
        passes: Arc<BackwardScheduler>,
        place: Option<OrderKey>,
        around: Option<Arc<Self>>,
    ) -> Arc<Self> {
        Arc::new(Self {
            grads: Mutex::new(CollectedGrads::new(leaves.len())),
            nodes: Mutex::new(Some(NodeRange::open())),
            unsharded,
            leaves,
            passes,
            place,
            around,
            is_started: AtomicBool::default(),
            awaits_backward: AtomicBool::default(),
            is_ended: AtomicBool::default(),
            token: OnceLock::new(),
            progress: Progress::default(),
            reductions: OwnedReductions::default(),
        })
    }

    /// Returns true if the pass trains a parameter.
    pub(super) fn is_reduced(&self) -> bool {
        self.place.is_some()
    }

    /// Returns true if the pass trains the parameter at `position`.
    pub(super) fn trains(&self, position: usize) -> bool {
        self.leaves[position].is_some()
    }

    /// Returns the shards that the pass trains, as positions with their leaves.
    pub(super) fn leaves(&self) -> impl Iterator<Item = (usize, NodeId)> {
        let leaves = self.leaves.iter().enumerate();
        leaves.filter_map(|(position, leaf)| Some((position, (*leaf)?)))
    }

    /// Returns the pass's position among all passes of the rank.
    #[cfg(feature = "testing")]
    pub(super) fn number(&self) -> Option<u64> {
        self.place.map(OrderKey::number)
    }

    /// Collects the gradient of an unsharded parameter until the unit is reduced. It is this rank's
    /// part if the mesh dimensions are given over which ranks sum it.
    ///
    /// The gradient of a frozen parameter is dropped.
    pub(super) fn collect(&self, position: usize, partial: Option<&[usize]>, grad: DispatchTensor) {
        match partial {
            Some(dims) => self.grads.lock().add_partial(position, dims, grad),
            None if self.trains(position) => self.grads.lock().add(position, grad),
            None => {}
        }
    }

    /// Records that the pass's forward begins.
    pub(super) fn begin(&self) {
        self.unsharded
            .record_event(EventKind::PreForward, TrainingState::Forward);
    }

    /// Records that the pass's forward has made its outputs.
    pub(super) fn end_forward(&self) {
        self.nodes.lock().iter_mut().for_each(NodeRange::close);
    }

    /// Starts the pass's backward when backward first reaches one of its outputs. Starts the
    /// all-gather of its weights, and then prefetches the units that the program named, or the one
    /// that forward left before this one.
    pub(super) fn start_backward_gather(self: &Arc<Self>) {
        if self.is_started.swap(true, Relaxed) {
            return;
        }
        self.unsharded
            .record_event(EventKind::PreBackward, TrainingState::PreBackward);
        self.unsharded.start_backward_gather();
        let named = self.unsharded.unit().prefetch.lock().backward.clone();
        match named {
            Some(units) => {
                for unit in units.iter().filter_map(Weak::upgrade) {
                    self.passes
                        .start_last(|pass| Arc::ptr_eq(pass.unsharded.unit(), &unit));
                }
            }
            None => self.passes.start_before(self),
        }
    }

    /// Waits until the weights of the enclosing units are gathered. If zeros replace a missing
    /// gradient, they pass through the operations of these units, perhaps before backward reaches
    /// an output of theirs, and even if it never does.
    pub(super) fn gather_around(&self) {
        let around = std::iter::successors(self.around.as_ref(), |pass| pass.around.as_ref());
        around.for_each(|pass| pass.unsharded.wait_backward_gather());
    }

    /// Records the pass's token, which only orders the backward.
    pub(super) fn set_token(&self, token: &DispatchTensor) {
        if let Some(node) = autodiff::node_id(token.clone()) {
            self.passes.padding.add(*self.token.get_or_init(|| node));
        }
    }

    /// Ends the pass when all its gradients are complete: nodes of this backward no longer read its
    /// weights. Returns the passes to reduce now, in order.
    pub(super) fn finish(self: &Arc<Self>) -> Vec<Weak<Self>> {
        self.gone(true);
        self.is_ended.store(true, Relaxed);
        if self.awaits_backward.swap(false, Relaxed) {
            self.unsharded.unit().counts.count_backward();
        }
        self.unsharded.end_backward();
        let Some(place) = self.place else {
            return Vec::new();
        };
        self.passes.reducer.trains(self.unsharded.unit());
        self.passes.order.ready(place, Arc::downgrade(self))
    }

    /// Records that the pass's nodes are gone: `consumed` by a backward, or dropped.
    fn gone(&self, consumed: bool) {
        if let Some(nodes) = self.nodes.lock().take() {
            self.passes
                .finished
                .lock()
                .add(nodes, self.unsharded.unit().label(), consumed);
        }
    }

    /// Records the node of a tracked input.
    pub(super) fn add_input(&self, node: Option<NodeId>) {
        self.nodes
            .lock()
            .iter_mut()
            .zip(node)
            .for_each(|(nodes, node)| nodes.add_input(node));
    }
}

impl Drop for UnitPass {
    fn drop(&mut self) {
        if thread::panicking()
            && *self.is_started.get_mut()
            && let Some(nodes) = self.nodes.get_mut()
        {
            let unit = self.unsharded.unit();
            note_interrupted(nodes.opened_at(), || {
                format!(
                    "in the backward of {}{}",
                    unit.comm.full_name(),
                    unit.precision_note("", &[])
                )
            });
        }
        self.gone(false);
        if let Some(place) = self.place {
            self.passes.order.leave(place);
        }
        self.token
            .get()
            .into_iter()
            .for_each(|token| self.passes.padding.remove(*token));
    }
}

/// The passes that a thread enters, in the order of their reductions, and the reductions of its
/// backwards.
#[derive(Debug, Default)]
pub(super) struct BackwardScheduler {
    pub(super) order: ReductionOrder<Weak<UnitPass>>,
    pub(super) reducer: GradReducer,
    pub(super) padding: ZeroPadding,
    /// The passes that a backward may follow, in the order in which forward left them.
    left: Mutex<Vec<FinishedForward>>,
    /// The passes whose graphs are gone.
    finished: Mutex<FinishedGraphs>,
}

/// A pass that was needed when it was swept is swept once more when this many times as many
/// forwards have ended after it. So a program that holds the outputs of some such forwards for a
/// while keeps at most this many times as many passes.
pub(super) const LATER: u64 = 8;

/// A pass that forward has left.
#[derive(Debug)]
struct FinishedForward {
    pass: Weak<UnitPass>,
    /// The pass's [own leaf](super::backward_nodes::own_leaf) in the graph, if it is in one.
    leaf: Option<DispatchTensor>,
    /// Counts of its unit, and its number there.
    counts: Arc<ProgramCounts>,
    number: u64,
    /// Number of forwards through the unit at which the pass is swept next.
    sweep_at: u64,
}

impl BackwardScheduler {
    /// Starts the reductions of the passes in `due`, and returns the gradients of earlier ones. A
    /// parameter that this rank did not use counts as zeros.
    ///
    /// # Panics
    /// Unwinds with the typed error of a collective that fails.
    pub(super) fn reduce(&self, due: Vec<Weak<UnitPass>>, backward: BackwardId) -> Reduced {
        let mut reduced = Reduced::new();
        for pass in due.iter().filter_map(Weak::upgrade) {
            // The earlier reduction completes first. A peer that meets this rank in the next
            // reduction can rely on that: this rank has received its shard of the earlier one,
            // whose gradients the peer then frees. Those of a bucket stay until it is posted.
            if pass.unsharded.unit().spec().buckets().is_none() {
                reduced.extend(self.reducer.advance(backward));
            }
            let source = &pass.unsharded.source;
            let grads = pass.grads.lock().take(source).or_unwind();
            let trained = Trained::new(source.clone(), &pass.leaves);
            let weight = pass.unsharded.unit().comm.options.lock().weight;
            let grads = trained.weigh(trained.select(grads), weight);
            reduced.extend(self.reducer.submit(
                pass.unsharded.unit(),
                trained,
                grads,
                backward,
                &pass.reductions,
            ));
            pass.unsharded
                .record_event(EventKind::PostBackward, TrainingState::PostBackward);
        }
        reduced
    }

    /// Returns the next position in forward, for a pass that trains a parameter.
    pub(super) fn register(&self, tied: bool) -> OrderKey {
        self.reducer.begin_forward();
        self.order.next_key(tied)
    }

    /// Records that forward has left the pass, and that a backward may follow. `leaf` is the pass's
    /// own leaf in the graph, if it has one already.
    pub(super) fn forward_ended(&self, pass: &Arc<UnitPass>, leaf: Option<DispatchTensor>) {
        let counts = pass.unsharded.unit().counts.clone();
        // A backward inside the unit's own forward has run already, and none follows.
        let waits = !pass.is_ended.load(Relaxed);
        let number = if waits {
            counts.count_forward()
        } else {
            counts.forwards()
        };
        let mut left = self.left.lock();
        left.retain(|left| left.pass.strong_count() > 0);
        left.push(FinishedForward {
            pass: Arc::downgrade(pass),
            leaf,
            counts,
            number,
            sweep_at: number + 1,
        });
        pass.awaits_backward.store(waits, Relaxed);
    }

    /// Returns the passes that forward has left, and whose backward has not run.
    pub(super) fn awaiting(&self) -> Vec<Arc<UnitPass>> {
        let left = self.left.lock();
        let passes = left.iter().filter_map(|left| left.pass.upgrade());
        passes
            .filter(|pass| pass.awaits_backward.load(Relaxed))
            .collect()
    }

    /// Sets the own leaf of a pass that forward has left.
    pub(super) fn set_own_leaf(&self, pass: &Weak<UnitPass>, leaf: DispatchTensor) {
        let mut left = self.left.lock();
        if let Some(left) = left.iter_mut().rfind(|left| left.pass.ptr_eq(pass)) {
            left.leaf = Some(leaf);
        }
    }

    /// Releases the own leaves of all passes, so that burn frees those on which no tensor depends.
    pub(super) fn release_leaves(&self) {
        self.left
            .lock()
            .iter_mut()
            .for_each(|left| left.leaf = None);
    }

    /// Returns the passes that are swept now, with their own leaves.
    pub(super) fn due_for_sweep(&self) -> Vec<(Weak<UnitPass>, DispatchTensor)> {
        let mut due = Vec::new();
        for left in self.left.lock().iter_mut() {
            let now = left.counts.forwards();
            if now < left.sweep_at {
                continue;
            }
            left.sweep_at = left.number + LATER * (now - left.number);
            if let Some(leaf) = &left.leaf {
                due.push((left.pass.clone(), leaf.clone()));
            }
        }
        due
    }

    /// Starts the backward all-gather of the pass that forward left before this one.
    pub(super) fn start_before(&self, pass: &Arc<UnitPass>) {
        let left = self.left.lock();
        let place = left
            .iter()
            .rposition(|left| left.pass.as_ptr() == Arc::as_ptr(pass));
        let before = place.and_then(|place| left.get(place.checked_sub(1)?)?.pass.upgrade());
        drop(left);
        before
            .iter()
            .for_each(|before| before.unsharded.start_backward_gather());
    }

    /// Starts the backward all-gather of the last pass that satisfies `of` and whose all-gather has
    /// not started.
    pub(super) fn start_last(&self, of: impl Fn(&UnitPass) -> bool) {
        let passes: Vec<_> = self
            .left
            .lock()
            .iter()
            .rev()
            .filter_map(|left| left.pass.upgrade())
            .collect();
        if let Some(pass) = passes
            .iter()
            .find(|pass| of(pass) && pass.unsharded.is_to_start())
        {
            pass.unsharded.start_backward_gather();
        }
    }

    /// Returns true if the parameters that backward needs of the last pass through `unit` are
    /// gathered in advance, and complete.
    pub(super) fn is_backward_gathered(&self, unit: &Arc<Unit>) -> bool {
        let left = self.left.lock();
        let passes = left.iter().rev().filter_map(|left| left.pass.upgrade());
        let mut of_unit = passes.filter(|pass| Arc::ptr_eq(pass.unsharded.unit(), unit));
        of_unit
            .next()
            .is_some_and(|pass| pass.unsharded.is_backward_gathered())
    }

    /// Returns the error behind a panic with this `text`, if the text says that a backward reached
    /// a consumed graph.
    pub(super) fn explain(&self, text: &str) -> Option<Error> {
        self.finished.lock().explain(text)
    }
}
