//! Pooling: windows over spatial dimensions. If a spatial dimension is sharded, every rank fetches
//! the [halo](super::halo) of its windows. Adaptive pools, and those that return indices, do not
//! shard spatial dimensions.

use std::panic::Location;

use burn::tensor::ops::{AvgPoolOptions, MaxPoolOptions};
use burn::tensor::{Int, Tensor, module};

use super::args::operand_error;
use super::halo::{Halo, SPATIAL, Spatial};
use super::partial_rules::{INCREASING_TO, LINEAR, NO_PARTIAL, PartialRules};
use super::window::Window;
use super::{EinsumRule, ShardingRule, apply};
use crate::dtensor::DTensor;

/// Makes the rule of a pooling of `[batch, channels, ..]` to spatial dimensions of given lengths.
const fn pool<const D: usize>(name: &'static str, partials: PartialRules) -> EinsumRule {
    let text = match D {
        3 => "bc_ -> bcL",
        4 => "bc__ -> bcHW",
        _ => "bc___ -> bcDHW",
    };
    EinsumRule::new(name, text).with_partial_rules(partials)
}

/// Windows over the spatial dimensions of one input.
struct Windows<const N: usize> {
    windows: [Window; N],
    kernel: [usize; N],
    /// Number of windows along each dimension.
    counts: [usize; N],
}

impl<const N: usize> Windows<N> {
    /// Makes the windows for these options over `x`.
    #[track_caller]
    fn new<const D: usize>(
        name: &'static str,
        x: &DTensor<D>,
        kernel: [usize; N],
        (stride, padding, dilation): ([usize; N], [(usize, usize); N], [usize; N]),
        ceil: bool,
    ) -> Self {
        let windows = std::array::from_fn(|at| Window {
            stride: stride[at],
            padding: padding[at],
            dilation: dilation[at],
            padding_out: 0,
        });
        let count = |at: usize| {
            let window: &Window = &windows[at];
            window
                .count(x.dims()[SPATIAL + at], kernel[at], ceil)
                .unwrap_or_else(|| {
                    operand_error(
                        name,
                        &[x.shape()],
                        "the kernel is longer than the padded input",
                    )
                    .unwind()
                })
        };
        let counts = std::array::from_fn(count);
        Self {
            windows,
            kernel,
            counts,
        }
    }

    fn of_max<const D: usize>(
        name: &'static str,
        x: &DTensor<D>,
        options: &MaxPoolOptions<N>,
    ) -> Self {
        let MaxPoolOptions {
            kernel_size,
            stride,
            padding,
            dilation,
            ceil_mode,
        } = options.clone();
        Self::new(name, x, kernel_size, (stride, padding, dilation), ceil_mode)
    }

    fn of_avg<const D: usize>(
        name: &'static str,
        x: &DTensor<D>,
        options: &AvgPoolOptions<N>,
    ) -> Self {
        let AvgPoolOptions {
            kernel_size,
            stride,
            padding,
            ceil_mode,
            ..
        } = options.clone();
        Self::new(name, x, kernel_size, (stride, padding, [1; N]), ceil_mode)
    }
}

#[track_caller]
fn max_pool<const D: usize, const N: usize>(
    rule: &'static EinsumRule,
    x: DTensor<D>,
    mut options: MaxPoolOptions<N>,
    local: impl FnOnce(Tensor<D>, MaxPoolOptions<N>) -> Tensor<D>,
) -> DTensor<D> {
    let name = rule.name();
    let Windows {
        windows,
        kernel,
        counts,
    } = Windows::of_max(name, &x, &options);
    let lens = x.dims();
    let at = Location::caller();
    apply(&Spatial(rule.lens(counts)), x, |x, op| {
        match Halo::of(name, op, |at, output| {
            windows[at].reach(kernel[at], lens[SPATIAL + at], output)
        }) {
            None => local(x, options),
            Some(halo) => halo.run(x, f64::NEG_INFINITY, at, |x, halo| {
                halo.outputs()
                    .for_each(|(dim, _)| options.padding[dim - SPATIAL] = (0, 0));
                local(x, options)
            }),
        }
    })
}

/// If padding is not to be counted, burn would count padding that is written into the input. The
/// averages are therefore corrected.
#[track_caller]
fn avg_pool<const D: usize, const N: usize>(
    rule: &'static EinsumRule,
    x: DTensor<D>,
    mut options: AvgPoolOptions<N>,
    local: impl FnOnce(Tensor<D>, AvgPoolOptions<N>) -> Tensor<D>,
) -> DTensor<D> {
    let name = rule.name();
    let Windows {
        windows,
        kernel,
        counts,
    } = Windows::of_avg(name, &x, &options);
    let lens = x.dims();
    let padding_counts = options.count_include_pad;
    let caller = Location::caller();
    apply(&Spatial(rule.lens(counts)), x, |x, op| {
        match Halo::of(name, op, |at, output| {
            windows[at].reach(kernel[at], lens[SPATIAL + at], output)
        }) {
            None => local(x, options),
            Some(halo) => halo.run(x, 0.0, caller, |x, halo| {
                halo.outputs()
                    .for_each(|(dim, _)| options.padding[dim - SPATIAL] = (0, 0));
                halo.outputs()
                    .fold(local(x, options), |averages, (dim, output)| {
                        let at = dim - SPATIAL;
                        let counted = |position| {
                            windows[at].counted(lens[dim], kernel[at], position, padding_counts)
                        };
                        if (0..counts[at]).all(|position| counted(position) == kernel[at]) {
                            return averages;
                        }
                        let factors: Vec<f64> = output
                            .clone()
                            .map(|position| kernel[at] as f64 / counted(position).max(1) as f64)
                            .collect();
                        let mut shape = [1; D];
                        shape[dim] = factors.len();
                        let factors = Tensor::<1>::from_data(
                            &factors[..],
                            (&averages.device(), averages.dtype()),
                        );
                        averages * factors.reshape(shape)
                    })
            }),
        }
    })
}

macro_rules! pools {
    ($($name:ident $local:ident($partials:ident) $D:literal $Options:ty, $shape:literal);* $(;)?) => {$(
        #[doc = concat!("Applies burn's [`", stringify!($name), "`](module::", stringify!($name), ") to an input `[batch, channels, ", $shape, "]`.")]
        ///
        /// # Collective
        /// If the rule has to redistribute, or a spatial dimension is sharded: every rank of the
        /// mesh, in forward and in backward.
        ///
        /// # Panics
        /// Unwinds with a typed [`Error`](crate::Error) if the kernel is longer than the padded
        /// input.
        #[must_use]
        #[track_caller]
        pub fn $name(x: DTensor<$D>, options: $Options) -> DTensor<$D> {
            $local(&const { pool::<$D>(stringify!($name), $partials) }, x, options, |x, options| module::$name(x, options))
        }
    )*};
}

pools! {
    max_pool1d max_pool(INCREASING_TO) 3 MaxPoolOptions<1>, "length";
    max_pool2d max_pool(INCREASING_TO) 4 MaxPoolOptions<2>, "height, width";
    avg_pool1d avg_pool(LINEAR) 3 AvgPoolOptions<1>, "length";
    avg_pool2d avg_pool(LINEAR) 4 AvgPoolOptions<2>, "height, width";
}

macro_rules! with_indices {
    ($($name:ident $text:literal $D:literal $N:literal, $shape:literal);* $(;)?) => {$(
        #[doc = concat!("Returns maxima and their indices, as burn's [`", stringify!($name), "`](module::", stringify!($name), "), of an")]
        #[doc = concat!("input `[batch, channels, ", $shape, "]`. An index counts over all spatial dimensions together.")]
        ///
        /// # Collective
        /// If the rule has to redistribute: every rank of the mesh, in forward and in backward.
        ///
        /// # Panics
        /// Unwinds with a typed [`Error`](crate::Error) if the kernel is longer than the padded
        /// input.
        #[must_use]
        #[track_caller]
        pub fn $name(x: DTensor<$D>, options: MaxPoolOptions<$N>) -> (DTensor<$D>, DTensor<$D, Int>) {
            let rule = &const { EinsumRule::new(stringify!($name), $text).with_partial_rules(NO_PARTIAL) };
            let counts = Windows::of_max(stringify!($name), &x, &options).counts;
            apply(&rule.lens(counts), x, |x, _| module::$name(x, options))
        }
    )*};
}

with_indices! {
    max_pool1d_with_indices "bc_ -> bcL, bcL" 3 1, "length";
    max_pool2d_with_indices "bc__ -> bcHW, bcHW" 4 2, "height, width";
}

macro_rules! adaptive {
    ($($name:ident($D:literal, $Size:ty, $lens:expr, $shape:literal));* $(;)?) => {$(
        #[doc = concat!("Averages an input `[batch, channels, ", $shape, "]` over `output_size` windows, as burn's")]
        #[doc = concat!("[`", stringify!($name), "`](module::", stringify!($name), ").")]
        ///
        /// # Collective
        /// If the rule has to redistribute: every rank of the mesh, in forward and in backward.
        #[must_use]
        #[track_caller]
        pub fn $name(x: DTensor<$D>, output_size: $Size) -> DTensor<$D> {
            let rule = &const { pool::<$D>(stringify!($name), LINEAR) };
            let lens: fn($Size) -> [usize; $D - SPATIAL] = $lens;
            apply(&rule.lens(lens(output_size)), x, |x, _| module::$name(x, output_size))
        }
    )*};
}

adaptive! {
    adaptive_avg_pool1d(3, usize, |len| [len], "length");
    adaptive_avg_pool2d(4, [usize; 2], |lens| lens, "height, width");
    adaptive_avg_pool3d(5, [usize; 3], |lens| lens, "depth, height, width");
}
