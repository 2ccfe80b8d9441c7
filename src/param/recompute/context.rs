//! [`RecomputeContext`]: state of a checkpointed block while it runs.
//!
//! | run | graph | units inside |
//! |---|---|---|
//! | first, in forward | none | are entered, and their passes are recorded in order |
//! | recomputation, in backward | private | reuse the recorded passes, in that order |
//!
//! A nested block runs once with the first run of the enclosing block, which has no graph. When the
//! enclosing block is recomputed, the nested one runs its own first run and later its own
//! recomputation.

use std::cell::{Cell, RefCell};
use std::mem;
use std::rc::Rc;
use std::sync::Arc;

use burn::backend::DispatchTensor;

use crate::autodiff::BackwardId;
use crate::param::copied_leaves::{CopiedLeaves, Leaves};
use crate::param::reduction::Reduced;
use crate::param::unit_pass::UnitPass;

thread_local! {
    /// The innermost checkpointed block that runs on the thread.
    static BLOCK: RefCell<Option<Rc<RecomputeContext>>> = const { RefCell::new(None) };
    /// Number of blocks that run as if they were not checkpointed, because nothing is tracked on
    /// this rank, while other ranks may checkpoint them.
    static UNTRACKED_BLOCKS: Cell<usize> = const { Cell::new(0) };
}

struct RecomputeContext {
    /// The passes that were recorded in the first run, or that the recomputation reuses.
    passes: RefCell<Vec<Arc<UnitPass>>>,
    /// State of the recomputation; `None` in the first run.
    recomputation: Option<RecomputePass>,
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

fn current<T>(f: impl FnOnce(&RecomputeContext) -> T) -> Option<T> {
    let block = BLOCK.with_borrow(Clone::clone)?;
    Some(f(&block))
}

/// Returns true if a checkpointed block is running on this thread.
pub(crate) fn is_any() -> bool {
    BLOCK.with_borrow(Option::is_some)
}

/// Returns true if the innermost block is in its first run.
pub(crate) fn is_first() -> bool {
    BLOCK.with_borrow(|block| {
        block
            .as_ref()
            .is_some_and(|block| block.recomputation.is_none())
    })
}

/// Returns a leaf of the private graph if the innermost block is being recomputed.
pub(crate) fn anchor() -> Option<DispatchTensor> {
    current(|block| {
        block
            .recomputation
            .as_ref()
            .map(|recomputation| recomputation.anchor.clone())
    })
    .flatten()
}

/// Pass of the unit that is entered next.
pub(crate) enum Next {
    /// A new pass.
    New,
    /// A pass that forward recorded.
    Recorded(Arc<UnitPass>),
    /// No pass: the block entered fewer units in its first run.
    None,
}

/// Returns the pass for the unit that is entered next.
pub(crate) fn next() -> Next {
    current(RecomputeContext::next).unwrap_or(Next::New)
}

/// Records a pass that is entered for the first time.
pub(crate) fn record(pass: &Arc<UnitPass>) {
    current(|block| block.passes.borrow_mut().push(pass.clone()));
}

/// Returns the backward that the program called: that of the running recomputation, or `own` if no
/// block is being recomputed. `own` is the backward to which the calling step belongs.
pub(crate) fn backward(own: BackwardId) -> BackwardId {
    current(|block| {
        block
            .recomputation
            .as_ref()
            .map(|recomputation| recomputation.backward)
    })
    .flatten()
    .unwrap_or(own)
}

/// Keeps gradients for the enclosing graph if the innermost block is being recomputed. Otherwise
/// returns them.
pub(crate) fn keep(reduced: Reduced) -> Option<Reduced> {
    let block = BLOCK.with_borrow(Clone::clone);
    match block
        .as_ref()
        .and_then(|block| block.recomputation.as_ref())
    {
        Some(recomputation) => {
            recomputation.reduced.borrow_mut().extend(reduced);
            None
        }
        None => Some(reduced),
    }
}

/// Returns true if the innermost block is being recomputed and the pass was entered outside it.
pub(crate) fn is_outside(pass: &Arc<UnitPass>) -> bool {
    let is_inside = |block: &RecomputeContext| {
        block
            .passes
            .borrow()
            .iter()
            .any(|inside| Arc::ptr_eq(inside, pass))
    };
    current(|block| block.recomputation.is_some() && !is_inside(block)).unwrap_or(false)
}

impl RecomputeContext {
    fn next(&self) -> Next {
        let next = match (&self.recomputation, &self.around) {
            (Some(recomputation), _) => {
                let at = recomputation
                    .entered
                    .replace(recomputation.entered.get() + 1);
                return self
                    .passes
                    .borrow()
                    .get(at)
                    .map_or(Next::None, |pass| Next::Recorded(pass.clone()));
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

/// Guard of a running block: the block is the innermost one of its thread until the guard is
/// dropped.
pub(super) struct RecomputeGuard {
    block: Rc<RecomputeContext>,
    _copied: CopiedLeaves,
}

impl RecomputeGuard {
    /// Starts the first run, with copies of these leaves.
    pub(super) fn first(leaves: Leaves) -> Self {
        Self::new(Vec::new(), None, leaves)
    }

    /// Starts the recomputation with these passes, on the graph of `anchor`, in `backward`.
    pub(super) fn recomputation(
        passes: Vec<Arc<UnitPass>>,
        anchor: DispatchTensor,
        backward: BackwardId,
        leaves: Leaves,
    ) -> Self {
        let recomputation = RecomputePass {
            entered: Cell::new(0),
            anchor,
            backward,
            reduced: RefCell::default(),
        };
        Self::new(passes, Some(recomputation), leaves)
    }

    fn new(
        passes: Vec<Arc<UnitPass>>,
        recomputation: Option<RecomputePass>,
        leaves: Leaves,
    ) -> Self {
        let block = BLOCK.with(|block| {
            let mut block = block.borrow_mut();
            let inside = RecomputeContext {
                passes: RefCell::new(passes),
                recomputation,
                around: block.take(),
            };
            block.insert(Rc::new(inside)).clone()
        });
        Self {
            block,
            _copied: CopiedLeaves::enter(leaves),
        }
    }

    /// Returns the passes that were entered.
    pub(super) fn passes(&self) -> Vec<Arc<UnitPass>> {
        self.block.passes.borrow().clone()
    }

    /// Returns true if the recomputation has entered as many passes as the first run.
    pub(super) fn has_entered_all(&self) -> bool {
        let entered = self
            .block
            .recomputation
            .as_ref()
            .map_or(0, |recomputation| recomputation.entered.get());
        entered == self.block.passes.borrow().len()
    }

    /// Takes the gradients for leaves outside the block.
    pub(super) fn take_reduced(&self) -> Reduced {
        self.block
            .recomputation
            .as_ref()
            .map(|recomputation| mem::take(&mut *recomputation.reduced.borrow_mut()))
            .unwrap_or_default()
    }
}

impl Drop for RecomputeGuard {
    fn drop(&mut self) {
        BLOCK.replace(self.block.around.clone());
    }
}

/// Guard of a block that runs as if it were not checkpointed, because nothing is tracked on this
/// rank. Other ranks may track something and checkpoint it, so the units inside are gathered for
/// backward as if it were.
pub(super) struct UntrackedBlock(());

impl UntrackedBlock {
    pub(super) fn enter() -> Self {
        UNTRACKED_BLOCKS.set(UNTRACKED_BLOCKS.get() + 1);
        Self(())
    }
}

impl Drop for UntrackedBlock {
    fn drop(&mut self) {
        UNTRACKED_BLOCKS.set(UNTRACKED_BLOCKS.get() - 1);
    }
}

/// Returns true in an [`UntrackedBlock`].
pub(crate) fn is_untracked_block() -> bool {
    UNTRACKED_BLOCKS.get() > 0
}
