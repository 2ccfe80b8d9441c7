//! [`sweep`]: frees forwards that no backward follows.

use std::sync::Arc;

use burn::backend::DispatchTensor;
use burn::tensor::Tensor;

use super::backward_nodes::{nothing, own_leaf, ran};
use super::recompute::context;
use super::thread::scheduler;
use super::unit::Unit;
#[cfg(doc)]
use super::unit_pass::LATER;
use crate::autodiff::{self, BackwardStep, GraphOp};

/// A node whose backward makes burn free a pass. Parent: the pass's own leaf.
#[derive(Debug)]
struct Sweep;

impl GraphOp for Sweep {
    fn forward(&self, parents: &[DispatchTensor]) -> DispatchTensor {
        nothing(&parents[0])
    }

    fn backward(&self, step: &mut BackwardStep<'_>) {
        ran("Sweep", None, step);
    }
}

/// Number of forwards through a unit that may wait for a backward before they are swept. Forwards
/// that never have one count for good; then each entry looks for passes that are due.
const FEW_PASSES: u64 = 2;

/// Frees this thread's passes on which no tensor depends, if several forwards through one of these
/// units wait for a backward. Call it only while no unit is open. It does nothing in a checkpointed
/// block, or while a backward runs.
///
/// A pass is swept when one more forward through its unit has ended. If it is still needed then,
/// such as those of several micro-batches in a pipeline, it is swept next when [`LATER`] times as
/// many have. All numbers are the program's: when a pass is swept does not depend on which passes
/// burn has dropped on this rank.
///
/// burn frees the saved tensors of a graph that the program has dropped in the next backward that
/// reaches the graph. So forwards in training mode without a backward, such as an evaluation
/// without `valid()`, would keep the memory of gathered units until then, one forward after
/// another.
///
/// To prevent this, every pass depends on a separate leaf, which its thread holds. When a unit is
/// entered while earlier passes through it have had no backward, a backward of a single node runs
/// on the leaf of each pass of the thread that is due. It computes nothing, and burn then frees the
/// pass unless a tensor of the program depends on it.
///
/// ```text
///   shard's leaf ──┐
///   own leaf ──┬───┴> RootPostBackward ──> PostBackward ──> ..      the pass
///              └────> Sweep                       its backward frees the pass, unless a tensor depends on it
/// ```
pub(super) fn sweep<'a>(units: impl Iterator<Item = &'a Arc<Unit>>) {
    if context::is_any() || autodiff::is_in_backward() {
        return;
    }
    let mut is_due = false;
    for unit in units.filter(|unit| unit.counts.waiting() >= FEW_PASSES) {
        unit.counts.count_sweep();
        is_due = true;
    }
    if !is_due {
        return;
    }
    let passes = scheduler();
    for (pass, leaf) in passes.due_for_sweep() {
        // An earlier one of these backwards may have freed it.
        if pass.strong_count() == 0 {
            continue;
        }
        // Backward consumes the leaf, so the pass gets another one first.
        let next = own_leaf(&leaf);
        drop(autodiff::binary(
            leaf.clone(),
            next.clone(),
            Arc::new(Sweep),
        ));
        passes.set_own_leaf(&pass, next);
        drop(Tensor::<1>::from_dispatch(autodiff::unary(leaf, Arc::new(Sweep))).backward());
    }
}
