//! [`UnitBuffer`]: whose the gathered memory of a unit is.
//!
//! A unit's weights are whole for a while, in forward and again in backward, and so are their gradients, until
//! they are reduced. All of that memory is a buffer's: scopes, passes and nodes of the graph hold the buffer, and
//! know nothing of what is behind it.
//!
//! | operation | | waits for | behind it |
//! |---|---|---|---|
//! | [`new`](UnitBuffer::new) | allocate | | nothing yet: the communicator makes results, a tensor a weight |
//! | [`copy_in`](UnitBuffer::copy_in) | what was gathered ahead of forward | | the tensor, or a slot of its memory |
//! | [`gather`](UnitBuffer::gather) | for forward | all-gather | the same |
//! | [`view`](UnitBuffer::view) | a weight in forward | | a handle |
//! | [`take_back`](UnitBuffer::take_back) | forward is over | | slots are emptied, and an all-gather is issued |
//! | [`gather_again`](UnitBuffer::gather_again), [`view_again`](UnitBuffer::view_again) | a weight in backward | that all-gather | slots are filled |
//! | [`reduce_in`](UnitBuffer::reduce_in) | a whole gradient | | the tensor |
//! | [`end`](UnitBuffer::end) | the pass needs the weights no longer | | handles go |
//! | [`reduce`](UnitBuffer::reduce) | gradients to shards | reduce-scatter | |
//! | [`copy_out`](UnitBuffer::copy_out) | what leaves the unit | | a copy, of a slot's memory |
//!
//! Another layout of that memory, such as one block for all weights that kernels copy shards into and views out
//! of, changes what is behind these; so does a communication that is issued earlier or waited for later.
//!
//! # Slots
//!
//! Slots stand in for saved-tensor hooks, which burn lacks. A view may be held by the graph, as what
//! an operation saved for backward, and by the program, as a weight that it keeps.
//!
//! Dropping the handles of a gathered weight does not free it where the graph saved a view: burn's
//! `linear` reshapes its weight, `nn::Embedding` keeps its own, and without gradient checkpointing
//! either holds the whole buffer until backward. So on Flex a gathered weight is a view of a
//! [`Slot`](slot::Slot): freeing the slot frees the bytes under every view at once, filling it again gives
//! them back. A view that is read while its slot is empty has the slot filled first.
//!
//! ```text
//!   weight ── reshape ── saved by matmul        forward: full     after: empty     backward: full
//!      \________/            |
//!         Slot  <────────────┘
//! ```
//!
//! Memory is taken back once, when forward leaves the unit; what backward gathers again goes with its
//! last view. An extension that borrows the bytes of a Flex tensor itself (`FlexTensor::bytes`) must
//! end the borrow before the weight's unit ends: no operation on a `Tensor` borrows longer.
//!
//! On Cube backends a slot is an allocation with gathered weights in it, usually a whole unit's: views keep its name,
//! and the device's thread moves the memory under it away and back ([`memory::cube`](crate::memory::cube)). That thread
//! cannot gather, so a view that is read while its slot is empty is an error there.

#[cfg(feature = "cube")]
mod cube;
#[cfg(feature = "flex")]
mod flex;
mod gathered;
mod gradients;
mod placing;
#[cfg(feature = "flex")]
mod slot;
mod slots;
mod source;
mod sync;

use std::sync::Arc;

use burn::backend::DispatchTensor;
use parking_lot::Mutex;

use gathered::Weight;
use gradients::Gradients;
use placing::{Placing, lasting};
use slots::{Refill, Slot};
use source::Source;

use super::unit::{Gathering, Kept, Unit, zeros_like_whole};
use super::verifier::Due;
use crate::comm::{Call, CommError, Phase};

/// The gathered bytes of one forward through a unit and of its backward: whole weights, and whole gradients
/// until they are reduced. Weights are named by their position among those that take part.
///
/// It holds plain tensors only, so that it keeps no graph alive.
#[derive(Debug)]
pub(super) struct UnitBuffer {
    source: Arc<Source>,
    kept: Kept,
    /// Whether gathered weights live in slots, where the backend has them.
    in_slots: bool,
    gradients: Mutex<Gradients>,
}

impl UnitBuffer {
    /// Of the parameters `members` of a unit, as indices into it, of which this rank has these `shards`.
    /// Its collectives are called `call`; what is alike on several ranks is compared if it is `due`.
    pub(super) fn new(
        unit: Arc<Unit>,
        members: Vec<usize>,
        shards: Vec<DispatchTensor>,
        call: Call,
        kept: Kept,
        in_slots: bool,
        due: Option<Due>,
    ) -> Self {
        let gradients = Mutex::new(Gradients::new(members.len()));
        Self { source: Source::new(unit, members, shards, call, due), kept, in_slots, gradients }
    }

    pub(super) fn unit(&self) -> &Arc<Unit> {
        &self.source.unit
    }

    pub(super) fn kept(&self) -> Kept {
        self.kept
    }

    /// Takes what was gathered ahead of forward from the same shards.
    pub(super) fn copy_in(&self, gathered: Vec<DispatchTensor>) {
        self.source.gathered.unshard(|| self.place(self.source.wholes(Gathering::Done(gathered))));
    }

    /// Gathers for forward, unless that has been done.
    pub(super) fn gather(&self) {
        self.source.gathered.unshard(|| self.place(self.source.gather()));
    }

    fn place(&self, wholes: Vec<DispatchTensor>) -> Vec<Weight<dyn Slot, DispatchTensor>> {
        let mut placing = Placing::new(self.source.clone());
        let place = |(position, whole)| match self.in_slots && !self.is_uncut(position) {
            true => placing.place(whole),
            false => Weight::Own(whole),
        };
        wholes.into_iter().enumerate().map(place).collect()
    }

    /// Whether every rank holds the weight whole: then it is the shard itself, and there is nothing to free.
    fn is_uncut(&self, position: usize) -> bool {
        self.source.unit.params[self.source.members[position]].cut.is_none()
    }

    /// Whether the graph may keep the weight at `position` at no cost: where the unit keeps it, in a
    /// slot, or as the shard that every rank holds whole.
    pub(super) fn costs_nothing_kept(&self, position: usize) -> bool {
        self.kept == Kept::Whole || self.is_uncut(position) || self.source.gathered.is_in_slot(position)
    }

    /// The weight at `position`, in forward; gathers first.
    pub(super) fn view(&self, position: usize) -> DispatchTensor {
        self.gather();
        match self.source.gathered.forward(position) {
            Some(weight) => weight,
            None => unreachable!("a unit's weights are read before its forward is left"),
        }
    }

    /// Forward is over: takes the gathered memory back, but for the part to keep, and issues the all-gather that
    /// `backward` will need.
    pub(super) fn take_back(&self, backward: bool) {
        let issue = |weights: &[Weight<_, DispatchTensor>]| {
            if let Some(due) = self.source.due.as_ref().filter(|_| backward && !weights.is_empty()) {
                let wholes = weights.iter().map(Weight::value);
                self.source.unit.look_at_gathered(due, &self.source.members, wholes);
            }
            let parts = (self.kept == Kept::Part && !weights.is_empty()).then(|| {
                let wholes: Vec<_> = weights.iter().map(|weight| weight.value().clone()).collect();
                self.source.unit.split(&self.source.members, &wholes)
            });
            (backward && self.kept != Kept::Whole).then(|| self.source.gather_ahead(parts))
        };
        self.source.gathered.leave(issue, Slot::release);
    }

    /// Waits for what backward needs, once.
    pub(super) fn gather_again(&self) {
        self.source.refill();
    }

    /// The weight at `position`, in backward. One in no slot is given out once, so that its last reader
    /// frees it; one that has two nodes goes with the unit.
    pub(super) fn view_again(&self, position: usize) -> DispatchTensor {
        let shared = self.gradients.lock().is_term_expected(position);
        match self.source.again(position, shared) {
            Some(weight) => weight,
            None => unreachable!(
                "rules 2 and 9: made again once a backward, before its unit's token, of what forward issued"
            ),
        }
    }

    /// Collects the gradient of the whole weight at `position`.
    pub(super) fn reduce_in(&self, position: usize, grad: DispatchTensor) {
        self.gradients.lock().add(position, grad);
    }

    /// The weight at `position` has been read, for the first time, for computations that differ between the
    /// tensor-parallel ranks along the mesh dimensions `dims`.
    pub(super) fn expect_term(&self, position: usize, dims: &[usize]) {
        self.gradients.lock().expect_term(position, dims);
    }

    /// Collects this rank's term of the gradient at `position`.
    pub(super) fn reduce_in_term(&self, position: usize, dims: &[usize], grad: DispatchTensor) {
        self.gradients.lock().add_term(position, dims, grad);
    }

    /// Nobody of the pass reads the weights any more. A view that the program keeps stays as it is.
    pub(super) fn end(&self) {
        self.source.gathered.end();
    }

    /// Drops gradients that are zero everywhere.
    pub(super) fn drop_zeros(&self) {
        self.gradients.lock().drop_zeros();
    }

    /// Reduces the collected gradients of the weights at these positions: returns this rank's part of each that
    /// a rank has used. On one that has not, it counts as zeros.
    pub(super) fn reduce(&self, trained: &[usize]) -> Result<Vec<Option<DispatchTensor>>, CommError> {
        let Source { unit, members, shards, due, .. } = &*self.source;
        let zeros = |position: usize| zeros_like_whole(&unit.params[members[position]].shape, &shards[position]);
        let call = self.source.call(Phase::Backward);
        let (mut grads, terms) = self.gradients.lock().take();
        for (dims, terms) in terms {
            let (positions, own): (Vec<_>, Vec<_>) = terms.into_iter().unzip();
            let summed = positions.iter().map(|&position| members[position]);
            let sums = unit.sum_terms(&dims, call.clone(), summed, own, |at| zeros(positions[at]))?;
            gradients::add_sums(&mut grads, &positions, sums);
        }
        let carried = unit.carried(due.as_ref(), members, shards);
        let members: Vec<_> = trained.iter().map(|&position| members[position]).collect();
        let own = trained.iter().map(|&position| grads[position].take()).collect();
        unit.reduce(call, &members, own, |at| zeros(trained[at]), carried)
    }

    /// Whether whole weights are in memory.
    #[cfg(feature = "testing")]
    pub(super) fn has_weights(&self) -> bool {
        self.source.gathered.is_there(Slot::is_full)
    }

    /// Whether whole gradients wait to be reduced.
    #[cfg(feature = "testing")]
    pub(super) fn has_gradients(&self) -> bool {
        self.gradients.lock().is_any()
    }

    /// An untracked tensor that outlives its unit: a copy, if its memory is a buffer's.
    pub(super) fn copy_out(tensor: DispatchTensor) -> DispatchTensor {
        lasting(tensor)
    }
}

/// The graph that needed it is gone.
impl Drop for UnitBuffer {
    fn drop(&mut self) {
        self.end();
    }
}
