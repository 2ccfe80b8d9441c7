//! Pooling and interpolation: windows over spatial dimensions, which are whole.

use burn::tensor::module;
use burn::tensor::ops::{AvgPoolOptions, InterpolateOptions, MaxPoolOptions};

use super::args::misfit;
use super::axes::AxesAt;
use super::partials::{INCREASING_TO, LINEAR, Partials};
use super::{Axes, Rule, apply};
use crate::dtensor::DTensor;

/// A pooling of `[batch, channels, ..]`, to spatial dimensions of given lengths.
const fn pool<const D: usize>(name: &'static str, partials: Partials) -> Axes {
    let text = match D {
        3 => "bc_ -> bcL",
        4 => "bc__ -> bcHW",
        _ => "bc___ -> bcDHW",
    };
    Axes::new(name, text).through(partials)
}

/// Number of windows along a dimension of `len`.
fn windows(
    len: usize,
    kernel: usize,
    stride: usize,
    padding: (usize, usize),
    dilation: usize,
    ceil: bool,
) -> Option<usize> {
    let padded = len + padding.0 + padding.1 + if ceil { stride - 1 } else { 0 };
    let count = padded.checked_sub(dilation * (kernel - 1) + 1)? / stride + 1;
    // In ceil mode the last window must start before the padding behind.
    let beyond = ceil && count > 1 && (count - 1) * stride >= len + padding.0;
    Some(count - usize::from(beyond))
}

#[track_caller]
fn max_pool<const D: usize, const N: usize>(
    rule: &'static Axes,
    x: &DTensor<D>,
    options: &MaxPoolOptions<N>,
) -> AxesAt {
    let MaxPoolOptions { kernel_size, stride, padding, dilation, ceil_mode } = options;
    let len = |at| windows(x.dims()[2 + at], kernel_size[at], stride[at], padding[at], dilation[at], *ceil_mode);
    rule.lens(all::<D, N>(rule.name(), x, len))
}

#[track_caller]
fn avg_pool<const D: usize, const N: usize>(
    rule: &'static Axes,
    x: &DTensor<D>,
    options: &AvgPoolOptions<N>,
) -> AxesAt {
    let AvgPoolOptions { kernel_size, stride, padding, ceil_mode, .. } = options;
    let len = |at| windows(x.dims()[2 + at], kernel_size[at], stride[at], padding[at], 1, *ceil_mode);
    rule.lens(all::<D, N>(rule.name(), x, len))
}

#[track_caller]
fn all<const D: usize, const N: usize>(
    name: &'static str,
    x: &DTensor<D>,
    len: impl Fn(usize) -> Option<usize>,
) -> [usize; N] {
    let mut lens = [0; N];
    for (at, slot) in lens.iter_mut().enumerate() {
        let why = "the kernel is longer than the padded input";
        *slot = len(at).unwrap_or_else(|| misfit(name, &[x.shape()], why).unwind());
    }
    lens
}

macro_rules! pools {
    ($($name:ident $rule:ident($partials:ident) $D:literal $Options:ty, $shape:literal);* $(;)?) => {$(
        #[doc = concat!("Pooling, as burn's [`", stringify!($name), "`](module::", stringify!($name), "), of an input `[batch, channels, ", $shape, "]`.")]
        ///
        /// # Collective
        /// If the rule has to redistribute: every rank of the mesh, in forward and in backward.
        ///
        /// # Panics
        /// Unwinds with a typed [`Error`](crate::Error) if the kernel is longer than the padded input.
        #[must_use]
        #[track_caller]
        pub fn $name(x: DTensor<$D>, options: $Options) -> DTensor<$D> {
            let rule = &const { pool::<$D>(stringify!($name), $partials) };
            apply(&$rule(rule, &x, &options), x, |x, _| module::$name(x, options))
        }
    )*};
}

pools! {
    max_pool1d max_pool(INCREASING_TO) 3 MaxPoolOptions<1>, "length";
    max_pool2d max_pool(INCREASING_TO) 4 MaxPoolOptions<2>, "height, width";
    avg_pool1d avg_pool(LINEAR) 3 AvgPoolOptions<1>, "length";
    avg_pool2d avg_pool(LINEAR) 4 AvgPoolOptions<2>, "height, width";
}

/// Averages of an input `[batch, channels, length]` over `output_size` windows, as burn's
/// [`adaptive_avg_pool1d`](module::adaptive_avg_pool1d).
///
/// # Collective
/// If the rule has to redistribute: every rank of the mesh, in forward and in backward.
#[must_use]
#[track_caller]
pub fn adaptive_avg_pool1d(x: DTensor<3>, output_size: usize) -> DTensor<3> {
    let rule = &const { pool::<3>("adaptive_avg_pool1d", LINEAR) };
    apply(&rule.lens([output_size]), x, |x, _| module::adaptive_avg_pool1d(x, output_size))
}

/// Averages of an input `[batch, channels, height, width]` over `output_size` windows, as burn's
/// [`adaptive_avg_pool2d`](module::adaptive_avg_pool2d).
///
/// # Collective
/// If the rule has to redistribute: every rank of the mesh, in forward and in backward.
#[must_use]
#[track_caller]
pub fn adaptive_avg_pool2d(x: DTensor<4>, output_size: [usize; 2]) -> DTensor<4> {
    let rule = &const { pool::<4>("adaptive_avg_pool2d", LINEAR) };
    apply(&rule.lens(output_size), x, |x, _| module::adaptive_avg_pool2d(x, output_size))
}

/// Averages of an input `[batch, channels, depth, height, width]` over `output_size` windows, as burn's
/// [`adaptive_avg_pool3d`](module::adaptive_avg_pool3d).
///
/// # Collective
/// If the rule has to redistribute: every rank of the mesh, in forward and in backward.
#[must_use]
#[track_caller]
pub fn adaptive_avg_pool3d(x: DTensor<5>, output_size: [usize; 3]) -> DTensor<5> {
    let rule = &const { pool::<5>("adaptive_avg_pool3d", LINEAR) };
    apply(&rule.lens(output_size), x, |x, _| module::adaptive_avg_pool3d(x, output_size))
}

/// Resizes an input `[batch, channels, height, width]`, as burn's
/// [`interpolate`](module::interpolate).
///
/// # Collective
/// If the rule has to redistribute: every rank of the mesh, in forward and in backward.
///
/// # Panics
/// As burn's, unless exactly one of `output_size` and `scale_factor` is set.
#[must_use]
#[track_caller]
pub fn interpolate(x: DTensor<4>, options: InterpolateOptions) -> DTensor<4> {
    let [_, _, height, width] = x.dims();
    let scaled = |len: usize, scale: f32| (len as f64 * f64::from(scale)) as usize;
    let size = options.output_size.or_else(|| {
        let [tall, wide] = options.scale_factor?;
        Some([scaled(height, tall), scaled(width, wide)])
    });
    let rule = &const { pool::<4>("interpolate", LINEAR) };
    apply(&rule.lens(size.unwrap_or([height, width])), x, |x, _| module::interpolate(x, options))
}
