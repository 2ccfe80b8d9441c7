//! One step of a change of layout, forward, on local tensors without autodiff.

use burn::tensor::Tensor;

use super::collective::{all_gather, all_to_all, single};
use super::local::{as_float, cut_dim, pad_dim, zeros};
use super::undo::{Reduced, Undo, UndoKind};
use super::{DTensorSpec, Kind};
use crate::Result;
use crate::comm::{Call, ReduceOp, Sharded};
use crate::placement::{Cut, PartialOp, Step};

/// Runs `step`, from `before` to `after`, on a `local` tensor, and says how to undo it on a gradient.
///
/// With `tracked`, the undo keeps the values that the gradient depends on.
///
/// # Collective
/// Over the step's mesh dimension.
pub(super) fn run<const D: usize, K: Kind>(
    step: Step,
    (before, after): (&DTensorSpec, &DTensorSpec),
    local: Tensor<D, K>,
    call: Call,
    tracked: bool,
) -> Result<(Tensor<D, K>, Undo<D>)> {
    let comm = before.mesh().communicator(step.mesh_dim())?;
    let own = |cut: &Cut| cut.range(comm.group().size(), comm.group().rank());
    let keep = |tensor: &Tensor<D, K>| tracked.then(|| as_float(tensor.clone()));
    let (local, kind) = match step {
        Step::AllGather { mesh_dim, dim } => {
            let cut = before.cut(mesh_dim);
            let whole = all_gather(comm.as_ref(), call, local, dim, cut.clone())?;
            (whole, UndoKind::Slice { dim, cut })
        }
        Step::Slice { mesh_dim, dim } => {
            let cut = after.cut(mesh_dim);
            (cut_dim(local, dim, own(&cut)), UndoKind::AllGather { dim, cut })
        }
        Step::AllReduce { op, .. } => {
            let kept = keep(&local);
            let work = comm.all_reduce(call, vec![local.into_dispatch()], reduce_op(op));
            let whole = single(work)?;
            let reduced = Reduced::new(op, kept, keep(&whole));
            (whole, UndoKind::AllReduce { reduced })
        }
        Step::ReduceScatter { mesh_dim, dim, op } => {
            let cut = after.cut(mesh_dim);
            let kept = keep(&local);
            let whole = Sharded { tensor: local.into_dispatch(), dim, cut: cut.clone() };
            let piece = single(comm.reduce_scatter(call, vec![whole], reduce_op(op)))?;
            let reduced = Reduced::new(op, kept, keep(&piece));
            (piece, UndoKind::ReduceScatter { dim, cut, reduced })
        }
        Step::AllToAll { mesh_dim, from, to } => {
            let (from, to) = ((from, before.cut(mesh_dim)), (to, after.cut(mesh_dim)));
            let undo = UndoKind::AllToAll { from: to.clone(), to: from.clone() };
            (all_to_all(comm.as_ref(), call, local, from, to)?, undo)
        }
        Step::ZeroOthers { .. } => {
            let first = comm.group().rank() == 0;
            let local = if first { local } else { zeros(local.shape(), &local) };
            (local, UndoKind::Nothing)
        }
        Step::ZeroPad { mesh_dim, dim } => {
            let cut = before.cut(mesh_dim);
            (pad_dim(local, dim, own(&cut), cut.total()), UndoKind::Slice { dim, cut })
        }
    };
    let (mesh_dim, comm) = (step.mesh_dim(), comm.clone());
    let place = tracked.then(|| comm.draw());
    Ok((local, Undo { mesh_dim, comm, place, kind }))
}

fn reduce_op(op: PartialOp) -> ReduceOp {
    match op {
        PartialOp::Sum => ReduceOp::Sum,
        PartialOp::Avg => ReduceOp::Avg,
        PartialOp::Min => ReduceOp::Min,
        PartialOp::Max => ReduceOp::Max,
        PartialOp::Product => ReduceOp::Product,
    }
}
