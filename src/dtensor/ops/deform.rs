//! Deformable convolution: each rank has some images, or computes some output channels.

use burn::tensor::ops::DeformConvOptions;
use burn::tensor::{Shape, module};

use super::args::misfit;
use super::{Axes, Operand, Rule, Strategy, apply};
use crate::Result;
use crate::dtensor::DTensor;

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Deformable {
    stride: [usize; 2],
    padding: [usize; 2],
    dilation: [usize; 2],
    weight_groups: usize,
    offset_groups: usize,
    mask: bool,
    bias: bool,
}

impl Deformable {
    /// Input, offset, weight, and what there is of a mask and a bias: several groups' channels are taken for whole.
    fn axes(&self) -> &'static Axes {
        const fn named(text: &'static str) -> Axes {
            Axes::new("deform_conv2d", text)
        }
        match (self.weight_groups, self.mask, self.bias) {
            (1, false, false) => &const { named("b___, b___, o___ -> boHW") },
            (1, true, false) => &const { named("b___, b___, o___, b___ -> boHW") },
            (1, false, true) => &const { named("b___, b___, o___, o -> boHW") },
            (1, true, true) => &const { named("b___, b___, o___, b___, o -> boHW") },
            (_, false, false) => &const { named("b___, b___, ____ -> bCHW") },
            (_, true, false) => &const { named("b___, b___, ____, b___ -> bCHW") },
            (_, false, true) => &const { named("b___, b___, ____, _ -> bCHW") },
            (_, true, true) => &const { named("b___, b___, ____, b___, _ -> bCHW") },
        }
    }

    /// Length of the output along spatial dimension `at`.
    fn len(&self, at: usize, x: &Shape, weight: &Shape) -> Option<usize> {
        let extent = self.dilation[at] * weight[2 + at].checked_sub(1)? + 1;
        Some((x[2 + at] + 2 * self.padding[at]).checked_sub(extent)? / self.stride[at] + 1)
    }
}

impl Rule for Deformable {
    fn name(&self) -> &'static str {
        self.axes().name()
    }

    fn outputs(&self, inputs: &[Shape]) -> Result<Vec<Shape>> {
        let [x, offset, weight, rest @ ..] = inputs else { unreachable!("three inputs are always there") };
        let refuse = |why: &str| Err(misfit(self.name(), inputs, why));
        if x[1] != weight[1] * self.weight_groups || !weight[0].is_multiple_of(self.weight_groups) {
            return refuse(
                "the input's channels must be those that the weight's groups take, and groups must divide channels",
            );
        }
        let (Some(height), Some(width)) = (self.len(0, x, weight), self.len(1, x, weight)) else {
            return refuse("the kernel is longer than the padded input");
        };
        let points = self.offset_groups * weight[2] * weight[3];
        let fits = |shape: &Shape, channels| shape[1..] == [channels, height, width];
        if !x[1].is_multiple_of(self.offset_groups)
            || !fits(offset, 2 * points)
            || self.mask && !rest.first().is_some_and(|mask| fits(mask, points))
        {
            return refuse(
                "for each point of the kernel and group of offsets, the offset needs two channels and the mask one, as \
                 high and wide as the output",
            );
        }
        if self.bias && rest.last().is_some_and(|bias| bias[0] != weight[0]) {
            return refuse("the bias must be as long as the output has channels");
        }
        self.axes().lens((self.weight_groups > 1).then_some(weight[0])).lens([height, width]).outputs(inputs)
    }

    fn strategies(&self, inputs: &[Shape], outputs: &[Shape]) -> Vec<Strategy> {
        self.axes().strategies(inputs, outputs)
    }
}

/// A convolution whose kernel's points are moved, as burn's [`deform_conv2d`](module::deform_conv2d): of an input
/// `[batch, channels_in, height, width]`, an offset `[batch, 2 * offset_groups * kernel height * kernel width, ..]`,
/// a weight `[channels_out, channels_in / weight_groups, ..]`, with an optional mask
/// `[batch, offset_groups * kernel height * kernel width, ..]` and an optional bias `[channels_out]`.
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
    let DeformConvOptions { stride, padding, dilation, weight_groups, offset_groups } = options;
    let (has_mask, has_bias) = (mask.is_some(), bias.is_some());
    let rule = Deformable { stride, padding, dilation, weight_groups, offset_groups, mask: has_mask, bias: has_bias };
    apply(&rule, (x.into(), offset, weight, mask, bias), |(x, offset, weight, mask, bias), _| {
        module::deform_conv2d(x, offset, weight, mask, bias, options)
    })
}
