//! Masks of matrices. Each rank computes only its own rows and columns.

use std::ops::Range;

use burn::tensor::{Bool, Device, Shape, Tensor};

use super::factory::make;
use super::{DTensor, Kind};
use crate::Result;
use crate::mesh::DeviceMesh;
use crate::placement::Placement;

/// # Masks
/// A mask applies to the last two dimensions of `shape` and is identical for all matrices. The
/// named region is false, and everything else is true:
/// [`mask_fill`](burn::tensor::Tensor::mask_fill) overwrites it. Errors are those of the
/// [factories](#factories).
/// Local: each rank creates its own region of a mask.
impl<const D: usize> DTensor<D, Bool> {
    /// Creates the mask of the upper triangle, like burn's [`triu_mask`](Tensor::triu_mask). The
    /// triangle begins at the diagonal, shifted by `offset` to the right.
    ///
    /// # Errors
    /// As [all factories](#factories).
    pub fn triu_mask(
        shape: impl Into<Shape>,
        offset: i64,
        mesh: &DeviceMesh,
        placements: &[Placement],
        device: &Device,
    ) -> Result<Self> {
        make("triu_mask", shape, mesh, placements, |part| {
            mask(&part.slices, offset, device, Tensor::triu_mask)
        })
    }

    /// Creates the mask of the lower triangle, like burn's [`tril_mask`](Tensor::tril_mask). The
    /// triangle ends at the diagonal, shifted by `offset` to the right. With offset 0, true marks
    /// the positions that causal attention must not see.
    ///
    /// ```
    /// use burn::tensor::Bool;
    /// use burn_dtensor::dtensor::DTensor;
    /// use burn_dtensor::placement::Placement::Shard;
    /// use burn_dtensor::testing::MeshTest;
    ///
    /// MeshTest::new([2], ["cp"]).run(|mesh| {
    ///     let mask = DTensor::<2, Bool>::tril_mask([4, 4], 0, mesh, &[Shard(0)], mesh.device())?;
    ///     let visible: Vec<_> = mask.local().to_data().iter::<bool>().map(|hidden| !hidden).collect();
    ///     let expected = [
    ///         [true, false, false, false, true, true, false, false],
    ///         [true, true, true, false, true, true, true, true],
    ///     ];
    ///     assert_eq!(visible, expected[mesh.rank()]);
    ///     Ok(())
    /// });
    /// ```
    ///
    /// # Errors
    /// As [all factories](#factories).
    pub fn tril_mask(
        shape: impl Into<Shape>,
        offset: i64,
        mesh: &DeviceMesh,
        placements: &[Placement],
        device: &Device,
    ) -> Result<Self> {
        make("tril_mask", shape, mesh, placements, |part| {
            mask(&part.slices, offset, device, Tensor::tril_mask)
        })
    }

    /// Creates the mask of the diagonal, shifted by `offset` to the right, like burn's
    /// [`diag_mask`](Tensor::diag_mask).
    ///
    /// # Errors
    /// As [all factories](#factories).
    pub fn diag_mask(
        shape: impl Into<Shape>,
        offset: i64,
        mesh: &DeviceMesh,
        placements: &[Placement],
        device: &Device,
    ) -> Result<Self> {
        make("diag_mask", shape, mesh, placements, |part| {
            mask(&part.slices, offset, device, Tensor::diag_mask)
        })
    }
}

/// Local: each rank creates its own region of a mask.
impl<const D: usize, K: Kind> DTensor<D, K> {
    /// Creates the [`triu_mask`](DTensor::triu_mask) of a tensor such as attention scores: in its
    /// shape, sharded as it is.
    ///
    /// # Panics
    /// If the tensor has fewer than 2 dimensions.
    #[must_use]
    pub fn triu_mask_like(&self, offset: i64) -> DTensor<D, Bool> {
        self.mask_like(offset, Tensor::triu_mask)
    }

    /// Creates the [`tril_mask`](DTensor::tril_mask) of a tensor such as attention scores: in its
    /// shape, sharded as it is.
    ///
    /// ```
    /// use burn_dtensor::prelude::*;
    /// use burn_dtensor::testing::MeshTest;
    ///
    /// MeshTest::new([2], ["tp"]).run(|mesh| {
    ///     let scores = DTensor::<4>::ones([1, 8, 3, 3], mesh, &[Placement::Shard(1)], mesh.device())?; // by head
    ///     let causal = scores.clone().mask_fill(scores.tril_mask_like(0), f32::NEG_INFINITY);
    ///     assert_eq!(causal.local().dims(), [1, 4, 3, 3]);
    ///     Ok(())
    /// });
    /// ```
    ///
    /// # Panics
    /// If the tensor has fewer than 2 dimensions.
    #[must_use]
    pub fn tril_mask_like(&self, offset: i64) -> DTensor<D, Bool> {
        self.mask_like(offset, Tensor::tril_mask)
    }

    fn mask_like(
        &self,
        offset: i64,
        local: impl FnOnce(Shape, i64, &Device) -> Tensor<D, Bool>,
    ) -> DTensor<D, Bool> {
        let spec = self.reduced_spec();
        let slices = spec.layout().local_slices(spec.shape(), spec.coordinate());
        let mask = mask(&slices, offset, &self.device(), local);
        let spec = spec.with_dtype(mask.dtype()).shared();
        DTensor::from_parts(mask, spec)
    }
}

/// Creates the mask of one rank's region. Its diagonal is that of the global tensor, shifted by the
/// start of the region.
fn mask<const D: usize>(
    slices: &[Range<usize>],
    offset: i64,
    device: &Device,
    local: impl FnOnce(Shape, i64, &Device) -> Tensor<D, Bool>,
) -> Tensor<D, Bool> {
    let shape = Shape::from(slices.iter().map(Range::len).collect::<Vec<_>>());
    if shape.num_elements() == 0 {
        return Tensor::empty(shape, device);
    }
    let rows = &slices[D - 2];
    let columns = &slices[D - 1];
    local(
        shape.clone(),
        offset + rows.start as i64 - columns.start as i64,
        device,
    )
    .expand(shape)
}
