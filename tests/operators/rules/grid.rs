//! Coordinates, and sampling at coordinates.

use burn::tensor::grid::{GridIndexing, GridSparsity, IndexPos};
use burn::tensor::ops::{GridSampleOptions, GridSamplePaddingMode, InterpolateMode};
use burn_dtensor::testing::prove::{Case, case};

fn sampled(padding: GridSamplePaddingMode) -> GridSampleOptions {
    GridSampleOptions::new(InterpolateMode::Bilinear)
        .with_padding_mode(padding)
        .with_align_corners(true)
}

pub fn cases() -> Vec<Case> {
    vec![
        case!("meshgrid", (a: 1 = [3], b: 1 = [6]) => grid::meshgrid(&[a, b], GridIndexing::Cartesian)),
        case!("meshgrid", (i: 1 int(9) = [3], j: 1 int(9) = [2], k: 1 int(9) = [3]) => {
            grid::meshgrid(&[i, j, k], GridSparsity::Sparse)
        }),
        case!("meshgrid_stack", (a: 1 = [3], b: 1 = [6]) => grid::meshgrid_stack::<2, 3, Float>(&[a, b], IndexPos::Last)),
        case!("meshgrid_stack", (m: 1 bool = [3], n: 1 bool = [2]) => {
            grid::meshgrid_stack::<2, 3, Bool>(&[m, n], IndexPos::First)
        }),
        case!("affine_grid_2d", (x: 3 = [3, 2, 3]) => grid::affine_grid_2d(x, [3, 1, 2, 4])),
        case!("affine_grid_2d", (x: 3 = [6, 2, 3]) => grid::affine_grid_2d(x, [6, 2, 3, 2])),
        case!("grid_sample_2d", (x: 4 = [3, 2, 3, 4], g: 4 within(-0.9..0.9) = [3, 2, 3, 2]) => {
            x.grid_sample_2d(g, GridSampleOptions::default())
        }),
        case!("grid_sample_2d", (x: 4 = [2, 3, 2, 3], g: 4 = [2, 3, 2, 2]) => {
            x.grid_sample_2d(g, sampled(GridSamplePaddingMode::Border))
        }),
        case!("grid_sample_2d", (x: 4 = [1, 2, 3, 3], g: 4 = [1, 6, 1, 2]) => {
            x.grid_sample_2d(g, sampled(GridSamplePaddingMode::Reflection))
        }),
    ]
}
