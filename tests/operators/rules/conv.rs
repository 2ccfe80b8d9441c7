//! Convolutions.

use burn::tensor::ops::{ConvOptions, ConvTransposeOptions, DeformConvOptions};
use burn_dtensor::testing::prove::{Case, case};

fn one(groups: usize) -> ConvOptions<1> {
    ConvOptions::new([2], [1], [1], groups)
}

fn two() -> ConvOptions<2> {
    ConvOptions::new([1, 2], [1, 0], [2, 1], 1)
}

fn one_back(groups: usize) -> ConvTransposeOptions<1> {
    ConvTransposeOptions::new([2], [1], [1], [1], groups)
}

fn two_back() -> ConvTransposeOptions<2> {
    ConvTransposeOptions::new([1, 2], [1, 0], [0, 1], [1, 1], 1)
}

fn three(groups: usize) -> ConvOptions<3> {
    ConvOptions::new([1, 2, 1], [1, 0, 1], [1, 1, 2], groups)
}

fn three_back(groups: usize) -> ConvTransposeOptions<3> {
    ConvTransposeOptions::new([1, 2, 1], [0, 1, 1], [0, 1, 0], [1, 1, 2], groups)
}

fn deformed(weight_groups: usize, offset_groups: usize) -> DeformConvOptions<2> {
    DeformConvOptions::new([1, 2], [1, 0], [1, 1], weight_groups, offset_groups)
}

pub fn cases() -> Vec<Case> {
    vec![
        case!("conv1d", (x: 3 = [2, 3, 5], w: 3 = [2, 3, 3]) => module::conv1d(x, w, None, one(1))),
        case!("conv1d", (x: 3 = [1, 2, 5], w: 3 = [3, 2, 3], b: 1 = [3]) => module::conv1d(x, w, Some(b), one(1))),
        case!("conv1d", (x: 3 = [2, 4, 4], w: 3 = [4, 1, 2]) => module::conv1d(x, w, None, one(4))),
        case!("conv1d", (x: 3 = [2, 4, 4], w: 3 = [6, 2, 2]) => module::conv1d(x, w, None, one(2))),
        case!("conv2d", (x: 4 = [2, 3, 4, 4], w: 4 = [2, 3, 2, 3]) => module::conv2d(x, w, None, two())),
        case!("conv_transpose1d", (x: 3 = [2, 3, 4], w: 3 = [3, 2, 3]) =>
            module::conv_transpose1d(x, w, None, one_back(1))),
        case!("conv_transpose1d", (x: 3 = [1, 2, 4], w: 3 = [2, 3, 3], b: 1 = [3]) =>
            module::conv_transpose1d(x, w, Some(b), one_back(1))),
        case!("conv_transpose1d", (x: 3 = [2, 4, 4], w: 3 = [4, 2, 3]) =>
            module::conv_transpose1d(x, w, None, one_back(2))),
        case!("conv_transpose2d", (x: 4 = [2, 3, 3, 3], w: 4 = [3, 2, 2, 3]) =>
            module::conv_transpose2d(x, w, None, two_back())),
        case!("conv3d", (x: 5 = [2, 3, 3, 4, 4], w: 5 = [2, 3, 2, 2, 2], b: 1 = [2]) =>
            module::conv3d(x, w, Some(b), three(1))),
        case!("conv3d", (x: 5 = [1, 4, 3, 5, 4], w: 5 = [4, 2, 2, 2, 2]) => module::conv3d(x, w, None, three(2))),
        case!("conv_transpose3d", (x: 5 = [2, 3, 2, 2, 3], w: 5 = [3, 2, 2, 2, 2], b: 1 = [2]) =>
            module::conv_transpose3d(x, w, Some(b), three_back(1))),
        case!("deform_conv2d", (x: 4 = [2, 4, 3, 4], o: 4 within(-0.9..0.9) = [2, 8, 4, 2], w: 4 = [3, 4, 2, 2]) => {
            let bias = w.clone().sum_dims(&[1, 2, 3]).reshape([3]);
            module::deform_conv2d(x, o, w, None, Some(bias), deformed(1, 1))
        }),
        // Masks are made of offsets: of three inputs there are a thousand combinations, of four ten
        // thousand.
        case!("deform_conv2d", (x: 4 = [1, 4, 3, 4], o: 4 within(-0.9..0.9) = [1, 8, 4, 2], w: 4 = [3, 4, 2, 2]) => {
            let mask = o.clone().narrow(1, 2, 4);
            module::deform_conv2d(x, o, w, Some(mask), None, deformed(1, 1))
        }),
        case!("deform_conv2d", (x: 4 = [2, 4, 3, 4], o: 4 within(-0.9..0.9) = [2, 16, 4, 2], w: 4 = [4, 2, 2, 2]) => {
            let mask = o.clone().narrow(1, 4, 8);
            module::deform_conv2d(x, o, w, Some(mask), None, deformed(2, 2))
        }),
        case!("conv_transpose3d", (x: 5 = [1, 4, 2, 2, 3], w: 5 = [4, 1, 2, 2, 2]) =>
            module::conv_transpose3d(x, w, None, three_back(2))),
    ]
}
