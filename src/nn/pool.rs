//! Forward of burn-nn's pooling layers over DTensors.

use burn::nn::pool::{
    AdaptiveAvgPool1d, AdaptiveAvgPool2d, AdaptiveAvgPool3d, AvgPool1d, AvgPool2d, MaxPool1d,
    MaxPool2d,
};
use burn::tensor::ops::{AvgPoolOptions, MaxPoolOptions};

use super::DTensorForward;
use super::padding::Padding;
use crate::dtensor::DTensor;
use crate::dtensor::ops::module;

macro_rules! pools {
    ($($Layer:ident[$D:literal]($pool:ident, $x:ident) => $forward:expr),* $(,)?) => {$(
        impl DTensorForward<DTensor<$D>> for $Layer {
            type Output = DTensor<$D>;

            fn forward_dtensor(&self, $x: DTensor<$D>) -> DTensor<$D> {
                let $pool = self;
                $forward
            }
        }
    )*};
}

pools! {
    MaxPool1d[3](pool, x) => {
        let options = max([pool.kernel_size], [pool.stride], [pool.dilation], pool.ceil_mode);
        let padding = pool.padding.pairs([x.dims()[2]], [pool.kernel_size], [pool.stride]);
        module::max_pool1d(x, options.with_padding_pairs(padding))
    },
    MaxPool2d[4](pool, x) => {
        let options = max(pool.kernel_size, pool.stride, pool.dilation, pool.ceil_mode);
        let [_, _, height, width] = x.dims();
        let padding = pool.padding.pairs([height, width], pool.kernel_size, pool.stride);
        module::max_pool2d(x, options.with_padding_pairs(padding))
    },
    AvgPool1d[3](pool, x) => {
        let options = average([pool.kernel_size], [pool.stride], pool.count_include_pad, pool.ceil_mode);
        let padding = pool.padding.pairs([x.dims()[2]], [pool.kernel_size], [pool.stride]);
        module::avg_pool1d(x, options.with_padding_pairs(padding))
    },
    AvgPool2d[4](pool, x) => {
        let options = average(pool.kernel_size, pool.stride, pool.count_include_pad, pool.ceil_mode);
        let [_, _, height, width] = x.dims();
        let padding = pool.padding.pairs([height, width], pool.kernel_size, pool.stride);
        module::avg_pool2d(x, options.with_padding_pairs(padding))
    },
    AdaptiveAvgPool1d[3](pool, x) => module::adaptive_avg_pool1d(x, pool.output_size),
    AdaptiveAvgPool2d[4](pool, x) => module::adaptive_avg_pool2d(x, pool.output_size),
    AdaptiveAvgPool3d[5](pool, x) => module::adaptive_avg_pool3d(x, pool.output_size),
}

fn max<const N: usize>(
    kernel: [usize; N],
    stride: [usize; N],
    dilation: [usize; N],
    ceil: bool,
) -> MaxPoolOptions<N> {
    MaxPoolOptions::new(kernel)
        .with_stride(stride)
        .with_dilation(dilation)
        .with_ceil_mode(ceil)
}

fn average<const N: usize>(
    kernel: [usize; N],
    stride: [usize; N],
    count_include_pad: bool,
    ceil: bool,
) -> AvgPoolOptions<N> {
    let options = AvgPoolOptions::new(kernel).with_stride(stride);
    options
        .with_count_include_pad(count_include_pad)
        .with_ceil_mode(ceil)
}
