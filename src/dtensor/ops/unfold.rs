//! Windows of images as columns, and back: whole images on every rank, some of the batch.

use burn::tensor::module;
use burn::tensor::ops::UnfoldOptions;

use super::args::misfit;
use super::partials::LINEAR;
use super::{Axes, Rule, apply};
use crate::dtensor::DTensor;
use crate::error::OrUnwind;

const UNFOLD: Axes = Axes::new("unfold4d", "b___ -> bCL").through(LINEAR);
const FOLD: Axes = Axes::new("fold4d", "b__ -> bCHW").through(LINEAR);

/// How many windows there are along both dimensions of an image of `size`.
fn windows(size: [usize; 2], kernel: [usize; 2], options: &UnfoldOptions) -> Option<usize> {
    let along = |at: usize| {
        let extent = options.dilation[at] * kernel[at].checked_sub(1)? + 1;
        Some((size[at] + 2 * options.padding[at]).checked_sub(extent)? / options.stride[at] + 1)
    };
    Some(along(0)? * along(1)?)
}

/// The windows of images `[batch, channels, height, width]`, as burn's [`unfold4d`](module::unfold4d):
/// `[batch, channels * kernel height * kernel width, windows]`.
///
/// # Collective
/// If the rule has to redistribute: every rank of the mesh, in forward and in backward.
///
/// # Panics
/// Unwinds with [`DTensorError::Operands`](crate::dtensor::DTensorError::Operands) if the kernel is longer than the
/// padded input.
#[must_use]
#[track_caller]
pub fn unfold4d(x: DTensor<4>, kernel_size: [usize; 2], options: UnfoldOptions) -> DTensor<3> {
    let [_, channels, height, width] = x.dims();
    let windows = windows([height, width], kernel_size, &options)
        .ok_or_else(|| misfit(UNFOLD.name(), &[x.shape()], "the kernel is longer than the padded input"))
        .or_unwind();
    let rule = (&UNFOLD).lens([channels * kernel_size[0] * kernel_size[1], windows]);
    apply(&rule, x, |x, _| module::unfold4d(x, kernel_size, options))
}

/// Images `[batch, channels, height, width]` of `output_size`, each the sum of its windows
/// `[batch, channels * kernel height * kernel width, windows]`, as burn's [`fold4d`](module::fold4d).
///
/// # Collective
/// If the rule has to redistribute: every rank of the mesh, in forward and in backward.
///
/// # Panics
/// Unwinds with [`DTensorError::Operands`](crate::dtensor::DTensorError::Operands) if these are not the windows of
/// such images.
#[must_use]
#[track_caller]
pub fn fold4d(x: DTensor<3>, output_size: [usize; 2], kernel_size: [usize; 2], options: UnfoldOptions) -> DTensor<4> {
    let ([_, rows, columns], window) = (x.dims(), kernel_size[0] * kernel_size[1]);
    let expected = windows(output_size, kernel_size, &options);
    if window == 0 || rows % window != 0 || expected != Some(columns) {
        let why = format!(
            "images of {output_size:?} have {} windows of {kernel_size:?}, and each channel {window} rows of them",
            expected.unwrap_or(0)
        );
        misfit(FOLD.name(), &[x.shape()], why).unwind();
    }
    let [height, width] = output_size;
    let rule = (&FOLD).lens([rows / window, height, width]);
    apply(&rule, x, |x, _| module::fold4d(x, output_size, kernel_size, options))
}
