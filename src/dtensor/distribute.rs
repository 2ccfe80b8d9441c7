//! From a whole tensor to its parts: [`distribute_tensor`](DTensor::distribute_tensor) sends them
//! from one rank, [`distribute_replicated`](DTensor::distribute_replicated) has every rank cut its own copy.
//!
//! On a mesh (2, 2) with `[S(0), R]`, from the first rank, a row per mesh dimension; ranks not named wait:
//!
//! ```text
//! mesh dim 0   scatter     (0,0) -> (1,0)
//! mesh dim 1   broadcast   (0,0) -> (0,1)      (1,0) -> (1,1)
//! ```

use burn::tensor::{Shape, Tensor};
use smallvec::SmallVec;

use super::local::{as_float, associate, is_require_grad, is_tracked, slice};
use super::spec::mesh_dim_name;
use super::{DTensor, DTensorError, DTensorSpec, Kind};
use crate::Result;
use crate::comm::{Call, TensorMeta};
use crate::mesh::DeviceMesh;
use crate::placement::{Layout, Placement};

impl<const D: usize, K: Kind> DTensor<D, K> {
    /// Distributes the whole tensor that the mesh's first rank holds; another one's, by
    /// [`distribute_tensor_from`](Self::distribute_tensor_from).
    ///
    /// Every rank passes a tensor of the same shape and dtype; the values of all but the first
    /// rank are ignored. The parts are leaves, with `full`'s setting of `require_grad`.
    ///
    /// # Collective
    /// Every rank of the mesh: mesh dimension by mesh dimension, a scatter for `S(d)` and a
    /// broadcast for `R`, among the ranks that are where the source is in the dimensions still to come.
    ///
    /// # Errors
    /// [`MeshError::NotAMember`](crate::mesh::MeshError::NotAMember), [`DTensorError::NotALeaf`],
    /// [`DTensorError::Partial`], [`PlacementError`](crate::placement::PlacementError) for a wrong number of placements
    /// or a dimension out of range, and [`CommError`](crate::comm::CommError) if ranks disagree on the
    /// shape or a collective fails.
    pub fn distribute_tensor(full: Tensor<D, K>, mesh: &DeviceMesh, placements: &[Placement]) -> Result<Self> {
        Self::distribute_tensor_to(full, mesh, Layout::new(mesh.shape(), placements)?)
    }

    /// [`distribute_tensor`](Self::distribute_tensor) with an order of cuts, or lengths.
    ///
    /// # Collective
    /// Every rank of the mesh.
    ///
    /// # Errors
    /// As [`distribute_tensor`](Self::distribute_tensor), [`DTensorError::LayoutMesh`] for a layout of
    /// another mesh shape, and [`ShardSizeSum`](crate::placement::PlacementError::ShardSizeSum) for lengths that
    /// are not the tensor's.
    pub fn distribute_tensor_to(full: Tensor<D, K>, mesh: &DeviceMesh, layout: Layout) -> Result<Self> {
        Self::distribute_tensor_from(full, mesh, layout, 0)
    }

    /// [`distribute_tensor_to`](Self::distribute_tensor_to) of the whole tensor that the rank at position
    /// `source` of the mesh holds, 0 the first. The values of all others are ignored.
    ///
    /// # Collective
    /// Every rank of the mesh, with the same source.
    ///
    /// # Errors
    /// As [`distribute_tensor_to`](Self::distribute_tensor_to), and
    /// [`MeshError::PositionOutOfRange`](crate::mesh::MeshError::PositionOutOfRange) for a source past the last rank.
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
            send_parts((*spec.coordinate() == *source).then_some(full), spec, &source, &call)
        })
    }

    /// Distributes a whole tensor that every rank holds, without communication: each keeps a copy
    /// of its own part.
    ///
    /// Where ranks' copies may differ (random values), use
    /// [`distribute_tensor`](Self::distribute_tensor). The parts are leaves, with `full`'s
    /// setting of `require_grad`.
    ///
    /// # Errors
    /// As [`distribute_tensor`](Self::distribute_tensor), without those of communication.
    pub fn distribute_replicated(full: Tensor<D, K>, mesh: &DeviceMesh, placements: &[Placement]) -> Result<Self> {
        Self::distribute_replicated_to(full, mesh, Layout::new(mesh.shape(), placements)?)
    }

    /// [`distribute_replicated`](Self::distribute_replicated) with an order of cuts, or lengths.
    ///
    /// # Errors
    /// As [`distribute_replicated`](Self::distribute_replicated), [`DTensorError::LayoutMesh`] for a layout of
    /// another mesh shape, and [`ShardSizeSum`](crate::placement::PlacementError::ShardSizeSum) for lengths that
    /// are not the tensor's.
    pub fn distribute_replicated_to(full: Tensor<D, K>, mesh: &DeviceMesh, layout: Layout) -> Result<Self> {
        let spec = DTensorSpec::new(mesh, layout, full.shape(), full.dtype())?;
        leaves("distribute_replicated", full, spec, |full, spec| {
            let ranges = spec.layout().local_slices(spec.shape(), spec.coordinate());
            Ok(slice(full, &ranges))
        })
    }
}

/// What `part` makes of a plain tensor: this rank's part of what `spec` describes, with the tensor's place in
/// autodiff.
///
/// # Errors
/// [`DTensorError::Partial`] and [`DTensorError::NotALeaf`], before anything is made.
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

/// This rank's part of the plain whole that the rank at coordinate `source`, and it alone, passes in.
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
        let shard = spec.placements()[mesh_dim].shard_dim().map(|dim| (dim, spec.shard_sizes(&[mesh_dim])));
        if taking_part {
            let metas = vec![TensorMeta { shape: Shape::from(shape), dtype: spec.dtype() }];
            let full = held.take().map(|full| vec![full.into_dispatch()]);
            let work = match shard.clone() {
                Some(sizes) => comm.scatter(call.clone(), full, metas, vec![sizes], source[mesh_dim]),
                None => comm.broadcast(call.clone(), full, metas, source[mesh_dim]),
            };
            held = Some(work.single()?);
        }
        if let Some((dim, sizes)) = shard {
            let group = comm.group();
            shape[dim] = sizes.range(group.size(), group.rank()).len();
        }
    }
    Ok(held.expect("after the last mesh dimension every rank has taken part"))
}

/// Refuses placements of which no rank could hold a part.
pub(super) fn check_no_partial(
    operation: &'static str,
    mesh: &DeviceMesh,
    layout: &Layout,
) -> Result<(), DTensorError> {
    for (dim, &placement) in layout.placements().iter().enumerate() {
        if let Placement::Partial(_) = placement {
            let mesh_dim = mesh_dim_name(mesh, dim);
            return Err(DTensorError::Partial { operation, mesh_dim, placement });
        }
    }
    Ok(())
}

/// The mesh dimensions in an order that makes every cut after the cuts outside it: left to right
/// where nothing else is asked for. What is not cut comes last, when there are parts to copy, and not the whole.
fn sharding_sequence(layout: &Layout) -> SmallVec<[usize; 3]> {
    let mut sequence: SmallVec<[usize; 3]> = SmallVec::new();
    let placements = layout.placements();
    while sequence.len() < placements.len() {
        let ready = |mesh_dim: &usize| {
            let outside = placements[*mesh_dim].shard_dim().map_or(&[][..], |dim| layout.shard_order(dim));
            let mut outside = outside.iter().take_while(|sizes| *sizes != mesh_dim);
            !sequence.contains(mesh_dim) && outside.all(|sizes| sequence.contains(sizes))
        };
        let is_sharded = |mesh_dim: &usize| placements[*mesh_dim].shard_dim().is_some();
        let mut left = (0..placements.len()).filter(ready);
        let next = left.clone().find(is_sharded).or_else(|| left.next());
        sequence.push(next.expect("an order of cuts has an outermost cut"));
    }
    sequence
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inner_dimensions_shard_after_outer_ones() {
        let (r, s) = (Placement::Replicate, Placement::Shard(0));
        let plain = Layout::new(&[2, 2, 2], &[s, r, s]).unwrap();
        assert_eq!(sharding_sequence(&plain).as_slice(), [0, 2, 1]);
        let turned = Layout::with_shard_order(&[2, 2, 2], &[s, r, s], &[(0, &[2, 0])]).unwrap();
        assert_eq!(sharding_sequence(&turned).as_slice(), [2, 0, 1]);
    }
}
