//! Attention, normalizations, convolutions, pools and dropout.

use burn::tensor::ops::{
    AttentionModuleOptions, AvgPoolOptions, ConvOptions, ConvTransposeOptions, DeformConvOptions,
    InterpolateMode, InterpolateOptions, MaxPoolOptions, UnfoldOptions,
};

use super::{Operator, operator, step};

/// What burn has as layers only, or draws at random.
pub mod plain {
    use burn::tensor::{DType, Device, FloatDType, Int, Tensor};
    use burn_dtensor::comm::{Launch, launch};
    use burn_dtensor::dtensor::DTensor;
    use burn_dtensor::mesh::DeviceMesh;
    use burn_dtensor::placement::Placement;

    pub fn dropout(x: Tensor<2>, seed: u64) -> Tensor<2> {
        let mask = alone(x.dims(), x.dtype(), &x.device(), |ones| {
            super::sharded::dropout(ones, seed)
        });
        x * mask
    }

    /// As burn's layer: the mean in single precision.
    pub fn rms_norm<const D: usize>(x: Tensor<D>, gamma: Tensor<1>, epsilon: f64) -> Tensor<D> {
        let mean = x.clone().cast(FloatDType::F32).square().mean_dim(D - 1);
        let root = (mean + epsilon).sqrt().cast(x.dtype());
        x / root * gamma.unsqueeze()
    }

    /// By means: burn's variances have gradients in single precision.
    pub fn group_norm(
        x: Tensor<3>,
        groups: usize,
        gamma: Tensor<1>,
        beta: Tensor<1>,
        epsilon: f64,
    ) -> Tensor<3> {
        let [batch, channels, len] = x.dims();
        let rows = x.reshape([batch, groups, channels / groups * len]);
        let rows = rows.clone() - rows.mean_dim(2);
        let deviation = (rows.clone().square().mean_dim(2) + epsilon).sqrt();
        let [gamma, beta] = [gamma, beta].map(|vector| vector.reshape([1, channels, 1]));
        (rows / deviation).reshape([batch, channels, len]) * gamma + beta
    }

    pub fn random_like(x: Tensor<2>, seed: u64) -> Tensor<2> {
        alone(x.dims(), x.dtype(), &x.device(), |ones| {
            super::sharded::random_like(ones, seed)
        })
    }

    /// By the shares that the categories add up to, of the numbers that `random_like` draws.
    pub fn categorical(x: Tensor<2>, samples: usize, seed: u64) -> Tensor<2, Int> {
        let [rows, categories] = x.dims();
        let uniform = alone([rows, samples], x.dtype(), &x.device(), |ones| {
            super::sharded::uniform(&ones, seed)
        });
        let shares = (x.clone() / x.sum_dim(1)).cumsum(1);
        let below = shares
            .unsqueeze_dim::<3>(2)
            .lower(uniform.unsqueeze_dim::<3>(1));
        below
            .int()
            .sum_dim(1)
            .squeeze_dim::<2>(1)
            .clamp(0, categories as i64 - 1)
    }

    /// What `make` gives of ones on a mesh of one rank.
    fn alone(
        shape: [usize; 2],
        dtype: DType,
        device: &Device,
        make: impl Fn(DTensor<2>) -> DTensor<2> + Sync,
    ) -> Tensor<2> {
        let mut all = launch(Launch::threads(1), |world| {
            let mesh = DeviceMesh::new(world, [1], ["one"])?;
            let ones = DTensor::ones(
                shape,
                &mesh,
                &[Placement::Replicate],
                (world.device(), dtype),
            )?;
            Ok(make(ones).to_local().into_data())
        })
        .expect("one rank");
        Tensor::from_data(all.remove(0).1, (device, dtype))
    }
}

/// The same of DTensors.
pub mod sharded {
    use burn::tensor::{Distribution, Int};
    use burn_dtensor::dtensor::DTensor;
    use burn_dtensor::dtensor::ops::{module, random};

    pub use burn_dtensor::dtensor::ops::module::rms_norm;

    pub fn group_norm(
        x: DTensor<3>,
        groups: usize,
        gamma: DTensor<1>,
        beta: DTensor<1>,
        epsilon: f64,
    ) -> DTensor<3> {
        module::group_norm(x, Some((gamma, beta)), groups, epsilon)
    }

    pub fn dropout(x: DTensor<2>, seed: u64) -> DTensor<2> {
        module::dropout(x, 0.5, seed)
    }

    pub fn random_like(x: DTensor<2>, seed: u64) -> DTensor<2> {
        random::seed(seed);
        x.random_like(Distribution::Uniform(-1.0, 1.0))
    }

    pub fn uniform(x: &DTensor<2>, seed: u64) -> DTensor<2> {
        random::seed(seed);
        x.random_like(Distribution::Uniform(0.0, 1.0))
    }

    pub fn categorical(x: DTensor<2>, samples: usize, seed: u64) -> DTensor<2, Int> {
        random::seed(seed);
        x.categorical(samples)
    }
}

pub fn operators() -> Vec<Operator> {
    let mut all = attention();
    all.extend(normalizations());
    all.extend(convolutions());
    all.extend(pools());
    all.extend([
        operator!("dropout", |d| {
            let (x, seed) = (d.any::<2>(), d.below(1000) as u64);
            step!((x: Float<2>) [seed] => dropout(x, seed))
        }),
        operator!("categorical", |d| {
            let (x, samples, seed) = (
                d.within::<2>(0.1..4.0),
                1 + d.below(4),
                d.below(1000) as u64,
            );
            step!((x: Float<2>) [samples, seed] => categorical(x, samples, seed))
        }),
        operator!("random_like", |d| {
            let (x, seed) = (d.any::<2>(), d.below(1000) as u64);
            step!((x: Float<2>) [seed] => random_like(x, seed))
        }),
    ]);
    all
}

fn attention() -> Vec<Operator> {
    vec![
        operator!("attention", |d| {
            let [batch, heads, queries, keys, width] =
                [3, 3, 4, 5, 3].map(|most| 1 + d.below(most));
            let (q, k, v) = (
                d.floats([batch, heads, queries, width]),
                d.floats([batch, heads, keys, width]),
                d.floats([batch, heads, keys, width]),
            );
            let options = AttentionModuleOptions {
                scale: Some(0.4),
                softcap: Some(2.0),
                is_causal: false,
            };
            step!((q: Float<4>, k: Float<4>, v: Float<4>) [options] =>
                module::attention(q, k, v, None, None, options))
        }),
        operator!("attention_fallback", |d| {
            let [batch, heads, len, width] = [3, 3, 5, 3].map(|most| 1 + d.below(most));
            let x = d.floats([batch, heads, len, width]);
            let options = AttentionModuleOptions {
                is_causal: true,
                ..Default::default()
            };
            step!((x: Float<4>) [options] => module::attention_fallback(x.clone(), x.clone(), x, None, None, options))
        }),
        operator!("attention", |d| {
            let [batch, heads, len, width] = [3, 3, 5, 3].map(|most| 1 + d.below(most));
            let x = d.floats([batch, heads, len, width]);
            let options = AttentionModuleOptions {
                is_causal: true,
                ..Default::default()
            };
            step!((x: Float<4>) [options] => module::attention(x.clone(), x.clone(), x, None, None, options))
        }),
        operator!("attention", |d| {
            let [batch, heads, len, width] = [2, 3, 4, 3].map(|most| 1 + d.below(most));
            let (x, bias) = (
                d.floats([batch, heads, len, width]),
                d.floats([1, heads, len, len]),
            );
            let options = AttentionModuleOptions {
                is_causal: true,
                ..Default::default()
            };
            step!((x: Float<4>, bias: Float<4>) [options] =>
                module::attention(x.clone(), x.clone(), x, None, Some(bias), options))
        }),
    ]
}

fn normalizations() -> Vec<Operator> {
    vec![
        operator!("layer_norm", D in [2 3], |d| {
            let x = d.any::<D>();
            let width = d.shape::<D>(x)[D - 1];
            let (gamma, beta) = (d.floats([width]), d.floats([width]));
            step!((x: Float<D>, gamma: Float<1>, beta: Float<1>) [] =>
                module::layer_norm(x, gamma, Some(beta), 0.1))
        }),
        operator!("rms_norm", D in [2 3], |d| {
            let x = d.any::<D>();
            let gamma = d.floats([d.shape::<D>(x)[D - 1]]);
            step!((x: Float<D>, gamma: Float<1>) [] => rms_norm(x, gamma, 0.1))
        }),
        operator!("group_norm", |d| {
            let (groups, per_group, batch, len) =
                (1 + d.below(3), 1 + d.below(3), d.len(), 1 + d.below(4));
            let channels = groups * per_group;
            let (x, gamma, beta) = (
                d.floats([batch, channels, len]),
                d.floats([channels]),
                d.floats([channels]),
            );
            step!((x: Float<3>, gamma: Float<1>, beta: Float<1>) [groups] =>
                group_norm(x, groups, gamma, beta, 0.1))
        }),
        operator!("batch_norm", |d| {
            let x = d.any::<2>();
            let width = [d.shape::<2>(x)[1]];
            let (gamma, beta, mean) = (d.floats(width), d.floats(width), d.floats(width));
            step!((x: Float<2>, gamma: Float<1>, beta: Float<1>, mean: Float<1>) [] =>
                module::batch_norm(x, gamma.clone(), beta, mean, gamma.square(), 0.1))
        }),
        operator!("batch_norm_train", |d| {
            let mut shape = d.any_shape::<2>();
            shape[0] = shape[0].max(2);
            let (x, gamma, beta) = (d.floats(shape), d.floats([shape[1]]), d.floats([shape[1]]));
            step!((x: Float<2>, gamma: Float<1>, beta: Float<1>) [] => {
                let normalized = module::batch_norm_train(x, gamma, beta, 0.1);
                (normalized.output, normalized.mean, normalized.variance)
            })
        }),
    ]
}

/// Of groups with strides burn's own gradient of the weight is wrong where the stride leaves
/// elements over; those of a deformable convolution are in single precision.
fn convolutions() -> Vec<Operator> {
    vec![
        operator!("conv1d", |d| {
            let groups = d.one_of(&[1, 1, 2]);
            let stride = if groups == 1 { 1 + d.below(2) } else { 1 };
            let [channels, out] = [groups * (1 + d.below(2)), groups * (1 + d.below(3))];
            let (batch, kernel) = (1 + d.below(4), 1 + d.below(3));
            let len = kernel + d.below(6);
            let (x, weight, bias) = (
                d.floats([batch, channels, len]),
                d.floats([out, channels / groups, kernel]),
                d.floats([out]),
            );
            step!((x: Float<3>, weight: Float<3>, bias: Float<1>) [stride, groups] =>
                module::conv1d(x, weight, Some(bias), ConvOptions::new([stride], [1], [1], groups)))
        }),
        operator!("conv2d", |d| {
            let [batch, channels, out] = [3, 3, 4].map(|most| 1 + d.below(most));
            let (x, weight) = (
                d.floats([batch, channels, 4, 3]),
                d.floats([out, channels, 2, 2]),
            );
            let stride = 1 + d.below(2);
            step!((x: Float<4>, weight: Float<4>) [stride] =>
                module::conv2d(x, weight, None, ConvOptions::new([1, stride], [1, 0], [2, 1], 1)))
        }),
        operator!("conv_transpose1d", |d| {
            let groups = d.one_of(&[1, 1, 2]);
            let [channels, out] = [groups * (1 + d.below(2)), 1 + d.below(2)];
            let (batch, len) = (1 + d.below(4), 2 + d.below(5));
            let (x, weight, bias) = (
                d.floats([batch, channels, len]),
                d.floats([channels, out, 3]),
                d.floats([out * groups]),
            );
            step!((x: Float<3>, weight: Float<3>, bias: Float<1>) [groups] => module::conv_transpose1d(
                x, weight, Some(bias), ConvTransposeOptions::new([2], [1], [1], [1], groups)))
        }),
        operator!("conv_transpose2d", |d| {
            let [batch, channels, out] = [3, 3, 3].map(|most| 1 + d.below(most));
            let (x, weight) = (
                d.floats([batch, channels, 3, 2]),
                d.floats([channels, out, 2, 3]),
            );
            step!((x: Float<4>, weight: Float<4>) [] => module::conv_transpose2d(
                x, weight, None, ConvTransposeOptions::new([1, 2], [1, 0], [0, 1], [1, 1], 1)))
        }),
        operator!("conv3d", |d| {
            let [batch, channels, out] = [3, 2, 3].map(|most| 1 + d.below(most));
            let (x, weight) = (
                d.floats([batch, channels, 3, 2, 3]),
                d.floats([out, channels, 2, 1, 2]),
            );
            let stride = 1 + d.below(2);
            step!((x: Float<5>, weight: Float<5>) [stride] =>
                module::conv3d(x, weight, None, ConvOptions::new([1, stride, 1], [1, 0, 1], [1, 1, 2], 1)))
        }),
        operator!("deform_conv2d", |d| {
            let [batch, channels, out] = [3, 2, 3].map(|most| 1 + d.below(most));
            let (x, weight) = (
                d.floats([batch, channels, 3, 4]),
                d.floats([out, channels, 2, 2]),
            );
            let offset = d.floats([batch, 8, 2, 3]);
            step!((x: Float<4>, offset: Float<4>, weight: Float<4>) [] => module::deform_conv2d(
                x.detach(), offset.detach(), weight.detach(), None, None, DeformConvOptions::new([1, 1], [0, 0], [1, 1], 1, 1)))
        }),
        operator!("conv_transpose3d", |d| {
            let [batch, channels, out] = [3, 2, 2].map(|most| 1 + d.below(most));
            let (x, weight) = (
                d.floats([batch, channels, 2, 2, 1]),
                d.floats([channels, out, 2, 1, 2]),
            );
            step!((x: Float<5>, weight: Float<5>) [] => module::conv_transpose3d(
                x, weight, None, ConvTransposeOptions::new([1, 2, 1], [1, 0, 0], [0, 1, 0], [1, 1, 1], 1)))
        }),
    ]
}

fn pools() -> Vec<Operator> {
    vec![
        operator!("max_pool1d", |d| {
            let shape = [1 + d.below(3), 1 + d.below(3), 3 + d.below(6)];
            let x = d.floats(shape);
            step!((x: Float<3>) [] => module::max_pool1d(
                x, MaxPoolOptions::new([3]).with_stride([2]).with_padding([1]).with_ceil_mode(true)))
        }),
        operator!("max_pool2d", |d| {
            let shape = [1 + d.below(3), 1 + d.below(3), 4, 3 + d.below(3)];
            let x = d.floats(shape);
            step!((x: Float<4>) [] => module::max_pool2d(
                x, MaxPoolOptions::new([3, 2]).with_stride([2, 2]).with_padding([1, 1])))
        }),
        operator!("avg_pool1d", |d| {
            let shape = [1 + d.below(3), 1 + d.below(3), 3 + d.below(6)];
            let x = d.floats(shape);
            step!((x: Float<3>) [] => module::avg_pool1d(
                x, AvgPoolOptions::new([3]).with_stride([2]).with_padding_pairs([(1, 0)]).with_count_include_pad(false)))
        }),
        operator!("avg_pool2d", |d| {
            let shape = [1 + d.below(3), 1 + d.below(3), 4, 3 + d.below(3)];
            let x = d.floats(shape);
            step!((x: Float<4>) [] => module::avg_pool2d(x, AvgPoolOptions::new([2, 3]).with_stride([2, 1])))
        }),
        operator!("adaptive_avg_pool1d", |d| {
            let (x, size) = (d.any::<3>(), 1 + d.below(4));
            step!((x: Float<3>) [size] => module::adaptive_avg_pool1d(x, size))
        }),
        operator!("adaptive_avg_pool2d", |d| {
            let shape = [1 + d.below(3), 1 + d.below(3), 4, 1 + d.below(5)];
            let x = d.floats(shape);
            step!((x: Float<4>) [] => module::adaptive_avg_pool2d(x, [2, 3]))
        }),
        operator!("adaptive_avg_pool3d", |d| {
            let shape = [1 + d.below(3), 1 + d.below(3), 3, 2, 1 + d.below(3)];
            let x = d.floats(shape);
            step!((x: Float<5>) [] => module::adaptive_avg_pool3d(x, [2, 2, 1]))
        }),
        operator!("max_pool1d_with_indices", |d| {
            let shape = [1 + d.below(3), 1 + d.below(3), 3 + d.below(6)];
            let x = d.floats(shape);
            step!((x: Float<3>) [] => module::max_pool1d_with_indices(x, MaxPoolOptions::new([2]).with_stride([2])))
        }),
        operator!("max_pool2d_with_indices", |d| {
            let shape = [1 + d.below(3), 1 + d.below(3), 4, 3 + d.below(3)];
            let x = d.floats(shape);
            step!((x: Float<4>) [] => module::max_pool2d_with_indices(x, MaxPoolOptions::new([3, 2]).with_padding([1, 1])))
        }),
        operator!("unfold4d", |d| {
            let shape = [1 + d.below(3), 1 + d.below(4), 4, 3 + d.below(3)];
            let x = d.floats(shape);
            step!((x: Float<4>) [] => module::unfold4d(x, [2, 3], UnfoldOptions::new([2, 1], [0, 1], [1, 1])))
        }),
        operator!("fold4d", |d| {
            let (batch, channels) = (1 + d.below(3), 1 + d.below(4));
            let x = d.floats([batch, channels * 4, 6]);
            step!((x: Float<3>) [] => module::fold4d(x, [3, 4], [2, 2], UnfoldOptions::new([1, 1], [0, 0], [1, 1])))
        }),
        operator!("interpolate", |d| {
            let shape = [1 + d.below(3), 1 + d.below(3), 2, 1 + d.below(4)];
            let x = d.floats(shape);
            step!((x: Float<4>) [] => module::interpolate(
                x, InterpolateOptions::new(InterpolateMode::Bilinear).with_output_size([3, 5])))
        }),
    ]
}
