//! Interpolation of images, from the nearest element or from two along each dimension. If a
//! dimension is sharded, every rank fetches its [halo](super::halo). Other modes do not shard
//! spatial dimensions.

use std::ops::Range;
use std::panic::Location;

use burn::tensor::ops::{InterpolateMode, InterpolateOptions};
use burn::tensor::{Int, Tensor, module};

use super::halo::{Halo, Reach, SPATIAL, Spatial};
use super::partial_rules::LINEAR;
use super::{EinsumRule, apply};
use crate::dtensor::DTensor;

/// Resizes an input `[batch, channels, height, width]`, as burn's
/// [`interpolate`](module::interpolate).
///
/// # Collective
/// If the rule has to redistribute, or a spatial dimension is sharded: every rank of the mesh, in
/// forward and in backward.
///
/// # Panics
/// As burn's function, unless exactly one of `output_size` and `scale_factor` is set.
#[must_use]
#[track_caller]
pub fn interpolate(x: DTensor<4>, options: InterpolateOptions) -> DTensor<4> {
    let [_, _, height, width] = x.dims();
    let at = Location::caller();
    let scaled = |len: usize, scale: f32| (len as f64 * f64::from(scale)) as usize;
    let size = options.output_size.or_else(|| {
        let [tall, wide] = options.scale_factor?;
        Some([scaled(height, tall), scaled(width, wide)])
    });
    let size = size.unwrap_or([height, width]);
    let rule = &const { EinsumRule::new("interpolate", "bc__ -> bcHW").with_partial_rules(LINEAR) };
    let rule = rule.lens(size);
    let scales = std::array::from_fn(|at| InterpolationScale {
        from: [height, width][at],
        to: size[at],
        is_linear: matches!(options.mode, InterpolateMode::Bilinear),
        align_corners: options.align_corners,
    });
    match options.mode {
        InterpolateMode::Nearest | InterpolateMode::Bilinear => {
            apply(&Spatial(rule), x, |x, op| {
                match Halo::of("interpolate", op, |at, output| scales[at].reach(output)) {
                    None => module::interpolate(x, options),
                    Some(halo) => halo.run(x, 0.0, at, |x, halo| {
                        by_dimension(x, halo, &scales, options)
                    }),
                }
            })
        }
        _ => apply(&rule, x, |x, _| module::interpolate(x, options)),
    }
}

/// Interpolates sharded dimensions from the elements that this rank has read, and the others with
/// burn.
fn by_dimension(
    x: Tensor<4>,
    halo: &Halo,
    scales: &[InterpolationScale; 2],
    mut options: InterpolateOptions,
) -> Tensor<4> {
    let mut size = scales.map(|scale| scale.to);
    let x = halo.outputs().fold(x, |x, (dim, output)| {
        size[dim - SPATIAL] = output.len();
        scales[dim - SPATIAL].along(x, dim, output.clone())
    });
    if halo.outputs().count() == scales.len() {
        return x;
    }
    (options.output_size, options.scale_factor) = (Some(size), None);
    module::interpolate(x, options)
}

/// Mapping of one length of a dimension to another.
#[derive(Debug, Clone, Copy)]
struct InterpolationScale {
    from: usize,
    to: usize,
    is_linear: bool,
    align_corners: bool,
}

impl InterpolationScale {
    /// Returns the element from which output `at` is computed, or the first of two, and the weight
    /// of the second.
    fn source(self, at: usize) -> (usize, f64) {
        let from = self.from as f64;
        let to = self.to as f64;
        let at = at as f64;
        let last = self.from.saturating_sub(1);
        if !self.is_linear {
            return (((at * (from / to)).floor() as usize).min(last), 0.0);
        }
        let source = match self.align_corners {
            true => at * ((from - 1.0) / (to - 1.0).max(1.0)),
            false => (at + 0.5) * (from / to) - 0.5,
        };
        let first = source.max(0.0).floor().min(last as f64);
        (
            first as usize,
            if first as usize == last {
                0.0
            } else {
                (source - first).max(0.0)
            },
        )
    }

    fn reach(self, output: Range<usize>) -> Reach {
        let last = |(first, share)| if share > 0.0 { first + 1 } else { first };
        let start = self.source(output.start).0;
        let end = last(self.source(output.end - 1)) + 1;
        Reach {
            input: start as isize..end as isize,
            needs: start..end,
            made: output.start as isize..output.end as isize,
        }
    }

    /// Returns the elements `output` along `dim`. `x` starts at the first element that they reach.
    fn along<const D: usize>(self, x: Tensor<D>, dim: usize, output: Range<usize>) -> Tensor<D> {
        let start = self.reach(output.clone()).input.start as usize;
        let len = x.dims()[dim];
        let (firsts, shares): (Vec<usize>, Vec<f64>) = output.map(|at| self.source(at)).unzip();
        let select = |x: Tensor<D>, step: usize| {
            let places: Vec<i64> = firsts
                .iter()
                .map(|first| (first - start + step).min(len - 1) as i64)
                .collect();
            let device = x.device();
            x.select(dim, Tensor::<1, Int>::from_data(&places[..], &device))
        };
        if !self.is_linear {
            return select(x, 0);
        }
        let mut shape = [1; D];
        shape[dim] = shares.len();
        let shares = Tensor::<1>::from_data(&shares[..], (&x.device(), x.dtype())).reshape(shape);
        let first = select(x.clone(), 0);
        let second = select(x, 1);
        first * (shares.clone().neg() + 1.0) + second * shares
    }
}
