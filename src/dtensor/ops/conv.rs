//! Convolutions and transposed convolutions.
//!
//! With one group, they are linear layers over channels: see the equations below. With several
//! groups, complete groups may be sharded: `S(1)` for the input, `S(0)` for weight and bias, `S(1)`
//! for the output.
//!
//! The weight of a transposed convolution is `[in, out, ..]`. If the output is a partial sum, the
//! bias is converted to one as in [`linear`](super::module::linear). Spatial dimensions may be
//! sharded: every rank then fetches its [halo](super::halo).

use std::ops::Range;
use std::panic::Location;

use burn::tensor::ops::{ConvOptions, ConvTransposeOptions};
use burn::tensor::{Shape, Tensor, module};
use smallvec::SmallVec;

use super::args::operand_error;
use super::halo::{Halo, Reach, SPATIAL, Spatial};
use super::placements::S;
use super::window::Window;
use super::{EinsumRule, Operand, Operator, ShardingRule, Strategy, apply, strategy};
use crate::Result;
use crate::dtensor::DTensor;

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Convolution<const N: usize> {
    windows: [Window; N],
    groups: usize,
    transposed: bool,
}

impl<const N: usize> Convolution<N> {
    fn forward(options: &ConvOptions<N>) -> Self {
        let window = |at| Window {
            stride: options.stride[at],
            padding: options.padding[at],
            dilation: options.dilation[at],
            padding_out: 0,
        };
        Self {
            windows: std::array::from_fn(window),
            groups: options.groups,
            transposed: false,
        }
    }

    fn transposed(options: &ConvTransposeOptions<N>) -> Self {
        let window = |at| Window {
            stride: options.stride[at],
            padding: (options.padding[at], options.padding[at]),
            dilation: options.dilation[at],
            padding_out: options.padding_out[at],
        };
        Self {
            windows: std::array::from_fn(window),
            groups: options.groups,
            transposed: true,
        }
    }

    /// Returns the equation. With several groups, it does not shard channels.
    fn axes(&self) -> &'static EinsumRule {
        const fn linear(name: &'static str, text: &'static str) -> EinsumRule {
            EinsumRule::new(name, text).linear(&[0, 1])
        }
        match (N, self.transposed, self.groups) {
            (1, false, 1) => &const { linear("conv1d", "bi_, oi_ + o* -> boL") },
            (1, false, _) => &const { linear("conv1d", "b__, ___ + _* -> bCL") },
            (1, true, 1) => &const { linear("conv_transpose1d", "bi_, io_ + o* -> boL") },
            (1, true, _) => &const { linear("conv_transpose1d", "b__, ___ + _* -> bCL") },
            (2, false, 1) => &const { linear("conv2d", "bi__, oi__ + o* -> boHW") },
            (2, false, _) => &const { linear("conv2d", "b___, ____ + _* -> bCHW") },
            (2, true, 1) => &const { linear("conv_transpose2d", "bi__, io__ + o* -> boHW") },
            (2, true, _) => &const { linear("conv_transpose2d", "b___, ____ + _* -> bCHW") },
            (_, false, 1) => &const { linear("conv3d", "bi___, oi___ + o* -> boDHW") },
            (_, false, _) => &const { linear("conv3d", "b____, _____ + _* -> bCDHW") },
            (_, true, 1) => &const { linear("conv_transpose3d", "bi___, io___ + o* -> boDHW") },
            (_, true, _) => &const { linear("conv_transpose3d", "b____, _____ + _* -> bCDHW") },
        }
    }

    /// Returns the output length of `window` with `kernel` elements over `len` elements.
    fn output_len(&self, window: Window, len: usize, kernel: usize) -> Option<usize> {
        if self.transposed {
            window.spread(len, kernel)
        } else {
            window.count(len, kernel, false)
        }
    }

    fn reach(&self, window: Window, kernel: usize, len: usize, output: Range<usize>) -> Reach {
        if self.transposed {
            window.reach_spread(kernel, len, output)
        } else {
            window.reach(kernel, len, output)
        }
    }

    /// Returns the number of groups that this rank convolves.
    fn local_groups(&self, op: &Operator, weight: &Shape) -> usize {
        if self.groups == 1 {
            return 1;
        }
        // A group's channels are never split: this rank holds complete groups of `x`.
        let per_group = if self.transposed {
            op.input_spec(1).shape()[0] / self.groups
        } else {
            weight[1]
        };
        (op.input_range(0, 1).len() / per_group).max(1)
    }
}

impl<const N: usize> ShardingRule for Convolution<N> {
    fn name(&self) -> &'static str {
        self.axes().name()
    }

    fn outputs(&self, inputs: &[Shape]) -> Result<Vec<Shape>> {
        let x = &inputs[0];
        let weight = &inputs[1];
        // Transposed or not, the groups follow one another along the first dimension of the weight.
        let (taken, made) = if self.transposed {
            (weight[0], weight[1] * self.groups)
        } else {
            (weight[1] * self.groups, weight[0])
        };
        let refuse = |why| Err(operand_error(self.name(), inputs, why));
        if x[1] != taken || !x[1].is_multiple_of(self.groups) || !made.is_multiple_of(self.groups) {
            return refuse(
                "the input channels must match the weight and its groups, and the groups must divide the channels",
            );
        }
        if inputs.get(2).is_some_and(|bias| bias[0] != made) {
            return refuse("the bias must have one element for each output channel");
        }
        let windows = self.windows.iter().enumerate();
        let lens = windows.map(|(at, &window)| self.output_len(window, x[2 + at], weight[2 + at]));
        match lens.collect::<Option<Vec<usize>>>() {
            Some(lens) => self
                .axes()
                .lens((self.groups > 1).then_some(made))
                .lens(lens)
                .outputs(inputs),
            None => refuse("the kernel is longer than the padded input"),
        }
    }

    fn strategies(&self, inputs: &[Shape], outputs: &[Shape]) -> Vec<Strategy> {
        let mut rows = self.axes().strategies(inputs, outputs);
        if self.groups > 1 {
            let groups = [S(1), S(0), S(0)].into_iter().take(inputs.len());
            rows.push(strategy(groups, [S(1)]).if_divides(self.groups));
        }
        rows
    }
}

/// Runs `local` with the local tensors of `x`, `weight` and `bias`, this rank's number of groups,
/// and the spatial dimensions (counted from 0) along which `x` is already padded.
#[track_caller]
fn convolve<const N: usize, const D: usize>(
    rule: Convolution<N>,
    x: Operand<D>,
    weight: DTensor<D>,
    bias: Option<DTensor<1>>,
    local: impl FnOnce(Tensor<D>, Tensor<D>, Option<Tensor<1>>, usize, &[usize]) -> Tensor<D>,
) -> DTensor<D> {
    let rule = Spatial(rule);
    let lens = x.tensor.dims();
    let at = Location::caller();
    apply(&rule, (x, weight, bias), |(x, weight, bias), op| {
        let Spatial(rule) = &rule;
        let groups = rule.local_groups(op, &weight.shape());
        let kernel = weight.shape();
        let halo = Halo::of(rule.name(), op, |at, output| {
            rule.reach(
                rule.windows[at],
                kernel[SPATIAL + at],
                lens[SPATIAL + at],
                output,
            )
        });
        match halo {
            None => local(x, weight, bias, groups, &[]),
            Some(halo) => halo.run(x, 0.0, at, |x, halo| {
                let padded: SmallVec<[usize; 3]> =
                    halo.outputs().map(|(dim, _)| dim - SPATIAL).collect();
                local(x, weight, bias, groups, &padded)
            }),
        }
    })
}

/// Drops the elements behind the last window of a grouped `conv1d`, which a stride may leave over.
/// Burn 0.22 would compute wrong gradients of the weight from them (`tests/suite/burn_limits.rs`).
fn without_rest<const N: usize, const D: usize>(
    x: Tensor<D>,
    weight: &Tensor<D>,
    mut options: ConvOptions<N>,
) -> (Tensor<D>, ConvOptions<N>) {
    let ([stride], [padding], [dilation]) = (
        &options.stride[..],
        &mut options.padding[..],
        &options.dilation[..],
    ) else {
        return (x, options);
    };
    let len = x.dims()[2];
    let rest = (len + padding.0 + padding.1 - dilation * (weight.dims()[2] - 1) - 1) % stride;
    let padded = rest.min(padding.1);
    // If all elements are behind the last window, it sees only padding, and there is no gradient at
    // all.
    if options.groups == 1 || rest == 0 || rest - padded >= len {
        return (x, options);
    }
    padding.1 -= padded;
    (x.slice_dim(2, 0..len - (rest - padded)), options)
}

macro_rules! convolutions {
    ($($name:ident $N:literal $D:literal $shape:literal),* $(,)?) => {$(
        #[doc = concat!("Convolves an input, as burn's [`", stringify!($name), "`](module::", stringify!($name), "). The input is")]
        #[doc = concat!("`[batch, channels_in, ", $shape, "]`, the weight `[channels_out, channels_in / groups, ", $shape, "]`")]
        /// and the bias `[channels_out]`.
        ///
        /// # Collective
        /// If the rule has to redistribute, or a spatial dimension is sharded: every rank of the
        /// mesh, in forward and in backward.
        ///
        /// # Panics
        /// Unwinds with a typed [`Error`](crate::Error) if the shapes do not fit.
        #[must_use]
        #[track_caller]
        pub fn $name(
            x: impl Into<Operand<$D>>,
            weight: DTensor<$D>,
            bias: Option<DTensor<1>>,
            options: impl Into<ConvOptions<$N>>,
        ) -> DTensor<$D> {
            let mut options = options.into();
            convolve(Convolution::forward(&options), x.into(), weight, bias, |x, weight, bias, groups, padded| {
                padded.iter().for_each(|&at| options.padding[at] = (0, 0));
                let (x, options) = without_rest(x, &weight, options);
                module::$name(x, weight, bias, ConvOptions { groups, ..options })
            })
        }
    )*};
}

convolutions! {
    conv1d 1 3 "length",
    conv2d 2 4 "height, width",
    conv3d 3 5 "depth, height, width",
}

macro_rules! transposed {
    ($($name:ident $N:literal $D:literal $shape:literal),* $(,)?) => {$(
        #[doc = concat!("Computes a transposed convolution, as burn's [`", stringify!($name), "`](module::", stringify!($name), "). The input is")]
        #[doc = concat!("`[batch, channels_in, ", $shape, "]`, the weight `[channels_in, channels_out / groups, ", $shape, "]`")]
        /// and the bias `[channels_out]`.
        ///
        /// # Collective
        /// If the rule has to redistribute, or a spatial dimension is sharded: every rank of the
        /// mesh, in forward and in backward.
        ///
        /// # Panics
        /// Unwinds with a typed [`Error`](crate::Error) if the shapes do not fit.
        #[must_use]
        #[track_caller]
        pub fn $name(
            x: impl Into<Operand<$D>>,
            weight: DTensor<$D>,
            bias: Option<DTensor<1>>,
            mut options: ConvTransposeOptions<$N>,
        ) -> DTensor<$D> {
            let rule = Convolution::transposed(&options);
            let windows = rule.windows;
            convolve(rule, x.into(), weight, bias, |x, weight, bias, groups, padded| {
                for &at in padded {
                    options.padding[at] = 0;
                    options.padding_out[at] = windows[at].behind(weight.dims()[SPATIAL + at]);
                }
                module::$name(x, weight, bias, ConvTransposeOptions { groups, ..options })
            })
        }
    )*};
}

transposed! {
    conv_transpose1d 1 3 "length",
    conv_transpose2d 2 4 "height, width",
    conv_transpose3d 3 5 "depth, height, width",
}
