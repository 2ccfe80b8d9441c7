//! One step of a change of layout, forward, on local tensors without autodiff.

use burn::tensor::Tensor;

use super::collective::{all_gather, all_to_all, single};
use super::local::{as_float, cut_dim, pad_dim, zeros};
use super::undo::{Reduced, Undo, UndoKind};
use super::{DTensorSpec, Kind};
use crate::Result;
use crate::comm::{Call, ReduceOp, Sharded};
use crate::placement::{PartialOp, Step, chunk};

/// Runs `step` on a `local` tensor laid out as `before`, and says how to undo it on a gradient.
///
/// With `tracked`, the undo keeps the values that the gradient depends on.
///
/// # Collective
/// Over the step's mesh dimension.
pub(super) fn run<const D: usize, K: Kind>(
    step: Step,
    before: &DTensorSpec,
    local: Tensor<D, K>,
    call: Call,
    tracked: bool,
) -> Result<(Tensor<D, K>, Undo<D>)> {
    let comm = before.mesh().communicator(step.mesh_dim())?;
    let own = |len| chunk(len, comm.group().size(), comm.group().rank());
    let keep = |tensor: &Tensor<D, K>| tracked.then(|| as_float(tensor.clone()));
    let (local, kind) = match step {
        Step::AllGather { mesh_dim, dim } => {
            let len = before.parent_len(mesh_dim);
            let whole = all_gather(comm.as_ref(), call, local, dim, len)?;
            (whole, UndoKind::Cut { dim, len })
        }
        Step::Slice { dim, .. } => {
            let len = local.dims()[dim];
            (cut_dim(local, dim, own(len)), UndoKind::AllGather { dim, len })
        }
        Step::AllReduce { op, .. } => {
            let kept = keep(&local);
            let work = comm.all_reduce(call, vec![local.into_dispatch()], reduce_op(op));
            let whole = single(work)?;
            let reduced = Reduced::new(op, kept, keep(&whole));
            (whole, UndoKind::AllReduce { reduced })
        }
        Step::ReduceScatter { dim, op, .. } => {
            let len = local.dims()[dim];
            let kept = keep(&local);
            let whole = Sharded { tensor: local.into_dispatch(), dim, len };
            let piece = single(comm.reduce_scatter(call, vec![whole], reduce_op(op)))?;
            let reduced = Reduced::new(op, kept, keep(&piece));
            (piece, UndoKind::ReduceScatter { dim, len, reduced })
        }
        Step::AllToAll { mesh_dim, from, to } => {
            let len = before.parent_len(mesh_dim);
            let undo = UndoKind::AllToAll { from: to, len: local.dims()[to], to: from };
            (all_to_all(comm.as_ref(), call, local, from, len, to)?, undo)
        }
        Step::ZeroOthers { .. } => {
            let first = comm.group().rank() == 0;
            let local = if first { local } else { zeros(local.shape(), &local) };
            (local, UndoKind::Nothing)
        }
        Step::ZeroPad { mesh_dim, dim } => {
            let len = before.parent_len(mesh_dim);
            (pad_dim(local, dim, own(len), len), UndoKind::Cut { dim, len })
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
