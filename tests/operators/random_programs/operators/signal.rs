//! Fourier transforms, grids and sampling.

use burn::signal::StftOptions;
use burn::tensor::grid::{GridIndexing, GridSparsity, IndexPos};
use burn::tensor::ops::GridSampleOptions;

use super::{Operator, operator, step};

/// Windows, as factors of a vector.
pub mod plain {
    use burn::signal;
    use burn::tensor::Tensor;

    pub fn windowed(x: Tensor<1>, window: usize, periodic: bool) -> Tensor<1> {
        let (size, options) = (x.dims()[0], (&x.device(), x.dtype()));
        x * match window {
            0 => signal::hann_window(size, periodic, options),
            1 => signal::hamming_window(size, periodic, options),
            _ => signal::blackman_window(size, periodic, options),
        }
    }
}

/// The same of DTensors: windows that every rank has whole.
pub mod sharded {
    use burn_dtensor::dtensor::DTensor;
    use burn_dtensor::dtensor::ops::signal;
    use burn_dtensor::placement::Placement;

    pub fn windowed(x: DTensor<1>, window: usize, periodic: bool) -> DTensor<1> {
        let (size, options) = (x.dims()[0], (&x.device(), x.dtype()));
        let (mesh, full) = (x.mesh(), vec![Placement::Replicate; x.mesh().ndim()]);
        let window = match window {
            0 => signal::hann_window(size, periodic, mesh, &full, options),
            1 => signal::hamming_window(size, periodic, mesh, &full, options),
            _ => signal::blackman_window(size, periodic, mesh, &full, options),
        };
        window.unwrap_or_else(|error| error.unwind()) * x
    }
}

macro_rules! windows {
    ($($name:literal $window:literal;)*) => {
        vec![$(operator!($name, |d| {
            let (x, periodic) = (d.any::<1>(), d.chance(0.5));
            step!((x: Float<1>) [periodic] => windowed(x, $window, periodic))
        })),*]
    };
}

pub fn operators() -> Vec<Operator> {
    let mut all = windows! { "hann_window" 0; "hamming_window" 1; "blackman_window" 2; };
    all.extend(transforms());
    all.extend(grids());
    all
}

fn transforms() -> Vec<Operator> {
    vec![
        operator!("rfft", |d| {
            let (x, dim, n) = (d.any::<2>(), d.below(2), d.one_of(&[2, 4, 8]));
            step!((x: Float<2>) [dim, n] => signal::rfft(x, dim, Some(n)))
        }),
        operator!("irfft", |d| {
            let mut shape = d.any_shape::<2>();
            let (dim, n) = (d.below(2), d.one_of(&[2, 4, 8]));
            shape[dim] = n / 2 + 1;
            let (x, y) = (d.floats(shape), d.floats(shape));
            step!((x: Float<2>, y: Float<2>) [dim, n] => signal::irfft(x, y, dim, Some(n)))
        }),
        operator!("cfft", |d| {
            let (x, dim, n) = (d.any::<2>(), d.below(2), d.one_of(&[2, 4, 8]));
            let y = d.floats(d.shape::<2>(x));
            step!((x: Float<2>, y: Float<2>) [dim, n] => signal::cfft(x, y, dim, Some(n)))
        }),
        operator!("stft", |d| {
            let shape = [d.len(), 4 + d.below(5)];
            let (x, w, onesided) = (d.floats(shape), d.floats([4]), d.chance(0.5));
            step!((x: Float<2>, w: Float<1>) [onesided] => {
                let options = StftOptions { hop_length: 2, onesided, ..StftOptions::new(4) };
                signal::stft(x, Some(w), options)
            })
        }),
        operator!("istft", |d| {
            let (batch, frames) = (d.len(), 2 + d.below(2));
            let (x, w) = (
                d.floats([batch, frames, 3, 2]),
                d.floats_within([4], 0.5..2.0),
            );
            step!((x: Float<4>, w: Float<1>) [] => {
                let options = StftOptions { hop_length: 2, ..StftOptions::new(4) };
                signal::istft(x, Some(w), None, options)
            })
        }),
    ]
}

fn grids() -> Vec<Operator> {
    vec![
        operator!("meshgrid", |d| {
            let (x, y) = (d.any::<1>(), d.any::<1>());
            step!((x: Float<1>, y: Float<1>) [] => Vec::from(grid::meshgrid(&[x, y], GridIndexing::Cartesian)))
        }),
        operator!("meshgrid", |d| {
            let (i, j) = (d.any_ints::<1>(), d.any_ints::<1>());
            step!((i: Int<1>, j: Int<1>) [] => Vec::from(grid::meshgrid(&[i, j], GridSparsity::Sparse)))
        }),
        operator!("meshgrid_stack", |d| {
            let (x, y) = (d.any::<1>(), d.any::<1>());
            step!((x: Float<1>, y: Float<1>) [] => grid::meshgrid_stack::<2, 3, Float>(&[x, y], IndexPos::First))
        }),
        operator!("meshgrid_stack", |d| {
            let (m, n) = (d.any_bools::<1>(), d.any_bools::<1>());
            step!((m: Bool<1>, n: Bool<1>) [] => grid::meshgrid_stack::<2, 3, Bool>(&[m, n], IndexPos::First))
        }),
        operator!("meshgrid_stack", |d| {
            let (i, j) = (d.any_ints::<1>(), d.any_ints::<1>());
            step!((i: Int<1>, j: Int<1>) [] => grid::meshgrid_stack::<2, 3, Int>(&[i, j], IndexPos::Last))
        }),
        operator!("affine_grid_2d", |d| {
            let (batch, height, width) = (d.len(), 2 + d.below(3), 2 + d.below(3));
            let x = d.floats([batch, 2, 3]);
            step!((x: Float<3>) [batch, height, width] => grid::affine_grid_2d(x, [batch, 1, height, width]))
        }),
        operator!("grid_sample_2d", |d| {
            let [batch, channels, rows, columns] = [4, 3, 4, 3].map(|most| 1 + d.below(most));
            let (x, g) = (
                d.floats([batch, channels, 3, 4]),
                d.floats_within([batch, rows, columns, 2], -1.0..1.0),
            );
            step!((x: Float<4>, g: Float<4>) [] => x.grid_sample_2d(g, GridSampleOptions::default()))
        }),
    ]
}
