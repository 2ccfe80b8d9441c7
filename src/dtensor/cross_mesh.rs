//! [`CrossMeshRedistribute`]: redistribution from one mesh to another.

use std::ops::Range;
use std::sync::Arc;

use burn::backend::DispatchTensor;
use burn::tensor::{DType, Shape, Slice, Tensor};
use parking_lot::Mutex;

use super::distribute::check_no_partial;
use super::kind::is_of_kind;
use super::local::{associate, is_tracked, slice};
use super::{DTensor, DTensorError, DTensorSpec, Kind};
use crate::Result;
use crate::autodiff::{self, BackwardStep, GraphOp};
use crate::comm::{Call, Communicator, Phase, TensorMeta};
use crate::error::OrUnwind;
use crate::mesh::DeviceMesh;
use crate::placement::{Layout, Placement, TensorBlock, blocks};
use crate::watch::{self, CallSite, LayoutChange};

/// Redistribution of tensors of one shape from a layout on one mesh to a layout on another mesh of
/// the same world. The meshes may have different shapes and different ranks, and may overlap.
///
/// All ranks create it with the same arguments. The plan, which lists the block that each rank
/// sends to each other rank, is computed once and serves any number of tensors. Each rank sends the
/// others only the elements that they lack, in one collective of all ranks of both meshes; ranks
/// that hold replicas share the sending. Partial values are first reduced on their own mesh.
///
/// ```
/// use burn::tensor::{DType, Tensor};
/// use burn_dtensor::dtensor::CrossMeshRedistribute;
/// use burn_dtensor::prelude::*;
/// use burn_dtensor::placement::Placement::{Replicate, Shard};
///
/// launch(Launch::threads(4), |world| {
///     let first = DeviceMesh::from_ranks(world, [0, 1], [2], ["stage 0"])?;
///     let second = DeviceMesh::from_ranks(world, [2, 3], [2], ["stage 1"])?;
///     let (rows, columns) = (Layout::new(&[2], &[Shard(0)])?, Layout::new(&[2], &[Shard(1)])?);
///     let transfer = CrossMeshRedistribute::new([6, 4], DType::F32, (&first, rows), (&second, columns))?;
///     // Ranks of the first mesh pass a tensor ..
///     let x = match world.rank() < 2 {
///         true => Some(DTensor::ones([6, 4], &first, &[Shard(0)], world.device())?),
///         false => None,
///     };
///     // .. and ranks of the second mesh receive one.
///     let y: Option<DTensor<2>> = transfer.run(x)?;
///     assert_eq!(y.is_some(), world.rank() >= 2);
///     Ok(())
/// })?;
/// # Ok::<_, burn_dtensor::Error>(())
/// ```
///
/// # Gradients
/// Between meshes of the same ranks, the redistribution is differentiable: backward sends the
/// gradient in the opposite direction. If a rank is in only one of the meshes, it has no graph
/// whose backward could run in step with the others. A tracked tensor is then an error, and the
/// result is without autodiff on every rank.
#[derive(Debug)]
pub struct CrossMeshRedistribute {
    from: (DeviceMesh, Layout),
    to: (DeviceMesh, Layout),
    shape: Shape,
    dtype: DType,
    label: Arc<str>,
    /// Communicator over all ranks of both meshes; `None` on any other rank.
    comm: Option<Communicator>,
    /// Moves of the tensor, in forward.
    there: Moves,
    /// Moves of the gradient, in backward.
    back: Arc<Moves>,
}

/// Blocks that this rank sends and receives, in one direction.
#[derive(Debug)]
struct Moves {
    /// True if any rank sends a block to another rank.
    communicates: bool,
    /// Blocks to send, each with the group rank of its recipient and its ranges in this rank's
    /// local tensor.
    gives: Vec<(usize, Vec<Range<usize>>)>,
    /// Blocks to receive, each with the group rank of its sender and its ranges in the new local
    /// tensor.
    gets: Vec<(usize, Vec<Range<usize>>)>,
    /// Shape of the local tensor that this rank receives; `None` if the rank is not in the target
    /// mesh.
    part: Option<Shape>,
}

impl CrossMeshRedistribute {
    /// Plans the redistribution of tensors of global `shape` and `dtype` between two layouts, each
    /// on its own mesh. Local.
    ///
    /// # Errors
    /// [`DTensorError::RankMismatch`] for meshes of two worlds, [`DTensorError::LayoutMesh`] and
    /// the errors of [`Layout::check_shape`], [`DTensorError::Partial`] for a target that is
    /// partial, and [`CommError::InvalidGroup`](crate::comm::CommError::InvalidGroup) if the world
    /// cannot create another group.
    pub fn new(
        shape: impl Into<Shape>,
        dtype: DType,
        (from, from_layout): (&DeviceMesh, Layout),
        (to, to_layout): (&DeviceMesh, Layout),
    ) -> Result<Self> {
        let shape = shape.into();
        let left = from.world();
        let right = to.world();
        if left.identity() != right.identity() {
            return Err(DTensorError::RankMismatch {
                left: left.to_string(),
                right: right.to_string(),
            }
            .into());
        }
        super::spec::check_layout(from, &from_layout, &shape)?;
        super::spec::check_layout(to, &to_layout, &shape)?;
        check_no_partial("CrossMeshRedistribute", to, &to_layout)?;
        let label = format!("transfer {from_layout} on {from} -> {to_layout} on {to}").into();
        let mut ranks: Vec<usize> = from.ranks().iter().chain(to.ranks()).copied().collect();
        ranks.sort_unstable();
        ranks.dedup();
        let is_member = ranks.binary_search(&from.rank()).is_ok();
        let comm = if is_member {
            Some(from.world().group(&ranks)?)
        } else {
            None
        };
        let reduced = from_layout.replaced(|_, own| {
            if own.partial_op().is_some() {
                Placement::Replicate
            } else {
                own
            }
        })?;
        let a = (from, &reduced);
        let b = (to, &to_layout);
        let there = Moves::new(a, b, &ranks, &shape);
        let back = Arc::new(Moves::new(b, a, &ranks, &shape));
        let from = (from.clone(), from_layout);
        let to = (to.clone(), to_layout);
        Ok(Self {
            from,
            to,
            shape,
            dtype,
            label,
            comm,
            there,
            back,
        })
    }

    /// Redistributes a tensor. On ranks of the source mesh, `x` is this rank's local tensor as a
    /// DTensor; on all others, `None`. Returns the DTensor on ranks of the target mesh, and `None`
    /// on all others.
    ///
    /// # Collective
    /// Every rank of both meshes, also in backward. A rank of neither mesh may call it; the call
    /// then does nothing.
    ///
    /// # Errors
    /// [`DTensorError::TransferOf`] if `x` is not a tensor of the planned shape, dtype, mesh and
    /// layout, or is `None` on a rank of the source mesh. Ranks that only receive get it too, for a
    /// wrong number of dimensions or a wrong kind. [`DTensorError::TransferTracked`] on the ranks
    /// that pass a tracked tensor; these ranks must return the error, since the other ranks wait
    /// for them until they exit. [`CommError`](crate::comm::CommError) if a collective fails.
    #[track_caller]
    pub fn run<const D: usize, K: Kind>(
        &self,
        x: Option<DTensor<D, K>>,
    ) -> Result<Option<DTensor<D, K>>> {
        self.check(x.as_ref())?;
        let Some(comm) = &self.comm else {
            return Ok(None);
        };
        let same_ranks = self.same_ranks();
        if let Some(x) = x.as_ref().filter(|x| !same_ranks && is_tracked(&x.local)) {
            let from = x.mesh().to_string();
            let to = self.to.0.to_string();
            return Err(DTensorError::TransferTracked { from, to }.into());
        }
        let origin = CallSite::new("CrossMeshRedistribute");
        let x = x
            .map(|x| {
                x.redistribute_to(&self.from.1.replaced(|_, own| {
                    if own.partial_op().is_some() {
                        Placement::Replicate
                    } else {
                        own
                    }
                })?)
            })
            .transpose()?;
        let meta = TensorMeta {
            shape: self.shape.clone(),
            dtype: self.dtype,
        };
        let call = Call {
            global_tensor: Some(meta),
            ..Call::new(self.label.clone())
        };
        let local = x.as_ref().map(|x| x.local.clone().inner());
        let changing = watch::changing(|| self.change(&origin, Phase::Forward));
        let arrived = self.there.run(
            comm,
            call.clone().with_phase(Phase::Forward),
            local,
            &self.to.0,
            self.dtype,
        )?;
        drop(changing);
        let Some(arrived) = arrived else {
            return Ok(None);
        };
        let spec = DTensorSpec::new(
            &self.to.0,
            self.to.1.clone(),
            self.shape.clone(),
            self.dtype,
        )?
        .shared();
        let local = match x.filter(|_| same_ranks) {
            Some(x) if is_tracked(&x.local) => {
                let node = Returned::<D> {
                    output: Mutex::new(Some(arrived.into_dispatch())),
                    comm: comm.clone(),
                    call: call
                        .with_phase(Phase::Backward)
                        .with_forward_index(comm.next_forward_index()),
                    back: self.back.clone(),
                    mesh: self.from.0.clone(),
                    change: self.change(&origin, Phase::Backward),
                };
                Tensor::from_dispatch(autodiff::unary(x.local.into_dispatch(), Arc::new(node)))
            }
            Some(x) => associate(arrived, x.local.gradient_checkpointing_strategy()),
            None => arrived,
        };
        Ok(Some(DTensor::from_parts(local, spec)))
    }

    fn same_ranks(&self) -> bool {
        let from = self.from.0.ranks();
        let to = self.to.0.ranks();
        from.len() == to.len() && from.iter().all(|rank| to.contains(rank))
    }

    /// Checks that `x` is what this rank must pass to the planned redistribution.
    fn check<const D: usize, K: Kind>(&self, x: Option<&DTensor<D, K>>) -> Result<()> {
        let (mesh, layout) = &self.from;
        let found = match x {
            _ if D != self.shape.num_dims() => format!("a tensor of {D} dimensions"),
            // On ranks that only receive, no other check would find a wrong kind.
            _ if !is_of_kind::<K>(self.dtype) => format!("a tensor of kind {}", K::name()),
            Some(x) if !x.mesh().congruent(mesh) || x.layout() != layout => x.spec.to_string(),
            Some(x) if (&x.shape(), x.dtype()) != (&self.shape, self.dtype) => x.spec.to_string(),
            None if mesh.coordinate().is_some() => "no tensor".into(),
            _ => return Ok(()),
        };
        let expected = format!(
            "{:?} {} on {mesh}: {layout}",
            &self.shape[..],
            self.dtype.name()
        );
        Err(DTensorError::TransferOf {
            rank: mesh.rank(),
            expected,
            found,
        }
        .into())
    }

    fn change(&self, origin: &CallSite, phase: Phase) -> LayoutChange {
        let (from, to) = match phase {
            Phase::Backward => (&self.to.1, &self.from.1),
            _ => (&self.from.1, &self.to.1),
        };
        let from = from.clone();
        let to = to.clone();
        let shape = self.shape.to_vec();
        LayoutChange {
            origin: origin.clone(),
            from,
            to,
            summed: Vec::new(),
            shape,
            phase,
        }
    }
}

impl Moves {
    /// Creates the moves of the calling rank; `ranks` is the group of both meshes.
    fn new(
        from: (&DeviceMesh, &Layout),
        to: (&DeviceMesh, &Layout),
        ranks: &[usize],
        shape: &Shape,
    ) -> Self {
        let (rank, place) = (from.0.rank(), |rank: usize| {
            ranks
                .binary_search(&rank)
                .expect("a rank of one of the meshes")
        });
        let part = |(mesh, layout): (&DeviceMesh, &Layout)| {
            mesh.coordinate()
                .map(|coordinate| layout.local_slices(shape, coordinate))
        };
        let own = part(from);
        let there = part(to);
        let all = blocks((from.1, from.0.ranks()), (to.1, to.0.ranks()), shape);
        let inside = |block: &[Range<usize>], part: &Option<Vec<Range<usize>>>| {
            let part = part
                .as_ref()
                .expect("a rank that holds a block is in the mesh");
            block
                .iter()
                .zip(part)
                .map(|(block, part)| block.start - part.start..block.end - part.start)
                .collect()
        };
        let mut gives = Vec::new();
        let mut gets = Vec::new();
        for TensorBlock { from, to, block } in &all {
            if *from == rank {
                gives.push((place(*to), inside(block, &own)));
            }
            if *to == rank {
                gets.push((place(*from), inside(block, &there)));
            }
        }
        let part = there
            .map(|there| Shape::from(there.iter().map(ExactSizeIterator::len).collect::<Vec<_>>()));
        Self {
            communicates: all.iter().any(|fragment| fragment.from != fragment.to),
            gives,
            gets,
            part,
        }
    }

    /// Sends and receives this rank's blocks. Returns the new local tensor, or `None` if this rank
    /// is not in the target mesh.
    fn run<const D: usize, K: Kind>(
        &self,
        comm: &Communicator,
        call: Call,
        local: Option<Tensor<D, K>>,
        mesh: &DeviceMesh,
        dtype: DType,
    ) -> Result<Option<Tensor<D, K>>> {
        let mut parts = vec![None; comm.group().size()];
        let mut metas = vec![None; comm.group().size()];
        for (member, ranges) in &self.gives {
            let local = local
                .clone()
                .expect("a rank that sends a block has a local tensor");
            parts[*member] = Some(slice(local, ranges).into_dispatch());
        }
        for (member, ranges) in &self.gets {
            let shape = Shape::from(
                ranges
                    .iter()
                    .map(ExactSizeIterator::len)
                    .collect::<Vec<_>>(),
            );
            metas[*member] = Some(TensorMeta { shape, dtype });
        }
        let mut got = if self.communicates {
            comm.all_to_all_list(call, parts, metas).wait()?
        } else {
            parts
        };
        let Some(part) = &self.part else {
            return Ok(None);
        };
        let mut fragment = |member: usize| {
            Tensor::from_dispatch(
                got[member]
                    .take()
                    .expect("the collective returns every block that was declared"),
            )
        };
        if let [(member, _)] = self.gets[..] {
            return Ok(Some(fragment(member)));
        }
        let device = local.map_or_else(|| mesh.device().clone(), |local| local.device());
        let empty = Tensor::<D, K>::empty(part.clone(), (&device, dtype));
        let full = self.gets.iter().fold(empty, |full, (member, ranges)| {
            let slices: Vec<Slice> = ranges.iter().cloned().map(Slice::from).collect();
            full.slice_assign(slices.as_slice(), fragment(*member))
        });
        Ok(Some(full))
    }
}

/// Autodiff node of a redistribution between two meshes of the same ranks.
#[derive(Debug)]
struct Returned<const D: usize> {
    /// Result of forward. It is computed before the node is created, so that a failing collective
    /// returns an error and does not panic.
    output: Mutex<Option<DispatchTensor>>,
    comm: Communicator,
    call: Call,
    back: Arc<Moves>,
    mesh: DeviceMesh,
    change: LayoutChange,
}

impl<const D: usize> GraphOp for Returned<D> {
    fn forward(&self, _: &[DispatchTensor]) -> DispatchTensor {
        self.output
            .lock()
            .take()
            .expect("a node's forward runs once")
    }

    fn backward(&self, step: &mut BackwardStep<'_>) {
        let grad = Tensor::<D>::from_dispatch(step.take());
        let dtype = grad.dtype();
        let _changing = watch::changing(|| self.change.clone());
        let grad = self
            .back
            .run(&self.comm, self.call.clone(), Some(grad), &self.mesh, dtype)
            .or_unwind();
        step.give(0, || {
            grad.expect("both meshes have the same ranks")
                .into_dispatch()
        });
    }
}
