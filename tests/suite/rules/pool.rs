//! Pooling and interpolation.

use burn::tensor::ops::{AvgPoolOptions, InterpolateMode, InterpolateOptions, MaxPoolOptions};
use burn_dtensor::testing::prove::{Case, case};

fn max<const N: usize>(kernel: [usize; N]) -> MaxPoolOptions<N> {
    MaxPoolOptions::new(kernel).with_stride([2; N]).with_padding([1; N]).with_ceil_mode(true)
}

fn avg<const N: usize>(kernel: [usize; N]) -> AvgPoolOptions<N> {
    AvgPoolOptions::new(kernel).with_stride([2; N]).with_padding_pairs([(1, 0); N]).with_count_include_pad(false)
}

fn resized() -> InterpolateOptions {
    InterpolateOptions::new(InterpolateMode::Bilinear).with_output_size([3, 5])
}

fn scaled() -> InterpolateOptions {
    InterpolateOptions::new(InterpolateMode::Nearest).with_scale_factor([1.5, 2.0])
}

pub fn cases() -> Vec<Case> {
    vec![
        case!("max_pool1d", (x: 3 = [2, 3, 6]) => module::max_pool1d(x, max([3]))),
        case!("max_pool2d", (x: 4 = [3, 2, 4, 5]) => module::max_pool2d(x, max([3, 2]))),
        case!("avg_pool1d", (x: 3 = [2, 3, 6]) => module::avg_pool1d(x, avg([3]))),
        case!("avg_pool2d", (x: 4 = [3, 2, 4, 5]) => module::avg_pool2d(x, avg([2, 3]))),
        case!("adaptive_avg_pool1d", (x: 3 = [2, 3, 6]) => module::adaptive_avg_pool1d(x, 4)),
        case!("adaptive_avg_pool2d", (x: 4 = [3, 2, 4, 6]) => module::adaptive_avg_pool2d(x, [2, 3])),
        case!("adaptive_avg_pool3d", (x: 5 = [3, 2, 2, 3, 4]) => module::adaptive_avg_pool3d(x, [1, 2, 3])),
        case!("interpolate", (x: 4 = [2, 3, 2, 4]) => module::interpolate(x, resized())),
        case!("interpolate", (x: 4 = [2, 3, 2, 2]) => module::interpolate(x, scaled())),
    ]
}
