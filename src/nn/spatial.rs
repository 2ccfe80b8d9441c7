//! Layers that rearrange or resize images: `PixelShuffle`, `PixelUnshuffle`, `Unfold4d`, `Fold4d`,
//! `Interpolate1d`, `Interpolate2d`.

use burn::nn::interpolate::{Interpolate1d, Interpolate2d};
use burn::nn::{Fold4d, PixelShuffle, PixelUnshuffle, Unfold4d};
use burn::tensor::ops::{InterpolateOptions, UnfoldOptions};

use super::DTensorForward;
use crate::dtensor::DTensor;
use crate::dtensor::ops::{module, operand_error};

impl DTensorForward<DTensor<4>> for PixelShuffle {
    type Output = DTensor<4>;

    fn forward_dtensor(&self, x: DTensor<4>) -> DTensor<4> {
        let [batch, channels, height, width] = x.dims();
        let factor = self.upscale_factor;
        if factor == 0 || channels % (factor * factor) != 0 {
            let why = format!(
                "dimension 1 (channels) must be divisible by the square of the upscale factor {factor}"
            );
            operand_error("pixel_shuffle", &[x.shape()], why).unwind();
        }
        let channels = channels / (factor * factor);
        x.reshape([batch, channels, factor, factor, height, width])
            .permute([0, 1, 4, 2, 5, 3])
            .reshape([batch, channels, height * factor, width * factor])
    }
}

impl DTensorForward<DTensor<4>> for PixelUnshuffle {
    type Output = DTensor<4>;

    fn forward_dtensor(&self, x: DTensor<4>) -> DTensor<4> {
        let [batch, channels, height, width] = x.dims();
        let factor = self.downscale_factor;
        if factor == 0 || height % factor != 0 || width % factor != 0 {
            let why = format!(
                "height and width (dimensions 2, 3) must be divisible by the downscale factor {factor}"
            );
            operand_error("pixel_unshuffle", &[x.shape()], why).unwind();
        }
        let height = height / factor;
        let width = width / factor;
        x.reshape([batch, channels, height, factor, width, factor])
            .permute([0, 1, 3, 5, 2, 4])
            .reshape([batch, channels * factor * factor, height, width])
    }
}

impl DTensorForward<DTensor<4>> for Unfold4d {
    type Output = DTensor<3>;

    fn forward_dtensor(&self, x: DTensor<4>) -> DTensor<3> {
        module::unfold4d(
            x,
            self.kernel_size,
            UnfoldOptions::new(self.stride, self.padding, self.dilation),
        )
    }
}

impl DTensorForward<DTensor<3>> for Fold4d {
    type Output = DTensor<4>;

    fn forward_dtensor(&self, x: DTensor<3>) -> DTensor<4> {
        let options = UnfoldOptions::new(self.stride, self.padding, self.dilation);
        module::fold4d(x, self.output_size, self.kernel_size, options)
    }
}

impl DTensorForward<DTensor<3>> for Interpolate1d {
    type Output = DTensor<3>;

    fn forward_dtensor(&self, x: DTensor<3>) -> DTensor<3> {
        let mut options = InterpolateOptions::new(self.mode.clone().into())
            .with_align_corners(self.align_corners);
        options.output_size = self.output_size.map(|len| [1, len]);
        options.scale_factor = self.scale_factor.map(|scale| [1.0, scale]);
        module::interpolate(x.unsqueeze_dim(2), options).squeeze_dim(2)
    }
}

impl DTensorForward<DTensor<4>> for Interpolate2d {
    type Output = DTensor<4>;

    fn forward_dtensor(&self, x: DTensor<4>) -> DTensor<4> {
        let mut options = InterpolateOptions::new(self.mode.clone().into())
            .with_align_corners(self.align_corners);
        options.output_size = self.output_size;
        options.scale_factor = self.scale_factor;
        module::interpolate(x, options)
    }
}
