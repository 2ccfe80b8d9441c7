//! burn's [`module::unfold4d`] and [`module::fold4d`]: images as columns of blocks, and back.
//! Windows along one dimension, `Tensor::unfold`, are in [`windows`](super::windows). Blocks extend
//! over spatial dimensions, which are not sharded. In a column, the elements of a channel are
//! adjacent, so that complete channels may be sharded:
//!
//! | | input | output | |
//! |---|---|---|---|
//! | `unfold4d` | `S(0)` | `S(0)` | |
//! | `unfold4d` | `S(1)` | `S(1)` | with equally many channels on every rank |
//! | `fold4d` | `S(1)` | `S(1)` | with equally many channels on every rank |

use burn::tensor::ops::UnfoldOptions;
use burn::tensor::{Shape, module};

use super::args::operand_error;
use super::einsum_rule::EinsumRuleAt;
use super::partial_rules::LINEAR;
use super::placements::S;
use super::window::Window;
use super::{EinsumRule, ShardingRule, Strategy, apply, strategy};
use crate::Result;
use crate::dtensor::DTensor;

/// An equation that does not shard channels, and the number of channels.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct UnfoldRule {
    axes: EinsumRuleAt,
    channels: usize,
}

impl ShardingRule for UnfoldRule {
    fn name(&self) -> &'static str {
        self.axes.name()
    }

    fn outputs(&self, inputs: &[Shape]) -> Result<Vec<Shape>> {
        self.axes.outputs(inputs)
    }

    fn strategies(&self, inputs: &[Shape], outputs: &[Shape]) -> Vec<Strategy> {
        let mut rows = self.axes.strategies(inputs, outputs);
        rows.push(strategy([S(1)], [S(1)]).if_divides(self.channels));
        rows
    }
}

/// Returns the number of blocks of an image of this size.
fn blocks(size: [usize; 2], kernel: [usize; 2], options: &UnfoldOptions) -> Option<usize> {
    let count = |at: usize| {
        let padding = (options.padding[at], options.padding[at]);
        let dilation = options.dilation[at];
        Window {
            stride: options.stride[at],
            padding,
            dilation,
            padding_out: 0,
        }
        .count(size[at], kernel[at], false)
    };
    Some(count(0)? * count(1)?)
}

/// Returns the blocks of an input `[batch, channels, height, width]` as columns, as burn's
/// [`unfold4d`](module::unfold4d): `[batch, channels * kernel, blocks]`.
///
/// # Collective
/// If the rule has to redistribute: every rank of the mesh, in forward and in backward.
///
/// # Panics
/// Unwinds with a typed [`Error`](crate::Error) if the kernel is longer than the padded input.
#[must_use]
#[track_caller]
pub fn unfold4d(x: DTensor<4>, kernel_size: [usize; 2], options: UnfoldOptions) -> DTensor<3> {
    let [_, channels, height, width] = x.dims();
    let Some(blocks) = blocks([height, width], kernel_size, &options) else {
        operand_error(
            "unfold4d",
            &[x.shape()],
            "the kernel is longer than the padded input",
        )
        .unwind()
    };
    let axes = &const { EinsumRule::new("unfold4d", "b___ -> bCL").with_partial_rules(LINEAR) };
    let rule = UnfoldRule {
        axes: axes.lens([channels * kernel_size[0] * kernel_size[1], blocks]),
        channels,
    };
    apply(&rule, x, |x, _| module::unfold4d(x, kernel_size, options))
}

/// Sums overlapping blocks, as burn's [`fold4d`](module::fold4d): from columns `[batch, channels *
/// kernel, blocks]` to `[batch, channels, height, width]`.
///
/// # Collective
/// If the rule has to redistribute: every rank of the mesh, in forward and in backward.
///
/// # Panics
/// Unwinds with a typed [`Error`](crate::Error) if the shape of the input does not fit the blocks
/// of such an image.
#[must_use]
#[track_caller]
pub fn fold4d(
    x: DTensor<3>,
    output_size: [usize; 2],
    kernel_size: [usize; 2],
    options: UnfoldOptions,
) -> DTensor<4> {
    let [_, columns, count] = x.dims();
    let [height, width] = output_size;
    let kernel = kernel_size[0] * kernel_size[1];
    let full = kernel > 0 && columns % kernel == 0;
    if !full || blocks(output_size, kernel_size, &options) != Some(count) {
        let why = format!(
            "a column must have {kernel} elements for each channel, with one column for each block of an image of \
             {height} x {width}"
        );
        operand_error("fold4d", &[x.shape()], why).unwind()
    }
    let axes = &const { EinsumRule::new("fold4d", "b__ -> bCHW").with_partial_rules(LINEAR) };
    let channels = columns / kernel;
    let rule = UnfoldRule {
        axes: axes.lens([channels, height, width]),
        channels,
    };
    apply(&rule, x, |x, _| {
        module::fold4d(x, output_size, kernel_size, options)
    })
}
