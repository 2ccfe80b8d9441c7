//! Pooling and interpolation: windows over spatial dimensions, which are whole.
//!
//! | | `x` `[b, c, ..]` | output `[b, c, ..]` |
//! |---|---|---|
//! | batch | `S(0)` | `S(0)` |
//! | channels | `S(1)` | `S(1)` |
//! | averages | `P(sum)`, `P(avg)` | the same |
//! | maxima | `P(max)` | `P(max)` |

use burn::tensor::ops::{AvgPoolOptions, InterpolateOptions, MaxPoolOptions};
use burn::tensor::{Shape, module};

use super::args::misfit;
use super::placements::{AVG, MAX, SUM};
use super::rows::{kept, through};
use super::{Rule, Strategy, unary};
use crate::Result;
use crate::dtensor::DTensor;
use crate::placement::Placement;

const AVERAGE: &[Placement] = &[SUM, AVG];
const MAXIMUM: &[Placement] = &[MAX];

/// A pooling to spatial dimensions of known lengths; none where the windows do not fit.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Pool<const N: usize> {
    name: &'static str,
    output: Option<[usize; N]>,
    partials: &'static [Placement],
}

impl<const N: usize> Rule for Pool<N> {
    fn name(&self) -> &'static str {
        self.name
    }

    fn outputs(&self, inputs: &[Shape]) -> Result<Vec<Shape>> {
        let Some(lens) = self.output else {
            return Err(misfit(self.name, inputs, "the kernel is longer than the padded input"));
        };
        let mut output = inputs[0].clone();
        output[2..].copy_from_slice(&lens);
        Ok(vec![output])
    }

    fn strategies(&self, _: &[Shape], _: &[Shape]) -> Vec<Strategy> {
        kept(1, 0..2).chain(through(1, self.partials)).collect()
    }
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

fn max_pool<const D: usize, const N: usize>(
    name: &'static str,
    x: &DTensor<D>,
    options: &MaxPoolOptions<N>,
) -> Pool<N> {
    let MaxPoolOptions { kernel_size, stride, padding, dilation, ceil_mode } = options;
    let len = |at| windows(x.spec.shape()[2 + at], kernel_size[at], stride[at], padding[at], dilation[at], *ceil_mode);
    Pool { name, output: all(len), partials: MAXIMUM }
}

fn avg_pool<const D: usize, const N: usize>(
    name: &'static str,
    x: &DTensor<D>,
    options: &AvgPoolOptions<N>,
) -> Pool<N> {
    let AvgPoolOptions { kernel_size, stride, padding, ceil_mode, .. } = options;
    let len = |at| windows(x.spec.shape()[2 + at], kernel_size[at], stride[at], padding[at], 1, *ceil_mode);
    Pool { name, output: all(len), partials: AVERAGE }
}

fn all<const N: usize>(len: impl Fn(usize) -> Option<usize>) -> Option<[usize; N]> {
    let mut lens = [0; N];
    for (at, slot) in lens.iter_mut().enumerate() {
        *slot = len(at)?;
    }
    Some(lens)
}

macro_rules! pools {
    ($($name:ident $rule:ident $D:literal $Options:ty, $shape:literal);* $(;)?) => {$(
        #[doc = concat!("Pooling, as burn's [`", stringify!($name), "`](module::", stringify!($name), "), of an input `[batch, channels, ", $shape, "]`.")]
        ///
        /// # Collective
        /// If the rule has to redistribute: every rank of the mesh, in forward and in backward.
        ///
        /// # Panics
        /// Unwinds with a typed [`Error`](crate::Error) if the kernel is longer than the padded input.
        #[must_use]
        pub fn $name(x: DTensor<$D>, options: $Options) -> DTensor<$D> {
            unary(&$rule(stringify!($name), &x, &options), x, |x, _| module::$name(x, options))
        }
    )*};
}

pools! {
    max_pool1d max_pool 3 MaxPoolOptions<1>, "length";
    max_pool2d max_pool 4 MaxPoolOptions<2>, "height, width";
    avg_pool1d avg_pool 3 AvgPoolOptions<1>, "length";
    avg_pool2d avg_pool 4 AvgPoolOptions<2>, "height, width";
}

/// Averages of an input `[batch, channels, length]` over `output_size` windows, as burn's
/// [`adaptive_avg_pool1d`](module::adaptive_avg_pool1d).
///
/// # Collective
/// If the rule has to redistribute: every rank of the mesh, in forward and in backward.
#[must_use]
pub fn adaptive_avg_pool1d(x: DTensor<3>, output_size: usize) -> DTensor<3> {
    let rule = Pool { name: "adaptive_avg_pool1d", output: Some([output_size]), partials: AVERAGE };
    unary(&rule, x, |x, _| module::adaptive_avg_pool1d(x, output_size))
}

/// Averages of an input `[batch, channels, height, width]` over `output_size` windows, as burn's
/// [`adaptive_avg_pool2d`](module::adaptive_avg_pool2d).
///
/// # Collective
/// If the rule has to redistribute: every rank of the mesh, in forward and in backward.
#[must_use]
pub fn adaptive_avg_pool2d(x: DTensor<4>, output_size: [usize; 2]) -> DTensor<4> {
    let rule = Pool { name: "adaptive_avg_pool2d", output: Some(output_size), partials: AVERAGE };
    unary(&rule, x, |x, _| module::adaptive_avg_pool2d(x, output_size))
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
pub fn interpolate(x: DTensor<4>, options: InterpolateOptions) -> DTensor<4> {
    let [_, _, height, width] = x.dims();
    let scaled = |len: usize, scale: f32| (len as f64 * f64::from(scale)) as usize;
    let size = options.output_size.or_else(|| {
        let [tall, wide] = options.scale_factor?;
        Some([scaled(height, tall), scaled(width, wide)])
    });
    let rule = Pool { name: "interpolate", output: size.or(Some([height, width])), partials: AVERAGE };
    unary(&rule, x, |x, _| module::interpolate(x, options))
}
