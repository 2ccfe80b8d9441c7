//! One step of a change of layout, forward, on local tensors without autodiff.

use burn::tensor::Tensor;

use super::collective::{all_gather, all_to_all, single};
use super::local::{as_float, cut_dim, pad_dim, zeros};
use super::pullback::{Dims, Pullback, PullbackKind, Reduced};
use super::{DTensorSpec, Kind};
use crate::Result;
use crate::comm::{Call, ReduceOp, Sharded};
use crate::placement::{Cut, PartialOp, Step};

/// Runs `step`, from `before` to `after`, on a `local` tensor, and says how to pull a gradient back through it.
///
/// With `tracked`, the pullback keeps the values that the gradient depends on.
///
/// A reduction is over all of `mesh_dims` at once, any other step over its own.
///
/// # Collective
/// Over `mesh_dims`.
pub(super) fn run<const D: usize, K: Kind>(
    step: Step,
    mesh_dims: Dims,
    (before, after): (&DTensorSpec, &DTensorSpec),
    local: Tensor<D, K>,
    call: Call,
    tracked: bool,
) -> Result<(Tensor<D, K>, Pullback<D>)> {
    let comm = before.mesh().communicator_over(&mesh_dims)?;
    let own = |cut: &Cut| cut.range(comm.group().size(), comm.group().rank());
    let keep = |tensor: &Tensor<D, K>| tracked.then(|| as_float(tensor.clone()));
    let (local, kind) = match step {
        Step::AllGather { mesh_dim, dim } => {
            let cut = before.cut(mesh_dim);
            let whole = all_gather(comm.as_ref(), call, local, dim, cut.clone())?;
            (whole, PullbackKind::Slice { dim, cut })
        }
        Step::Slice { mesh_dim, dim } => {
            let cut = after.cut(mesh_dim);
            (cut_dim(local, dim, own(&cut)), PullbackKind::AllGather { dim, cut })
        }
        Step::AllReduce { op, .. } => {
            let kept = keep(&local);
            let work = comm.all_reduce(call, vec![local.into_dispatch()], reduce_op(op));
            let whole = single(work)?;
            let reduced = Reduced::new(op, kept, keep(&whole));
            (whole, PullbackKind::AllReduce { reduced })
        }
        Step::ReduceScatter { mesh_dim, dim, op } => {
            let cut = after.cut(mesh_dim);
            let kept = keep(&local);
            let whole = Sharded { tensor: local.into_dispatch(), dim, cut: cut.clone() };
            let piece = single(comm.reduce_scatter(call, vec![whole], reduce_op(op)))?;
            let reduced = Reduced::new(op, kept, keep(&piece));
            (piece, PullbackKind::ReduceScatter { dim, cut, reduced })
        }
        Step::AllToAll { mesh_dim, from, to } => {
            let (from, to) = ((from, before.cut(mesh_dim)), (to, after.cut(mesh_dim)));
            let pullback = PullbackKind::AllToAll { from: to.clone(), to: from.clone() };
            (all_to_all(comm.as_ref(), call, local, from, to)?, pullback)
        }
        Step::ZeroOthers { .. } => {
            let first = comm.group().rank() == 0;
            let local = if first { local } else { zeros(local.shape(), &local) };
            (local, PullbackKind::Nothing)
        }
        Step::ZeroPad { mesh_dim, dim } => {
            let cut = before.cut(mesh_dim);
            (pad_dim(local, dim, own(&cut), cut.total()), PullbackKind::Slice { dim, cut })
        }
    };
    let place = tracked.then(|| comm.draw());
    Ok((local, Pullback { mesh_dims, comm, place, kind }))
}

/// How to pull a gradient back through the all-gather over `mesh_dim` of what is laid out as `before`.
pub(super) fn gather_pullback<const D: usize>(
    before: &DTensorSpec,
    mesh_dim: usize,
    dim: usize,
) -> Result<Pullback<D>> {
    let comm = before.mesh().communicator(mesh_dim)?.clone();
    let place = Some(comm.draw());
    let kind = PullbackKind::Slice { dim, cut: before.cut(mesh_dim) };
    Ok(Pullback { mesh_dims: Dims::from_slice(&[mesh_dim]), comm, place, kind })
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
