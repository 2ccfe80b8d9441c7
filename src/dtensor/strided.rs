//! Conversion from and to PyTorch's strided shards: [`from_strided`](DTensor::from_strided) and
//! [`to_strided`](DTensor::to_strided).

use std::ops::Range;

use burn::tensor::{Shape, Tensor};

use super::collective::all_gather;
use super::distribute::leaves;
use super::local::slice_dim;
use super::{DTensor, DTensorError, DTensorSpec, Kind};
use crate::Result;
use crate::comm::Call;
use crate::mesh::DeviceMesh;
use crate::placement::{ShardSizes, StridedLayout, StridedPlacement};

impl<const D: usize, K: Kind> DTensor<D, K> {
    /// Creates a DTensor of global `shape` from local tensors in PyTorch's layout, which may
    /// contain strided shards. Used to load what PyTorch has saved.
    ///
    /// If a shard order exists with the same elements on every rank, the result has that layout and
    /// nothing is sent. Otherwise strided shards, and shards inside them, become Replicate by one
    /// all-gather each, and all other placements stay; [`redistribute`](Self::redistribute) can
    /// shard the result. The local tensors are leaves, with `local`'s setting of `require_grad`.
    ///
    /// ```
    /// use burn::tensor::{Int, Tensor};
    /// use burn_dtensor::placement::StridedPlacement;
    /// use burn_dtensor::prelude::*;
    ///
    /// launch(Launch::threads(2), |world| {
    ///     let mesh = DeviceMesh::new(world, [2], ["tp"])?;
    ///     let elements = [[0, 1, 4, 5], [2, 3, 6, 7]][world.rank()];
    ///     let local = Tensor::<1, Int>::from_data(elements, world.device());
    ///     let placements: [StridedPlacement; 1] = ["SS(0,2)".parse()?];
    ///     let x = DTensor::from_strided(local.clone(), &mesh, &placements, [8])?;
    ///     let halves = x.redistribute(&[Placement::Shard(0)])?;
    ///     let half = Tensor::<1, Int>::arange([0..4, 4..8][world.rank()].clone(), world.device());
    ///     assert_eq!(halves.local().to_data(), half.into_data());
    ///     assert_eq!(halves.to_strided(&placements)?.into_data(), local.into_data());
    ///     Ok(())
    /// })?;
    /// # Ok::<_, burn_dtensor::Error>(())
    /// ```
    ///
    /// # Collective
    /// Every rank of the mesh.
    ///
    /// # Errors
    /// As [`StridedLayout::new`],
    /// [`DimOutOfRange`](crate::placement::PlacementError::DimOutOfRange);
    /// [`MeshError::NotAMember`](crate::mesh::MeshError::NotAMember), [`DTensorError::LocalShape`],
    /// [`DTensorError::NotALeaf`], [`DTensorError::Partial`], and
    /// [`CommError`](crate::comm::CommError) if a collective fails.
    pub fn from_strided(
        local: Tensor<D, K>,
        mesh: &DeviceMesh,
        placements: &[StridedPlacement],
        shape: impl Into<Shape>,
    ) -> Result<Self> {
        let shape = shape.into();
        let strided = checked(mesh, placements, shape.num_dims())?;
        let coordinate = mesh.member("create a DTensor on it")?;
        let runs = strided.local_runs(&shape, coordinate);
        let expected: Vec<usize> = runs
            .iter()
            .map(|runs| runs.iter().map(ExactSizeIterator::len).sum())
            .collect();
        if local.dims()[..] != expected[..] {
            let rank = mesh.rank();
            let local = local.dims().to_vec();
            let global = shape.to_vec();
            let layout = text(placements);
            return Err(DTensorError::LocalShape {
                rank,
                local,
                expected,
                global,
                layout,
            }
            .into());
        }
        if let Some(layout) = strided.same(&shape) {
            let spec = DTensorSpec::new(mesh, layout, shape, local.dtype())?;
            return leaves("from_strided", local, spec, |local, _| Ok(local));
        }
        let (layout, undone) = strided.undone()?;
        let call = Call::new(format!("from strided {}", text(placements)));
        let spec = DTensorSpec::new(mesh, layout, shape, local.dtype())?;
        leaves("from_strided", local, spec, |mut held, spec| {
            for mesh_dim in undone {
                let dealt = strided.dealt(spec.shape(), spec.coordinate(), mesh_dim);
                let comm = mesh.communicator(mesh_dim)?;
                let sizes = ShardSizes::Uneven(dealt.lengths.into());
                held = all_gather(comm, call.clone(), held, dealt.dim, sizes).wait()?;
                held = picked(held, dealt.dim, dealt.places);
            }
            Ok(held)
        })
    }

    /// Returns this rank's local tensor in PyTorch's layout, without autodiff: the inverse of
    /// [`from_strided`](Self::from_strided).
    ///
    /// # Collective
    /// Every rank of the mesh, as for [`redistribute_to`](Self::redistribute_to). If no shard order
    /// has the same elements, the tensor is first redistributed with Replicate in place of strided
    /// shards and of shards inside them.
    ///
    /// # Errors
    /// As [`StridedLayout::new`] and [`redistribute_to`](Self::redistribute_to).
    pub fn to_strided(self, placements: &[StridedPlacement]) -> Result<Tensor<D, K>> {
        let strided = checked(self.mesh(), placements, D)?;
        let (spec, plain) = (
            self.spec.clone(),
            Self::from_parts(self.local.inner(), self.spec),
        );
        if let Some(layout) = strided.same(spec.shape()) {
            return Ok(plain.redistribute_to(&layout)?.local);
        }
        let (layout, _) = strided.undone()?;
        let starts = layout
            .local_slices(spec.shape(), spec.coordinate())
            .into_iter()
            .map(|slice| slice.start);
        let runs = strided
            .local_runs(spec.shape(), spec.coordinate())
            .into_iter()
            .zip(starts);
        let elements = runs.map(|(runs, start)| {
            runs.into_iter()
                .flatten()
                .map(|element| element - start)
                .collect()
        });
        let full = plain.redistribute_to(&layout)?.local;
        Ok(elements
            .enumerate()
            .fold(full, |part, (dim, elements)| picked(part, dim, elements)))
    }
}

fn checked(
    mesh: &DeviceMesh,
    placements: &[StridedPlacement],
    ndim: usize,
) -> Result<StridedLayout> {
    let strided = StridedLayout::new(mesh.shape(), placements)?;
    strided.check(ndim)?;
    Ok(strided)
}

/// Returns a copy of these elements of dimension `dim`, in this order.
fn picked<const D: usize, K: Kind>(
    tensor: Tensor<D, K>,
    dim: usize,
    elements: Vec<usize>,
) -> Tensor<D, K> {
    let mut runs: Vec<Range<usize>> = Vec::new();
    for element in elements {
        match runs.last_mut() {
            Some(run) if run.end == element => run.end += 1,
            _ => runs.push(element..element + 1),
        }
    }
    match &runs[..] {
        [] => slice_dim(tensor, dim, 0..0),
        [run] => slice_dim(tensor, dim, run.clone()),
        _ => Tensor::cat(
            runs.into_iter()
                .map(|run| tensor.clone().slice_dim(dim, run))
                .collect(),
            dim,
        ),
    }
}

/// Formats placements as `[SS(0,2), S(0)]`.
fn text(placements: &[StridedPlacement]) -> String {
    let placements: Vec<_> = placements.iter().map(ToString::to_string).collect();
    format!("[{}]", placements.join(", "))
}
