//! Forward of one step of a redistribution, or of several fused steps, on local tensors without
//! autodiff.

use burn::tensor::Tensor;

use super::collective::{Moving, all_gather, all_to_all};
use super::local::{as_float, pad_dim, slice_dim, zeros};
use super::vjp::{MeshDims, PullbackKind, ReductionVjp, StepVjp};
use super::{DTensorSpec, Kind};
use crate::Result;
use crate::comm::{Call, Communicator, ReduceOp, ShardedTensor};
use crate::placement::{PartialOp, ShardSizes, Step};

/// A step, or several fused steps, with the group of the ranks along all their mesh dimensions.
#[derive(Debug)]
pub(super) struct PlannedStep {
    mesh_dims: MeshDims,
    comm: Communicator,
    /// Index of the gradient's collective, assigned in forward: see
    /// [`Call::forward_index`](crate::comm::Call::forward_index).
    place: Option<u64>,
    /// True if the tensor is tracked on this rank.
    tracked: bool,
    action: Action,
}

/// Preparation of a step for backward.
#[derive(Debug, Clone, Copy)]
pub(super) struct Tracking {
    /// True if a rank may track the tensor. Then all ranks draw an index for the gradient's
    /// collective, also those that do not track it, so that the indices drawn later agree.
    pub draws: bool,
    /// True if this rank tracks it.
    pub tracked: bool,
}

/// A [`Step`] with its shard sizes.
#[derive(Debug)]
enum Action {
    AllGather {
        dim: usize,
        sizes: ShardSizes,
    },
    Slice {
        dim: usize,
        sizes: ShardSizes,
    },
    AllReduce {
        op: PartialOp,
    },
    ReduceScatter {
        dim: usize,
        sizes: ShardSizes,
        op: PartialOp,
    },
    AllToAll {
        from: (usize, ShardSizes),
        to: (usize, ShardSizes),
    },
    ReplicateToPartial,
    ShardToPartial {
        dim: usize,
        sizes: ShardSizes,
    },
}

/// A step whose collective, if it has one, is issued.
#[derive(Debug)]
pub(super) struct PendingStep<const D: usize, K: Kind> {
    leg: PlannedStep,
    moving: Moving<D, K>,
    /// Input of a reduction, on which its gradient may depend.
    local: Option<Tensor<D>>,
}

impl PlannedStep {
    /// Creates the step over `mesh_dims`, in shard order, that leads from `before` to `after`.
    ///
    /// It assigns the index of the gradient's collective as `tracking` says.
    pub fn new(
        step: Step,
        mesh_dims: MeshDims,
        (before, after): (&DTensorSpec, &DTensorSpec),
        Tracking { draws, tracked }: Tracking,
    ) -> Result<Self> {
        let comm = before.mesh().communicator_over(&mesh_dims)?;
        let action = match step {
            Step::AllGather { dim, .. } => Action::AllGather {
                dim,
                sizes: before.shard_sizes(&mesh_dims),
            },
            Step::Slice { dim, .. } => Action::Slice {
                dim,
                sizes: after.shard_sizes(&mesh_dims),
            },
            Step::AllReduce { op, .. } => Action::AllReduce { op },
            Step::ReduceScatter { dim, op, .. } => Action::ReduceScatter {
                dim,
                sizes: after.shard_sizes(&mesh_dims),
                op,
            },
            Step::AllToAll { from, to, .. } => Action::AllToAll {
                from: (from, before.shard_sizes(&mesh_dims)),
                to: (to, after.shard_sizes(&mesh_dims)),
            },
            Step::ReplicateToPartial { .. } => Action::ReplicateToPartial,
            Step::ShardToPartial { dim, .. } => Action::ShardToPartial {
                dim,
                sizes: before.shard_sizes(&mesh_dims),
            },
        };
        let place = draws.then(|| comm.next_forward_index());
        Ok(Self {
            mesh_dims,
            comm,
            place,
            tracked,
            action,
        })
    }

    /// Returns true if the step communicates.
    pub fn is_collective(&self) -> bool {
        !matches!(
            self.action,
            Action::Slice { .. } | Action::ReplicateToPartial | Action::ShardToPartial { .. }
        )
    }

    /// Returns the VJP of the step if it is an all-gather.
    pub fn gather_pullback<const D: usize>(self) -> Option<StepVjp<D>> {
        let Self {
            mesh_dims,
            comm,
            place,
            action,
            ..
        } = self;
        let Action::AllGather { dim, sizes } = action else {
            return None;
        };
        Some(StepVjp {
            mesh_dims,
            comm,
            place,
            kind: PullbackKind::Slice { dim, sizes },
        })
    }

    /// Starts the step with a `local` tensor. If the step is tracked, the tensors that its gradient
    /// depends on are kept.
    ///
    /// # Collective
    /// Over the step's mesh dimensions.
    pub fn start<const D: usize, K: Kind>(
        self,
        local: Tensor<D, K>,
        call: Call,
    ) -> PendingStep<D, K> {
        let comm = &self.comm;
        let own = |sizes: &ShardSizes| sizes.range(comm.group().size(), comm.group().rank());
        let reduces = matches!(
            self.action,
            Action::AllReduce { .. } | Action::ReduceScatter { .. }
        );
        let kept = (reduces && self.tracked).then(|| as_float(local.clone()));
        let moving = match &self.action {
            Action::AllGather { dim, sizes } => all_gather(comm, call, local, *dim, sizes.clone()),
            Action::Slice { dim, sizes } => Moving::There(slice_dim(local, *dim, own(sizes))),
            Action::AllReduce { op } => {
                Moving::Many(comm.all_reduce(call, vec![local.into_dispatch()], reduce_op(*op)))
            }
            Action::ReduceScatter { dim, sizes, op } => {
                let full = ShardedTensor {
                    tensor: local.into_dispatch(),
                    dim: *dim,
                    sizes: sizes.clone(),
                };
                Moving::Many(comm.reduce_scatter(call, vec![full], reduce_op(*op)))
            }
            Action::AllToAll { from, to } => {
                all_to_all(comm, call, local, from.clone(), to.clone())
            }
            Action::ReplicateToPartial if comm.group().rank() == 0 => Moving::There(local),
            Action::ReplicateToPartial => Moving::There(zeros(local.shape(), &local)),
            Action::ShardToPartial { dim, sizes } => {
                Moving::There(pad_dim(local, *dim, own(sizes), sizes.total()))
            }
        };
        PendingStep {
            leg: self,
            moving,
            local: kept,
        }
    }
}

impl<const D: usize, K: Kind> PendingStep<D, K> {
    /// Returns true if [`wait`](Self::wait) would return without blocking on other ranks.
    pub fn is_complete(&self) -> bool {
        self.moving.is_complete()
    }

    /// Waits for the step. Returns its result, and the VJP that computes the gradient of its input.
    pub fn wait(self) -> Result<(Tensor<D, K>, StepVjp<D>)> {
        let Self {
            leg:
                PlannedStep {
                    mesh_dims,
                    comm,
                    place,
                    action,
                    ..
                },
            moving,
            local,
        } = self;
        let there = moving.wait()?;
        let full = local.is_some().then(|| as_float(there.clone()));
        let kind = match action {
            Action::AllGather { dim, sizes } | Action::ShardToPartial { dim, sizes } => {
                PullbackKind::Slice { dim, sizes }
            }
            Action::Slice { dim, sizes } => PullbackKind::AllGather { dim, sizes },
            Action::AllReduce { op } => PullbackKind::AllReduce {
                reduced: ReductionVjp::new(op, local, full),
            },
            Action::ReduceScatter { dim, sizes, op } => PullbackKind::ReduceScatter {
                dim,
                sizes,
                reduced: ReductionVjp::new(op, local, full),
            },
            Action::AllToAll { from, to } => PullbackKind::AllToAll { from: to, to: from },
            Action::ReplicateToPartial => PullbackKind::Nothing,
        };
        Ok((
            there,
            StepVjp {
                mesh_dims,
                comm,
                place,
                kind,
            },
        ))
    }
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
