//! [`RecomputeContext`]: state of a checkpointed block while it runs.
//!
//! | run | graph | units inside |
//! |---|---|---|
//! | first, in forward | none | are entered, and their passes are recorded in order |
//! | recomputation, in backward | private | reuse the recorded passes, in that order |
//!
//! A nested block runs once with the first run of the enclosing block, which has no graph. When the enclosing block
//! is recomputed, the nested one runs its own first run and later its own recomputation.

use std::cell::{Cell, RefCell};
use std::mem;
use std::rc::Rc;
use std::sync::Arc;

use burn::backend::DispatchTensor;

use super::leaves::{KnownLeaves, Leaves};
use crate::autodiff::BackwardId;
use crate::param::unit_pass::{Reduced, UnitPass};

struct RecomputeContext {
    /// The passes that were recorded in the first run, or that the recomputation reuses.
    passes: RefCell<Vec<Arc<UnitPass>>>,
    /// State of the recomputation; `None` in the first run.
    again: Option<RecomputePass>,
    around: Option<Rc<RecomputeContext>>,
}

struct RecomputePass {
    /// Number of passes that the recomputation has entered.
    entered: Cell<usize>,
    /// A leaf of the block's private graph.
    anchor: DispatchTensor,
    /// The backward that the program called.
    backward: BackwardId,
    /// Gradients for leaves outside the block.
    reduced: RefCell<Reduced>,
}

thread_local! {
    static FRAME: RefCell<Option<Rc<RecomputeContext>>> = const { RefCell::new(None) };
}

fn current<T>(f: impl FnOnce(&RecomputeContext) -> T) -> Option<T> {
    let frame = FRAME.with_borrow(Clone::clone)?;
    Some(f(&frame))
}

/// Returns true if a checkpointed block is running on this thread.
pub(in crate::param) fn is_any() -> bool {
    FRAME.with_borrow(Option::is_some)
}

/// Returns true if the innermost block is in its first run.
pub(in crate::param) fn is_first() -> bool {
    FRAME.with_borrow(|frame| frame.as_ref().is_some_and(|frame| frame.again.is_none()))
}

/// Returns a leaf of the private graph if the innermost block is being recomputed.
pub(in crate::param) fn anchor() -> Option<DispatchTensor> {
    current(|frame| frame.again.as_ref().map(|again| again.anchor.clone())).flatten()
}

/// Pass of the unit that is entered next.
pub(in crate::param) enum Next {
    /// A new pass.
    New,
    /// A pass that forward recorded.
    Recorded(Arc<UnitPass>),
    /// No pass: the block entered fewer units in its first run.
    None,
}

/// Returns the pass for the unit that is entered next.
pub(in crate::param) fn next() -> Next {
    current(RecomputeContext::next).unwrap_or(Next::New)
}

/// Records a pass that is entered for the first time.
pub(in crate::param) fn record(pass: &Arc<UnitPass>) {
    current(|frame| frame.passes.borrow_mut().push(pass.clone()));
}

/// Returns the backward that the program called: that of the running recomputation, or `own` if no block is being
/// recomputed. `own` is the backward to which the calling step belongs.
pub(in crate::param) fn backward(own: BackwardId) -> BackwardId {
    current(|frame| frame.again.as_ref().map(|again| again.backward)).flatten().unwrap_or(own)
}

/// Keeps gradients for the enclosing graph if the innermost block is being recomputed. Otherwise returns them.
pub(in crate::param) fn keep(reduced: Reduced) -> Option<Reduced> {
    let frame = FRAME.with_borrow(Clone::clone);
    match frame.as_ref().and_then(|frame| frame.again.as_ref()) {
        Some(again) => {
            again.reduced.borrow_mut().extend(reduced);
            None
        }
        None => Some(reduced),
    }
}

/// Returns true if the innermost block is being recomputed and the pass was entered outside it.
pub(in crate::param) fn is_outside(pass: &Arc<UnitPass>) -> bool {
    let is_inside = |frame: &RecomputeContext| frame.passes.borrow().iter().any(|inside| Arc::ptr_eq(inside, pass));
    current(|frame| frame.again.is_some() && !is_inside(frame)).unwrap_or(false)
}

impl RecomputeContext {
    fn next(&self) -> Next {
        let next = match (&self.again, &self.around) {
            (Some(again), _) => {
                let at = again.entered.replace(again.entered.get() + 1);
                return self.passes.borrow().get(at).map_or(Next::None, |pass| Next::Recorded(pass.clone()));
            }
            (None, Some(around)) => around.next(),
            (None, None) => Next::New,
        };
        if let Next::Recorded(pass) = &next {
            self.passes.borrow_mut().push(pass.clone());
        }
        next
    }
}

/// Guard of a running block: the block is the innermost one of its thread until the guard is dropped.
pub(super) struct RecomputeGuard {
    frame: Rc<RecomputeContext>,
    _leaves: KnownLeaves,
}

impl RecomputeGuard {
    /// Starts the first run, with copies of these leaves.
    pub(super) fn first(leaves: Leaves) -> Self {
        Self::new(Vec::new(), None, leaves)
    }

    /// Starts the recomputation with these passes, on the graph of `anchor`, in `backward`.
    pub(super) fn again(
        passes: Vec<Arc<UnitPass>>,
        anchor: DispatchTensor,
        backward: BackwardId,
        leaves: Leaves,
    ) -> Self {
        let again = RecomputePass { entered: Cell::new(0), anchor, backward, reduced: RefCell::default() };
        Self::new(passes, Some(again), leaves)
    }

    fn new(passes: Vec<Arc<UnitPass>>, again: Option<RecomputePass>, leaves: Leaves) -> Self {
        let frame = FRAME.with_borrow_mut(|frame| {
            let inside = Rc::new(RecomputeContext { passes: RefCell::new(passes), again, around: frame.take() });
            frame.insert(inside).clone()
        });
        Self { frame, _leaves: KnownLeaves::new(leaves) }
    }

    /// Returns the passes that were entered.
    pub(super) fn passes(&self) -> Vec<Arc<UnitPass>> {
        self.frame.passes.borrow().clone()
    }

    /// Returns true if the recomputation has entered as many passes as the first run.
    pub(super) fn has_entered_all(&self) -> bool {
        let entered = self.frame.again.as_ref().map_or(0, |again| again.entered.get());
        entered == self.frame.passes.borrow().len()
    }

    /// Takes the gradients for leaves outside the block.
    pub(super) fn take_reduced(&self) -> Reduced {
        self.frame.again.as_ref().map(|again| mem::take(&mut *again.reduced.borrow_mut())).unwrap_or_default()
    }
}

impl Drop for RecomputeGuard {
    fn drop(&mut self) {
        FRAME.set(self.frame.around.clone());
    }
}
