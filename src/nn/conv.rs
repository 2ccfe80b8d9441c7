//! Forward of burn-nn's convolutions over DTensors.
//!
//! A rank may hold a shard of the batch or of the image, of the output channels (weight and bias
//! `S(0)`), or of the input channels (weight `S(1)`, bias `R`). In the last case the ranks' partial
//! results are summed.

use burn::nn::conv::{
    Conv1d, Conv2d, Conv3d, ConvTranspose1d, ConvTranspose2d, ConvTranspose3d, DeformConv2d,
};
use burn::tensor::ops::{ConvOptions, ConvTransposeOptions, DeformConvOptions};

use super::padding::Padding;
use super::{DTensorForward, apply_style, read_with};
use crate::dtensor::DTensor;
use crate::dtensor::ops::{module, operand_error};

/// Implements the forward of convolutions. The one-dimensional layer has numbers as fields, the
/// others have arrays.
macro_rules! convolutions {
    ($($Layer:ident $conv:ident $N:literal $D:literal $each:tt),* $(,)?) => {$(
        impl DTensorForward<DTensor<$D>> for $Layer {
            type Output = DTensor<$D>;

            fn forward_dtensor(&self, x: DTensor<$D>) -> DTensor<$D> {
                let lens: [usize; $N] = std::array::from_fn(|at| x.dims()[2 + at]);
                let [kernel, stride, dilation] = convolutions!(@arrays $each self: kernel_size, stride, dilation);
                let padding = self.padding.pairs(lens, kernel, stride);
                let options = ConvOptions::new_with_padding(stride, padding, dilation, self.groups);
                apply_style(&self.weight, x, |x, weight| {
                    let bias = read_with(&weight, self.bias.as_ref());
                    module::$conv(x, weight, bias, options)
                })
            }
        }
    )*};
    (@arrays number $layer:ident: $($field:ident),*) => { [$([$layer.$field]),*] };
    (@arrays array $layer:ident: $($field:ident),*) => { [$($layer.$field),*] };
}

convolutions! {
    Conv1d conv1d 1 3 number,
    Conv2d conv2d 2 4 array,
    Conv3d conv3d 3 5 array,
}

macro_rules! transposed {
    ($($Layer:ident $conv:ident $D:literal $each:tt),* $(,)?) => {$(
        /// The weight of a transposed convolution has its input channels first, so `S(1)` shards
        /// the output channels.
        impl DTensorForward<DTensor<$D>> for $Layer {
            type Output = DTensor<$D>;

            fn forward_dtensor(&self, x: DTensor<$D>) -> DTensor<$D> {
                let [stride, padding, padding_out, dilation] =
                    convolutions!(@arrays $each self: stride, padding, padding_out, dilation);
                let options = ConvTransposeOptions::new(stride, padding, padding_out, dilation, self.groups);
                apply_style(&self.weight, x, |x, weight| {
                    let bias = read_with(&weight, self.bias.as_ref());
                    module::$conv(x, weight, bias, options)
                })
            }
        }
    )*};
}

transposed! {
    ConvTranspose1d conv_transpose1d 3 number,
    ConvTranspose2d conv_transpose2d 4 array,
    ConvTranspose3d conv_transpose3d 5 array,
}

/// Takes an input, an offset and optionally a mask, like
/// [`deform_conv2d`](crate::dtensor::ops::module::deform_conv2d). The padding must be equal on both
/// sides of each dimension.
impl DTensorForward<(DTensor<4>, DTensor<4>, Option<DTensor<4>>)> for DeformConv2d {
    type Output = DTensor<4>;

    fn forward_dtensor(
        &self,
        (x, offset, mask): (DTensor<4>, DTensor<4>, Option<DTensor<4>>),
    ) -> DTensor<4> {
        let [_, _, height, width] = x.dims();
        let padding = self.padding.pairs([height, width], self.kernel_size, self.stride).map(|(before, behind)| {
            if before != behind {
                let why = format!("the padding is {before} before and {behind} after a dimension. Make both equal");
                operand_error("deform_conv2d", &[x.shape()], why).unwind();
            }
            before
        });
        let options = DeformConvOptions::new(
            self.stride,
            padding,
            self.dilation,
            self.weight_groups,
            self.offset_groups,
        );
        apply_style(&self.weight, x, |x, weight| {
            let bias = read_with(&weight, self.bias.as_ref());
            module::deform_conv2d(x, offset, weight, mask, bias, options)
        })
    }
}
