//! A unit's nodes in the autodiff graph.
//!
//! ```text
//!   shard leaf ─┬─> Flush ──┐
//!               │   input ──┼─> token ──┬────────────> whole weights ──> the unit's operations ──> LeaveUnit ─> output
//!               │   earlier ┘           └─> EnterUnit ─────────────────────────┘
//!               └──────────────────────────> (parent of each of its whole weights)
//! ```
//!
//! burn runs backward by depth, deepest first. The token is one step above the unit's input, the
//! whole weights one step deeper: so their gradients are all collected when the token's turn
//! comes, right before the operation that made the input. From there on the unit may be reduced, in
//! one reduce-scatter, and its gradients go straight to the shards' leaves. Without the token every
//! whole gradient would stay alive to the end of backward.
//!
//! Depth alone is no order between ranks: see [`order`](super::order). Inside an enclosing unit, whose outputs have
//! one backward anyway, the last token before is another parent: so that units come up in reverse
//! order of entry whatever their depth, and all of them do, on every rank, if an output of the
//! enclosing unit is in the loss.
//!
//! A parameter that tensor-parallel ranks hold whole may have a second node, [`Term`], for
//! computations that differ between them: of what is collected there each rank has a term.
//!
//! [`EnterUnit`] and [`LeaveUnit`] are identities the graph retains. Under gradient checkpointing
//! no recomputation crosses them, so one unit at a time is gathered again.

use std::sync::{Arc, Weak};

use burn::backend::ops::FloatTensorOps;
use burn::backend::{Dispatch, DispatchDevice, DispatchTensor, TensorMetadata};
use burn::tensor::{DType, Shape};
use parking_lot::Mutex;

use super::buffer::UnitBuffer;
use super::pass::Pass;
use crate::autodiff::{BackwardStep, GraphOp, Retain};

/// A tensor's metadata: enough to make zeros like it.
#[derive(Debug)]
struct Like {
    shape: Shape,
    dtype: DType,
    device: DispatchDevice,
}

/// Sees the end of backward: of depth 1, so that every token has come up before. Parent: a leaf.
///
/// Until then it keeps the pass alive, whose gradients may be held.
#[derive(Debug)]
pub(super) struct Flush {
    pub(super) pass: Arc<Pass>,
}

impl GraphOp for Flush {
    fn forward(&self, parents: &[DispatchTensor]) -> DispatchTensor {
        nothing(&parents[0])
    }

    fn backward(&self, step: &mut BackwardStep<'_>) {
        reduce(self.pass.passes.flush(), step);
    }
}

/// Reduces these passes one after another: their gradients go to the shards' leaves.
fn reduce(due: Vec<Weak<Pass>>, step: &mut BackwardStep<'_>) {
    for pass in due.iter().filter_map(Weak::upgrade) {
        for (leaf, grad) in pass.reduce() {
            step.give_to(leaf, grad);
        }
    }
}

/// Whether one operation can have both as parents.
pub(super) fn one_graph(a: &DispatchTensor, b: &DispatchTensor) -> bool {
    a.autodiff == b.autodiff && a.device() == b.device()
}

/// A node that only has a place in the graph.
fn nothing(like: &DispatchTensor) -> DispatchTensor {
    Dispatch::float_zeros([1].into(), &like.device(), like.dtype().into())
}

/// Ties a unit's weights to its place in the graph. Parents: a shard's [`Flush`] or the token so far,
/// and what it is tied to.
#[derive(Debug)]
pub(super) struct Token {
    pass: Arc<Pass>,
    /// Number and metadata of the input this link ties, if it ties one.
    input: Option<(usize, Like)>,
    /// Whether the unit's weights hang on this link.
    last: bool,
}

impl Token {
    /// A link to a tracked input, or else to nothing or an earlier token.
    pub(super) fn new(pass: &Arc<Pass>, input: Option<&DispatchTensor>, last: bool) -> Arc<Self> {
        let input = input.map(|tensor| {
            let device = tensor.device().inner();
            (pass.add_input(), Like { shape: tensor.shape(), dtype: tensor.dtype(), device })
        });
        Arc::new(Self { pass: pass.clone(), input, last })
    }
}

impl GraphOp for Token {
    fn forward(&self, parents: &[DispatchTensor]) -> DispatchTensor {
        nothing(&parents[0])
    }

    fn backward(&self, step: &mut BackwardStep<'_>) {
        if self.last {
            reduce(self.pass.finish(), step);
        }
        // Whatever made the input expects a gradient, even if the unit never used it.
        if let Some((number, like)) = &self.input
            && !self.pass.input_seen(*number)
        {
            self.pass.passes.pad();
            step.give(1, || Dispatch::float_zeros(like.shape.clone(), &like.device, like.dtype.into()));
        }
    }
}

/// A gathered parameter. Parents: its shard's leaf, the token.
#[derive(Debug)]
pub(super) struct Whole {
    pub(super) pass: Arc<Pass>,
    pub(super) position: usize,
    pub(super) retain: Retain,
}

impl GraphOp for Whole {
    fn forward(&self, _: &[DispatchTensor]) -> DispatchTensor {
        self.pass.buffer.view(self.position)
    }

    fn recompute(&self, _: &[DispatchTensor]) -> DispatchTensor {
        self.pass.buffer.view_again(self.position)
    }

    fn retain(&self) -> Retain {
        self.retain
    }

    fn backward(&self, step: &mut BackwardStep<'_>) {
        self.pass.collect(self.position, step.take());
    }
}

/// A gathered parameter whose gradient differs between the tensor-parallel ranks. Parents: its
/// shard's leaf, the token.
#[derive(Debug)]
pub(super) struct Term {
    pub(super) pass: Arc<Pass>,
    pub(super) position: usize,
    pub(super) retain: Retain,
    /// The gathered value, until the node is made.
    pub(super) value: Mutex<Option<DispatchTensor>>,
}

impl GraphOp for Term {
    fn forward(&self, _: &[DispatchTensor]) -> DispatchTensor {
        self.value.lock().take().expect("a node of the graph is made once")
    }

    fn recompute(&self, _: &[DispatchTensor]) -> DispatchTensor {
        self.pass.buffer.view_again(self.position)
    }

    fn retain(&self) -> Retain {
        self.retain
    }

    fn backward(&self, step: &mut BackwardStep<'_>) {
        self.pass.buffer.reduce_in_term(self.position, step.take());
    }
}

/// Identity on a tracked input. Parents: the input, the token: so it is deeper than the token.
#[derive(Debug)]
pub(super) struct EnterUnit {
    pub(super) pass: Arc<Pass>,
    pub(super) input: usize,
}

impl GraphOp for EnterUnit {
    fn forward(&self, parents: &[DispatchTensor]) -> DispatchTensor {
        parents[0].clone()
    }

    fn backward(&self, step: &mut BackwardStep<'_>) {
        self.pass.see_input(self.input);
        let grad = step.take();
        step.give(0, || grad);
    }
}

/// Identity on an output. Parents: the output, the last token: so that the unit, and those
/// inside it, are reduced on this rank whenever its output is in the loss, even if no weight of them
/// is.
///
/// Its backward comes before the unit's own: a freed unit is gathered again there.
#[derive(Debug)]
pub(super) struct LeaveUnit {
    /// `None` for a module that only encloses units.
    pass: Option<Arc<Pass>>,
}

impl LeaveUnit {
    pub(super) fn new(pass: Option<Arc<Pass>>) -> Arc<Self> {
        Arc::new(Self { pass })
    }
}

impl GraphOp for LeaveUnit {
    fn forward(&self, parents: &[DispatchTensor]) -> DispatchTensor {
        UnitBuffer::copy_out(parents[0].clone())
    }

    fn backward(&self, step: &mut BackwardStep<'_>) {
        if let Some(pass) = &self.pass {
            pass.buffer.gather_again();
        }
        let grad = step.take();
        step.give(0, || grad);
    }
}
