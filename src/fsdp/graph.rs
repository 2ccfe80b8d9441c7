//! A unit's nodes in the autodiff graph.
//!
//! ```text
//!   shard leaf ──┬─> token ──┬────────────> whole weights ──> the unit's operations ──> LeaveUnit ─> output
//!   input ───────┘           └─> EnterUnit ─────────────────────────┘
//! ```
//!
//! burn runs backward by depth, deepest first. The token is one step above the unit's input, the
//! whole weights one step deeper: so their gradients are all collected when the token's turn
//! comes, right before the operation that made the input. There the unit is reduced, in one
//! reduce-scatter, and its gradients go straight to the shards' leaves. Without the token every
//! whole gradient would stay alive to the end of backward.
//!
//! A parameter that tensor-parallel ranks hold whole may have a second node, [`Term`], for
//! computations that differ between them: of what is collected there each rank has a term.
//!
//! [`EnterUnit`] and [`LeaveUnit`] are identities the graph retains. Under gradient checkpointing
//! no recomputation crosses them, so one unit at a time is gathered again.

use std::sync::Arc;

use burn::backend::ops::FloatTensorOps;
use burn::backend::{Dispatch, DispatchDevice, DispatchTensor, TensorMetadata};
use burn::tensor::{DType, Shape};
use parking_lot::Mutex;

use super::pass::Pass;
use super::storage;
use crate::autodiff::{BackwardStep, GraphOp, Retain};

/// A tensor's metadata: enough to make zeros like it.
#[derive(Debug)]
struct Like {
    shape: Shape,
    dtype: DType,
    device: DispatchDevice,
}

/// Ties a unit's weights to its place in the graph. Parents: a shard's leaf or the token so far,
/// and a tracked input if there is one.
#[derive(Debug)]
pub(super) struct Token {
    pass: Arc<Pass>,
    /// Number and metadata of the input this link ties.
    input: Option<(usize, Like)>,
    /// Whether the unit's weights hang on this link.
    last: bool,
}

impl Token {
    pub(super) fn new(pass: &Arc<Pass>, input: Option<(usize, &DispatchTensor)>, last: bool) -> Arc<Self> {
        let input = input.map(|(number, tensor)| {
            let device = tensor.device().inner();
            (number, Like { shape: tensor.shape(), dtype: tensor.dtype(), device })
        });
        Arc::new(Self { pass: pass.clone(), input, last })
    }
}

impl GraphOp for Token {
    fn forward(&self, parents: &[DispatchTensor]) -> DispatchTensor {
        let parent = &parents[0];
        Dispatch::float_zeros([1].into(), &parent.device(), parent.dtype().into())
    }

    fn backward(&self, step: &mut BackwardStep<'_>) {
        if self.last {
            for (leaf, grad) in self.pass.reduce() {
                step.give_to(leaf, grad);
            }
        }
        // Whatever made the input expects a gradient, even if the unit never used it.
        if let Some((number, like)) = &self.input
            && !self.pass.input_seen(*number)
        {
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
        self.pass.whole(self.position)
    }

    fn recompute(&self, _: &[DispatchTensor]) -> DispatchTensor {
        self.pass.whole_again(self.position)
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
        self.pass.whole_again(self.position)
    }

    fn retain(&self) -> Retain {
        self.retain
    }

    fn backward(&self, step: &mut BackwardStep<'_>) {
        self.pass.collect_term(self.position, step.take());
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

/// Identity on a tracked output. Parents: the output, the token: so that the unit is reduced on
/// this rank whenever its output is in the loss, even if no weight of it is.
///
/// Its backward comes before the unit's own: a freed unit is gathered again there, whether this
/// rank will read a weight or not, since the others may.
#[derive(Debug)]
pub(super) struct LeaveUnit {
    pub(super) pass: Arc<Pass>,
}

impl GraphOp for LeaveUnit {
    fn forward(&self, parents: &[DispatchTensor]) -> DispatchTensor {
        storage::leave(parents[0].clone())
    }

    fn backward(&self, step: &mut BackwardStep<'_>) {
        self.pass.unshard_again();
        let grad = step.take();
        step.give(0, || grad);
    }
}
