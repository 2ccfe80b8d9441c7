//! Deformable convolution. Every kernel element reads at its offset, which may be anywhere in the
//! image, so spatial dimensions are not sharded.
//!
//! With one group, and offsets shared by all channels, it is a linear layer over channels like
//! other [convolutions](super::conv): see the equations. Otherwise channels are not sharded either.

use burn::tensor::ops::DeformConvOptions;
use burn::tensor::{Shape, module};

use super::args::operand_error;
use super::window::Window;
use super::{EinsumRule, Operand, apply};
use crate::dtensor::DTensor;

/// Computes a deformable 2-D convolution, as burn's [`deform_conv2d`](module::deform_conv2d).
///
/// # Shapes
/// - `x`: `[batch, channels_in, height, width]`
/// - `offset`: `[batch, 2 * offset_groups * kernel_height * kernel_width, height_out, width_out]`
/// - `weight`: `[channels_out, channels_in / weight_groups, kernel_height, kernel_width]`
/// - `mask`: `[batch, offset_groups * kernel_height * kernel_width, height_out, width_out]`
/// - `bias`: `[channels_out]`
/// - output: `[batch, channels_out, height_out, width_out]`
///
/// # Collective
/// If the rule has to redistribute: every rank of the mesh, in forward and in backward.
///
/// # Panics
/// Unwinds with a typed [`Error`](crate::Error) if the shapes do not fit.
#[must_use]
#[track_caller]
pub fn deform_conv2d(
    x: impl Into<Operand<4>>,
    offset: DTensor<4>,
    weight: DTensor<4>,
    mask: Option<DTensor<4>>,
    bias: Option<DTensor<1>>,
    options: DeformConvOptions<2>,
) -> DTensor<4> {
    let x = x.into();
    const fn linear(text: &'static str) -> EinsumRule {
        EinsumRule::new("deform_conv2d", text).linear(&[0, 2])
    }
    let is_linear = options.weight_groups == 1 && options.offset_groups == 1;
    let axes = match (is_linear, mask.is_some()) {
        (true, false) => &const { linear("bi__, b_HW, oi__ + o* -> boHW") },
        (true, true) => &const { linear("bi__, b_HW, oi__, b_HW + o* -> boHW") },
        (false, false) => &const { linear("b___, b_HW, ____ + _* -> bCHW") },
        (false, true) => &const { linear("b___, b_HW, ____, b_HW + _* -> bCHW") },
    };
    if let Some(why) = misfits(
        &x.tensor,
        &offset,
        &weight,
        mask.as_ref(),
        bias.as_ref(),
        &options,
    ) {
        let shapes: Vec<Shape> = [&x.tensor, &offset, &weight]
            .into_iter()
            .chain(&mask)
            .map(DTensor::shape)
            .collect();
        operand_error("deform_conv2d", &shapes, why).unwind()
    }
    let rule = axes.lens((!is_linear).then_some(weight.dims()[0]));
    apply(
        &rule,
        (x, offset, weight, mask, bias),
        |(x, offset, weight, mask, bias), _| {
            module::deform_conv2d(x, offset, weight, mask, bias, options)
        },
    )
}

/// Returns a description of shapes that do not fit, except for mismatches that the equation finds.
fn misfits(
    x: &DTensor<4>,
    offset: &DTensor<4>,
    weight: &DTensor<4>,
    mask: Option<&DTensor<4>>,
    bias: Option<&DTensor<1>>,
    options: &DeformConvOptions<2>,
) -> Option<&'static str> {
    let [_, taken, height, width] = x.dims();
    let [made, per_group, tall, wide] = weight.dims();
    let groups = options.weight_groups;
    let elements = options.offset_groups * tall * wide;
    if taken != per_group * groups || made % groups != 0 {
        return Some(
            "the input channels must match the weight and its groups, and the groups must divide the channels",
        );
    }
    if taken % options.offset_groups != 0 || offset.dims()[1] != 2 * elements {
        return Some(
            "`offset` must have two channels for each kernel element of every offset group",
        );
    }
    if mask.is_some_and(|mask| mask.dims()[1] != elements) {
        return Some(
            "the mask must have one channel for each kernel element of every offset group",
        );
    }
    if bias.is_some_and(|bias| bias.dims() != [made]) {
        return Some("the bias must have one element for each output channel");
    }
    let count = |at: usize, len: usize, kernel: usize| {
        let padding = (options.padding[at], options.padding[at]);
        let window = Window {
            stride: options.stride[at],
            padding,
            dilation: options.dilation[at],
            padding_out: 0,
        };
        window.count(len, kernel, false)
    };
    let size = [count(0, height, tall), count(1, width, wide)];
    let is_as_large = |map: &DTensor<4>| size == [Some(map.dims()[2]), Some(map.dims()[3])];
    (!is_as_large(offset) || !mask.is_none_or(is_as_large))
        .then_some("offset and mask must have the height and width of the output")
}
