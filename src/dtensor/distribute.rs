//! Distribution of a full tensor: [`distribute_tensor`](DTensor::distribute_tensor) sends the
//! shards from one rank, [`distribute_replicated`](DTensor::distribute_replicated) lets every rank
//! slice its own copy.
//!
//! For example, on a mesh (2, 2) with `[S(0), R]`, with the first rank as source. Each row is one
//! mesh dimension; ranks that are not named wait:
//!
//! ```text
//! mesh dim 0   scatter     (0,0) -> (1,0)
//! mesh dim 1   broadcast   (0,0) -> (0,1)      (1,0) -> (1,1)
//! ```

use burn::tensor::{Shape, Tensor};
use smallvec::SmallVec;

use super::check::check_replicas;
use super::local::{as_float, associate, is_require_grad, is_tracked, slice};
use super::spec::mesh_dim_name;
use super::{DTensor, DTensorError, DTensorSpec, Kind};
use crate::Result;
use crate::comm::{Call, TensorMeta};
use crate::mesh::DeviceMesh;
use crate::placement::{Layout, Placement};

impl<const D: usize, K: Kind> DTensor<D, K> {
    /// Distributes the full tensor that the first rank of the mesh holds. For another source, use
    /// [`distribute_tensor_from`](Self::distribute_tensor_from).
    ///
    /// Every rank passes a tensor of the same shape and dtype; only the values on the source rank
    /// are used. The local tensors are leaves, with `full`'s setting of `require_grad`.
    ///
    /// # Collective
    /// Every rank of the mesh. There is one step per mesh dimension: a scatter for `S(d)` or a
    /// broadcast for `R`. In each step, only the ranks whose coordinate equals the source's in all
    /// later dimensions participate.
    ///
    /// # Errors
    /// [`MeshError::NotAMember`](crate::mesh::MeshError::NotAMember), [`DTensorError::NotALeaf`],
    /// [`DTensorError::Partial`], [`PlacementError`](crate::placement::PlacementError) for a wrong
    /// number of placements or a dimension out of range, and [`CommError`](crate::comm::CommError)
    /// if ranks disagree on the shape or a collective fails.
    pub fn distribute_tensor(
        full: Tensor<D, K>,
        mesh: &DeviceMesh,
        placements: &[Placement],
    ) -> Result<Self> {
        Self::distribute_tensor_to(full, mesh, Layout::new(mesh.shape(), placements)?)
    }

    /// Like [`distribute_tensor`](Self::distribute_tensor), but with a [`Layout`], which may have
    /// its own shard order or uneven shard sizes.
    ///
    /// # Collective
    /// Every rank of the mesh.
    ///
    /// # Errors
    /// As [`distribute_tensor`](Self::distribute_tensor), [`DTensorError::LayoutMesh`] for a layout
    /// of another mesh shape, and [`ShardSizeSum`](crate::placement::PlacementError::ShardSizeSum)
    /// for uneven shard sizes that do not add up to the tensor's.
    pub fn distribute_tensor_to(
        full: Tensor<D, K>,
        mesh: &DeviceMesh,
        layout: Layout,
    ) -> Result<Self> {
        Self::distribute_tensor_from(full, mesh, layout, 0)
    }

    /// Like [`distribute_tensor_to`](Self::distribute_tensor_to), but distributes the full tensor
    /// that the rank at position `source` of the mesh holds; 0 is the first rank. The values on all
    /// other ranks are ignored.
    ///
    /// # Collective
    /// Every rank of the mesh, with the same source.
    ///
    /// # Errors
    /// As [`distribute_tensor_to`](Self::distribute_tensor_to), and
    /// [`MeshError::PositionOutOfRange`](crate::mesh::MeshError::PositionOutOfRange) for a source
    /// past the last rank.
    pub fn distribute_tensor_from(
        full: Tensor<D, K>,
        mesh: &DeviceMesh,
        layout: Layout,
        source: usize,
    ) -> Result<Self> {
        let source = mesh.coordinate_at(source)?;
        let spec = DTensorSpec::new(mesh, layout, full.shape(), full.dtype())?;
        leaves("distribute_tensor", full, spec, |full, spec| {
            let call = Call::new(format!("distribute {}", spec.layout()));
            send_parts(
                (*spec.coordinate() == *source).then_some(full),
                spec,
                &source,
                &call,
            )
        })
    }

    /// Distributes a full tensor that every rank holds. Nothing is sent: each rank keeps a copy of
    /// its own shard.
    ///
    /// If the ranks' copies may differ (random values), use
    /// [`distribute_tensor`](Self::distribute_tensor). The local tensors are leaves, with `full`'s
    /// setting of `require_grad`.
    ///
    /// # Collective
    /// Local. If the launch [checks replicas](crate::comm::Launch::with_replica_checks), every rank
    /// of the mesh, because the copies are compared.
    ///
    /// # Errors
    /// As [`distribute_tensor`](Self::distribute_tensor), without those of communication if copies
    /// are not compared.
    pub fn distribute_replicated(
        full: Tensor<D, K>,
        mesh: &DeviceMesh,
        placements: &[Placement],
    ) -> Result<Self> {
        Self::distribute_replicated_to(full, mesh, Layout::new(mesh.shape(), placements)?)
    }

    /// Like [`distribute_replicated`](Self::distribute_replicated), but with a [`Layout`], which
    /// may have its own shard order or uneven shard sizes.
    ///
    /// # Collective
    /// Like [`distribute_replicated`](Self::distribute_replicated).
    ///
    /// # Errors
    /// As [`distribute_replicated`](Self::distribute_replicated), [`DTensorError::LayoutMesh`] for
    /// a layout of another mesh shape, and
    /// [`ShardSizeSum`](crate::placement::PlacementError::ShardSizeSum) for uneven shard sizes that
    /// do not add up to the tensor's.
    pub fn distribute_replicated_to(
        full: Tensor<D, K>,
        mesh: &DeviceMesh,
        layout: Layout,
    ) -> Result<Self> {
        let spec = DTensorSpec::new(mesh, layout, full.shape(), full.dtype())?;
        leaves("distribute_replicated", full, spec, |full, spec| {
            check_replicas(&full, mesh, 0..mesh.ndim())?;
            Ok(own_part(full, spec))
        })
    }

    /// Like [`distribute_replicated_to`](Self::distribute_replicated_to), for a tensor that this
    /// crate has computed: it is never compared, so the call is local in any launch.
    pub(crate) fn distribute_computed(
        full: Tensor<D, K>,
        mesh: &DeviceMesh,
        layout: Layout,
    ) -> Result<Self> {
        let spec = DTensorSpec::new(mesh, layout, full.shape(), full.dtype())?;
        leaves("distribute_replicated", full, spec, |full, spec| {
            Ok(own_part(full, spec))
        })
    }
}

/// Returns this rank's local tensor of a full tensor that it holds.
fn own_part<const D: usize, K: Kind>(full: Tensor<D, K>, spec: &DTensorSpec) -> Tensor<D, K> {
    slice(
        full,
        &spec.layout().local_slices(spec.shape(), spec.coordinate()),
    )
}

/// Builds a DTensor of `spec` whose local tensor is what `part` returns for the plain `tensor`. The
/// local tensor is a leaf if `tensor` is one, and has the same autodiff association.
///
/// # Errors
/// [`DTensorError::Partial`] and [`DTensorError::NotALeaf`], before `part` runs.
pub(super) fn leaves<const D: usize, K: Kind>(
    operation: &'static str,
    tensor: Tensor<D, K>,
    spec: DTensorSpec,
    part: impl FnOnce(Tensor<D, K>, &DTensorSpec) -> Result<Tensor<D, K>>,
) -> Result<DTensor<D, K>> {
    check_no_partial(operation, spec.mesh(), spec.layout())?;
    let leaf = is_require_grad(&tensor);
    if is_tracked(&tensor) && !leaf {
        return Err(DTensorError::NotALeaf { operation }.into());
    }
    let strategy = tensor.gradient_checkpointing_strategy();
    let mut local = associate(part(tensor.inner(), &spec)?, strategy);
    if leaf {
        local = Tensor::from_dispatch(as_float(local).require_grad().into_dispatch());
    }
    Ok(DTensor::from_parts(local, spec.shared()))
}

/// Returns this rank's local tensor of the full tensor that the rank at coordinate `source` passes.
/// All other ranks pass `None`.
///
/// # Collective
/// Every rank of the mesh.
pub(crate) fn send_parts<const D: usize, K: Kind>(
    full: Option<Tensor<D, K>>,
    spec: &DTensorSpec,
    source: &[usize],
    call: &Call,
) -> Result<Tensor<D, K>> {
    let coordinate = spec.coordinate();
    let sequence = sharding_sequence(spec.layout());
    let mut shape: [usize; D] = spec.shape().dims();
    let mut held = full;
    for (at, &mesh_dim) in sequence.iter().enumerate() {
        let mut later = sequence[at + 1..].iter();
        let taking_part = later.all(|&later| coordinate[later] == source[later]);
        let comm = spec.mesh().communicator(mesh_dim)?;
        let shard = spec.placements()[mesh_dim]
            .shard_dim()
            .map(|dim| (dim, spec.shard_sizes(&[mesh_dim])));
        if taking_part {
            let metas = vec![TensorMeta {
                shape: Shape::from(shape),
                dtype: spec.dtype(),
            }];
            let full = held.take().map(|full| vec![full.into_dispatch()]);
            let work = match shard.clone() {
                Some(sizes) => {
                    comm.scatter(call.clone(), full, metas, vec![sizes], source[mesh_dim])
                }
                None => comm.broadcast(call.clone(), full, metas, source[mesh_dim]),
            };
            held = Some(work.single()?);
        }
        if let Some((dim, sizes)) = shard {
            let group = comm.group();
            shape[dim] = sizes.range(group.size(), group.rank()).len();
        }
    }
    Ok(held.expect("after the last mesh dimension every rank has received its local tensor"))
}

/// Returns an error if `layout` has a Partial placement: no rank could compute its partial value
/// from a full tensor.
pub(super) fn check_no_partial(
    operation: &'static str,
    mesh: &DeviceMesh,
    layout: &Layout,
) -> Result<(), DTensorError> {
    for (dim, &placement) in layout.placements().iter().enumerate() {
        if let Placement::Partial(_) = placement {
            let mesh_dim = mesh_dim_name(mesh, dim);
            return Err(DTensorError::Partial {
                operation,
                mesh_dim,
                placement,
            });
        }
    }
    Ok(())
}

/// Returns the mesh dimensions in the order in which a tensor is distributed over them. Each
/// dimension comes after those outside it in the shard order; otherwise the order is left to right.
/// Dimensions that do not shard come last, so that a broadcast copies shards and not the full
/// tensor.
fn sharding_sequence(layout: &Layout) -> SmallVec<[usize; 3]> {
    let mut sequence: SmallVec<[usize; 3]> = SmallVec::new();
    let placements = layout.placements();
    while sequence.len() < placements.len() {
        let ready = |mesh_dim: &usize| {
            let outside = placements[*mesh_dim]
                .shard_dim()
                .map_or(&[][..], |dim| layout.shard_order(dim));
            let mut outside = outside.iter().take_while(|sizes| *sizes != mesh_dim);
            !sequence.contains(mesh_dim) && outside.all(|sizes| sequence.contains(sizes))
        };
        let is_sharded = |mesh_dim: &usize| placements[*mesh_dim].shard_dim().is_some();
        let mut left = (0..placements.len()).filter(ready);
        let next = left.clone().find(is_sharded).or_else(|| left.next());
        sequence.push(next.expect("a shard order has an outermost mesh dimension"));
    }
    sequence
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inner_dimensions_shard_after_outer_ones() {
        let r = Placement::Replicate;
        let s = Placement::Shard(0);
        let plain = Layout::new(&[2, 2, 2], &[s, r, s]).unwrap();
        assert_eq!(sharding_sequence(&plain).as_slice(), [0, 2, 1]);
        let turned = Layout::with_shard_order(&[2, 2, 2], &[s, r, s], &[(0, &[2, 0])]).unwrap();
        assert_eq!(sharding_sequence(&turned).as_slice(), [2, 0, 1]);
    }
}
