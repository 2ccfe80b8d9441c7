//! [`RecomputeContext`]: a checkpointed block while it computes.
//!
//! | time | computes | its units |
//! |---|---|---|
//! | first, in forward | without a graph | are entered, in an order that is recorded |
//! | again, in backward | on a graph of its own | are those that were recorded, in that order |
//!
//! A block inside another computes once with the one around it, which has no graph then; and when that computes again,
//! for the first time and again as any other does.

use std::cell::{Cell, RefCell};
use std::mem;
use std::rc::Rc;
use std::sync::Arc;

use burn::backend::DispatchTensor;

use super::leaves::{KnownLeaves, Leaves};
use crate::autodiff::BackwardId;
use crate::param::unit_pass::{Reduced, UnitPass};

struct RecomputeContext {
    /// The passes that were entered in it, or that are entered again.
    passes: RefCell<Vec<Arc<UnitPass>>>,
    /// `None` for the first time.
    again: Option<RecomputePass>,
    around: Option<Rc<RecomputeContext>>,
}

struct RecomputePass {
    /// How many passes were entered again.
    entered: Cell<usize>,
    /// A leaf of its graph.
    anchor: DispatchTensor,
    /// The backward that the program has called.
    backward: BackwardId,
    /// Gradients for leaves outside.
    reduced: RefCell<Reduced>,
}

thread_local! {
    static FRAME: RefCell<Option<Rc<RecomputeContext>>> = const { RefCell::new(None) };
}

fn current<T>(f: impl FnOnce(&RecomputeContext) -> T) -> Option<T> {
    let frame = FRAME.with_borrow(Clone::clone)?;
    Some(f(&frame))
}

/// Whether a block computes.
pub(in crate::param) fn is_any() -> bool {
    FRAME.with_borrow(Option::is_some)
}

/// Whether the innermost block computes for the first time.
pub(in crate::param) fn is_first() -> bool {
    FRAME.with_borrow(|frame| frame.as_ref().is_some_and(|frame| frame.again.is_none()))
}

/// The leaf to hang on, if the innermost block computes again.
pub(in crate::param) fn anchor() -> Option<DispatchTensor> {
    current(|frame| frame.again.as_ref().map(|again| again.anchor.clone())).flatten()
}

/// What is entered next.
pub(in crate::param) enum Next {
    /// A new pass.
    New,
    /// One that was recorded.
    Recorded(Arc<UnitPass>),
    /// The block has entered fewer for the first time.
    None,
}

/// What is entered next.
pub(in crate::param) fn next() -> Next {
    current(RecomputeContext::next).unwrap_or(Next::New)
}

/// The pass is entered for the first time.
pub(in crate::param) fn record(pass: &Arc<UnitPass>) {
    current(|frame| frame.passes.borrow_mut().push(pass.clone()));
}

/// The backward that the program has called, of a step of `own`.
pub(in crate::param) fn backward(own: BackwardId) -> BackwardId {
    current(|frame| frame.again.as_ref().map(|again| again.backward)).flatten().unwrap_or(own)
}

/// Keeps gradients for the graph around, if the innermost block computes again.
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

/// Whether the pass was entered outside of the innermost block, which computes again.
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

/// A block computes as long as it lives.
pub(super) struct RecomputeGuard {
    frame: Rc<RecomputeContext>,
    _leaves: KnownLeaves,
}

impl RecomputeGuard {
    /// For the first time, with copies of these leaves.
    pub(super) fn first(leaves: Leaves) -> Self {
        Self::new(Vec::new(), None, leaves)
    }

    /// Again, with these passes, on the graph of `anchor`, in `backward`.
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

    /// The passes that were entered.
    pub(super) fn passes(&self) -> Vec<Arc<UnitPass>> {
        self.frame.passes.borrow().clone()
    }

    /// Whether it has entered as many as for the first time.
    pub(super) fn has_entered_all(&self) -> bool {
        let entered = self.frame.again.as_ref().map_or(0, |again| again.entered.get());
        entered == self.frame.passes.borrow().len()
    }

    /// The gradients for leaves outside.
    pub(super) fn take_reduced(&self) -> Reduced {
        self.frame.again.as_ref().map(|again| mem::take(&mut *again.reduced.borrow_mut())).unwrap_or_default()
    }
}

impl Drop for RecomputeGuard {
    fn drop(&mut self) {
        FRAME.set(self.frame.around.clone());
    }
}
