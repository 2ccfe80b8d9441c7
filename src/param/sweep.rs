//! Frees the memory of forwards that no backward follows.
//!
//! burn frees the saved tensors of a graph that the program has dropped in the next backward that reaches the
//! graph. So forwards in training mode without a backward, such as an evaluation without `valid()`, would keep the
//! memory of gathered units until then, one forward after another.
//!
//! To prevent this, every pass depends on a separate leaf, which its thread holds. When a unit is entered while
//! earlier passes through it have had no backward, a backward of a single node runs on the leaf of each. It
//! computes nothing, and burn then frees the pass unless a tensor of the program depends on it.
//!
//! ```text
//!   shard's leaf ──┐
//!   own leaf ──┬───┴> RootPostBackward ──> PostBackward ──> ..      the pass
//!              └────> Sweep                       its backward frees the pass, unless a tensor depends on it
//! ```

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use burn::backend::{DispatchTensor, TensorMetadata};
use burn::tensor::{Device, Tensor};

use super::backward_nodes::nothing;
use super::unit::{FEW_PASSES, Unit};
use super::unit_pass::BackwardScheduler;
use crate::autodiff::{self, BackwardStep, GraphOp};

/// A node whose backward makes burn free a pass. Parent: the pass's own leaf.
#[derive(Debug)]
struct Sweep;

impl GraphOp for Sweep {
    fn forward(&self, parents: &[DispatchTensor]) -> DispatchTensor {
        nothing(&parents[0])
    }

    fn backward(&self, _: &mut BackwardStep<'_>) {}
}

/// Returns a new leaf for one pass, in the graph of `like`.
pub(super) fn own_leaf(like: &DispatchTensor) -> DispatchTensor {
    autodiff::leaf(&Device::new(like.device()).inner(), like, true)
}

/// Frees the passes through these units on which no tensor depends, for units that may have several such passes.
/// Call it only while none of these units is open and no backward runs.
///
/// If passes are still needed, such as those of several micro-batches in a pipeline, the number of passes that
/// triggers the next sweep is doubled.
pub(super) fn sweep<'a>(passes: &BackwardScheduler, units: impl Iterator<Item = &'a Arc<Unit>>) {
    for unit in units {
        if unit.left.load(Relaxed) < unit.swept_at.load(Relaxed) {
            continue;
        }
        for (pass, leaf) in passes.leaves_of(unit) {
            if pass.strong_count() == 0 {
                continue;
            }
            // Backward consumes the leaf, so the pass gets another one first.
            let next = own_leaf(&leaf);
            drop(autodiff::binary(leaf.clone(), next.clone(), Arc::new(Sweep)));
            passes.hang(&pass, next);
            drop(Tensor::<1>::from_dispatch(autodiff::unary(leaf, Arc::new(Sweep))).backward());
        }
        unit.swept_at.store(FEW_PASSES.max(2 * unit.left.load(Relaxed)), Relaxed);
    }
}
