//! Coordinate grids, and sampling at coordinates, with the names of [`burn::tensor::grid`].

use burn::tensor::grid::{GridIndexing, GridOptions, GridSparsity, IndexPos};
use burn::tensor::ops::GridSampleOptions;
use burn::tensor::{Shape, grid};

use super::args::operand_error;
use super::partial_rules::LINEAR;
use super::{EinsumRule, apply};
use crate::dtensor::{DTensor, Kind};

const GRID_SAMPLE_2D: EinsumRule =
    EinsumRule::new("grid_sample_2d", "ncHW, nopT -> ncop").linear(&[0]);
const AFFINE_GRID_2D: EinsumRule =
    EinsumRule::new("affine_grid_2d", "bAC -> bHWT").with_partial_rules(LINEAR);

/// Returns the coordinates of a grid along each of its dimensions, as burn's
/// [`meshgrid`](grid::meshgrid).
#[must_use]
#[track_caller]
pub fn meshgrid<const N: usize, K: Kind>(
    tensors: &[DTensor<1, K>; N],
    options: impl Into<GridOptions>,
) -> [DTensor<N, K>; N] {
    let options = options.into();
    let lens: [usize; N] = std::array::from_fn(|dim| tensors[dim].dims()[0]);
    std::array::from_fn(|dim| {
        let mut shape = [1; N];
        shape[dim] = lens[dim];
        let mut coordinates = tensors[dim].clone().reshape::<N, _>(Shape::from(shape));
        if options.sparsity == GridSparsity::Dense {
            coordinates = coordinates.expand(lens);
        }
        if options.indexing == GridIndexing::Cartesian && N > 1 {
            coordinates = coordinates.swap_dims(0, 1);
        }
        coordinates
    })
}

/// Returns the coordinates of every point of a grid, as burn's
/// [`meshgrid_stack`](grid::meshgrid_stack).
#[must_use]
#[track_caller]
pub fn meshgrid_stack<const D: usize, const D2: usize, K: Kind>(
    tensors: &[DTensor<1, K>; D],
    index_pos: IndexPos,
) -> DTensor<D2, K> {
    if D2 != D + 1 {
        let shapes: Vec<Shape> = tensors.iter().map(DTensor::shape).collect();
        let why = format!(
            "the result has {} dimensions, but {D2} were requested",
            D + 1
        );
        operand_error("meshgrid_stack", &shapes, why).unwind();
    }
    let dim = match index_pos {
        IndexPos::First => 0,
        IndexPos::Last => D,
    };
    DTensor::stack(meshgrid(tensors, GridOptions::default()).into(), dim)
}

/// Returns the source coordinates of each pixel of images `dims`, `[batch, channels, height,
/// width]`, under the affine maps `transform`, `[batch, 2, 3]`, as burn's
/// [`affine_grid_2d`](grid::affine_grid_2d): `[batch, height, width, 2]`.
#[must_use]
#[track_caller]
pub fn affine_grid_2d(transform: DTensor<3>, dims: [usize; 4]) -> DTensor<4> {
    let [batch, channels, height, width] = dims;
    if transform.dims() != [batch, 2, 3] {
        let why = format!("the affine maps of images {dims:?} must be [{batch}, 2, 3]");
        operand_error("affine_grid_2d", &[transform.shape()], why).unwind();
    }
    apply(
        &AFFINE_GRID_2D.lens([height, width, 2]),
        transform,
        |transform, _| {
            let batch = transform.dims()[0];
            grid::affine_grid_2d(transform, [batch, channels, height, width])
        },
    )
}

impl<const D: usize> DTensor<D> {
    /// Samples images `[batch, channels, height, width]` at the coordinates `grid`, `[batch,
    /// height_out, width_out, 2]` in -1..1, as burn's
    /// [`grid_sample_2d`](burn::tensor::Tensor::grid_sample_2d): `[batch, channels, height_out,
    /// width_out]`.
    ///
    /// Coordinates may be anywhere in the image, so height and width are gathered if they are
    /// sharded.
    #[must_use]
    #[track_caller]
    pub fn grid_sample_2d(self, grid: Self, options: impl Into<GridSampleOptions>) -> Self {
        if D != 4 || grid.dims()[D - 1] != 2 {
            let why = "images have 4 dimensions, and `grid` has 4, of which the last has length 2";
            operand_error("grid_sample_2d", &[self.shape(), grid.shape()], why).unwind();
        }
        let options = options.into();
        apply(&GRID_SAMPLE_2D, (self, grid), |(x, grid), _| {
            x.grid_sample_2d(grid, options)
        })
    }
}
