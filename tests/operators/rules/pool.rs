//! Pooling, interpolation, and images as columns of blocks.

use burn::tensor::ops::{
    AvgPoolOptions, InterpolateMode, InterpolateOptions, MaxPoolOptions, UnfoldOptions,
};
use burn_dtensor::testing::prove::{Case, case};

fn max<const N: usize>(kernel: [usize; N]) -> MaxPoolOptions<N> {
    MaxPoolOptions::new(kernel)
        .with_stride([2; N])
        .with_padding([1; N])
        .with_ceil_mode(true)
}

fn avg<const N: usize>(kernel: [usize; N]) -> AvgPoolOptions<N> {
    AvgPoolOptions::new(kernel)
        .with_stride([2; N])
        .with_padding_pairs([(1, 0); N])
        .with_count_include_pad(false)
}

fn resized() -> InterpolateOptions {
    InterpolateOptions::new(InterpolateMode::Bilinear).with_output_size([3, 5])
}

fn cubic() -> InterpolateOptions {
    InterpolateOptions::new(InterpolateMode::Bicubic).with_output_size([6, 5])
}

fn scaled() -> InterpolateOptions {
    InterpolateOptions::new(InterpolateMode::Nearest).with_scale_factor([1.5, 2.0])
}

fn blocks() -> UnfoldOptions {
    UnfoldOptions::new([1, 2], [1, 0], [1, 1])
}

pub fn cases() -> Vec<Case> {
    vec![
        case!("max_pool1d", (x: 3 = [2, 3, 6]) => module::max_pool1d(x, max([3]))),
        case!("max_pool2d", (x: 4 = [3, 2, 4, 5]) => module::max_pool2d(x, max([3, 2]))),
        case!("avg_pool1d", (x: 3 = [2, 3, 6]) => module::avg_pool1d(x, avg([3]))),
        case!("avg_pool2d", (x: 4 = [3, 2, 4, 5]) => module::avg_pool2d(x, avg([2, 3]))),
        case!("adaptive_avg_pool1d", (x: 3 = [2, 3, 6]) => module::adaptive_avg_pool1d(x, 4)),
        case!("adaptive_avg_pool2d", (x: 4 = [3, 2, 4, 6]) => module::adaptive_avg_pool2d(x, [2, 3])),
        case!("adaptive_avg_pool3d", (x: 5 = [3, 2, 4, 2, 3]) => module::adaptive_avg_pool3d(x, [2, 1, 2])),
        case!("max_pool1d_with_indices", (x: 3 = [2, 3, 6]) => module::max_pool1d_with_indices(x, max([3]))),
        case!("max_pool2d_with_indices", (x: 4 = [3, 2, 4, 5]) => module::max_pool2d_with_indices(x, max([3, 2]))),
        case!("unfold4d", (x: 4 = [3, 4, 4, 5]) => module::unfold4d(x, [2, 3], blocks())),
        case!("unfold4d", (x: 4 = [2, 3, 3, 3]) => module::unfold4d(x, [1, 2], UnfoldOptions::new([1, 1], [0, 0], [1, 1]))),
        case!("fold4d", (x: 3 = [3, 24, 10]) => module::fold4d(x, [4, 5], [2, 3], blocks())),
        case!("interpolate", (x: 4 = [2, 3, 5, 4]) => module::interpolate(x, cubic())),
        case!("interpolate", (x: 4 = [2, 3, 2, 4]) => module::interpolate(x, resized())),
        case!("interpolate", (x: 4 = [2, 3, 2, 2]) => module::interpolate(x, scaled())),
    ]
}
