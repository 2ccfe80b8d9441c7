//! A small U-Net whose images are cut along the height: it trains as on one device, and what its
//! layers send in forward and backward is their halos.

use std::ops::Range;

use burn::module::Module;
use burn::nn::PaddingConfig2d;
use burn::nn::conv::{Conv2d, Conv2dConfig, ConvTranspose2d, ConvTranspose2dConfig};
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::ops::{
    ConvOptions, ConvTransposeOptions, InterpolateMode, InterpolateOptions, MaxPoolOptions,
};
use burn::tensor::{Device, Tensor, activation as plain, module as burns};
use burn_dtensor::comm::{Op, Phase};
use burn_dtensor::dtensor::ops::{RedistributePolicy, activation, module};
use burn_dtensor::prelude::*;
use burn_dtensor::testing::MeshTest;

use super::near;
use crate::fsdp::support::{max_diff, on_device, tensor, values};

use Placement::{Replicate as R, Shard as S};

const BATCH: usize = 2;
/// Over 3 ranks 5, 5 and 4; half of it 3, 3 and 1, which are rows of other ranks in part; and then
/// 1, 1 and 1.
const HEIGHT: usize = 14;
const WIDTH: usize = 6;
const RANKS: usize = 3;
const STEPS: usize = 5;

#[derive(Module, Debug)]
struct UNet {
    first: Conv2d,
    down: Conv2d,
    middle: Conv2d,
    merge: Conv2d,
    up: ConvTranspose2d,
    last: Conv2d,
    out: Conv2d,
}

impl UNet {
    fn new(device: &Device) -> Self {
        device.seed(11);
        let conv = |from, to, kernel| {
            let padding = PaddingConfig2d::Explicit(kernel / 2, kernel / 2, kernel / 2, kernel / 2);
            Conv2dConfig::new([from, to], [kernel, kernel]).with_padding(padding)
        };
        let net = Self {
            first: conv(1, 4, 3).init(device),
            down: conv(4, 6, 3).with_stride([2, 2]).init(device),
            middle: conv(6, 6, 3).init(device),
            merge: conv(12, 6, 3).init(device),
            up: ConvTranspose2dConfig::new([6, 4], [2, 2])
                .with_stride([2, 2])
                .init(device),
            last: conv(8, 4, 3).init(device),
            out: conv(4, 1, 1).init(device),
        };
        let _ = values(&net, None); // Draw now, on one thread.
        net
    }

    fn plain(&self, x: Tensor<4>) -> Tensor<4> {
        let wide = plain::relu(self.first.forward(x));
        let half = plain::relu(self.down.forward(wide.clone()));
        let low = plain::relu(
            self.middle
                .forward(burns::max_pool2d(half.clone(), pooled())),
        );
        let low = burns::interpolate(low, resized());
        let half = plain::relu(self.merge.forward(Tensor::cat(vec![low, half], 1)));
        let wide = Tensor::cat(vec![self.up.forward(half), wide], 1);
        self.out.forward(plain::relu(self.last.forward(wide)))
    }

    fn sharded(&self, x: DTensor<4>) -> DTensor<4> {
        let wide = activation::relu(convolved(&self.first, x, 1));
        let half = activation::relu(convolved(&self.down, wide.clone(), 2));
        let low = activation::relu(convolved(
            &self.middle,
            module::max_pool2d(half.clone(), pooled()),
            1,
        ));
        let low = module::interpolate(low, resized());
        let half = activation::relu(convolved(&self.merge, DTensor::cat(vec![low, half], 1), 1));
        let options = ConvTransposeOptions::new([2, 2], [0, 0], [0, 0], [1, 1], 1);
        let (weight, bias) = (
            self.up.weight.dtensor(),
            self.up.bias.as_ref().map(|bias| bias.dtensor().unwrap()),
        );
        let up = module::conv_transpose2d(half, weight.unwrap(), bias, options);
        let wide = DTensor::cat(vec![up, wide], 1);
        convolved(
            &self.out,
            activation::relu(convolved(&self.last, wide, 1)),
            1,
        )
    }
}

fn convolved(layer: &Conv2d, x: DTensor<4>, stride: usize) -> DTensor<4> {
    let weight = layer.weight.dtensor().expect("parallelized");
    let padding = weight.dims()[2] / 2;
    let bias = layer
        .bias
        .as_ref()
        .map(|bias| bias.dtensor().expect("parallelized"));
    module::conv2d(
        x,
        weight,
        bias,
        ConvOptions::new([stride, stride], [padding, padding], [1, 1], 1),
    )
}

fn pooled() -> MaxPoolOptions<2> {
    MaxPoolOptions::new([2, 2]).with_stride([2, 2])
}

fn resized() -> InterpolateOptions {
    InterpolateOptions::new(InterpolateMode::Bilinear)
        .with_align_corners(false)
        .with_output_size([7, 3])
}

fn images(step: usize) -> [Tensor<4>; 2] {
    [0, 1].map(|at| {
        tensor(
            100 + 2 * step as u64 + at,
            [BATCH, 1, HEIGHT, WIDTH],
            &Device::flex(),
        )
    })
}

/// Losses, and the weights after the last step, on one device.
fn trained(model: &UNet) -> (Vec<f32>, UNet) {
    let device = Device::flex().autodiff();
    let mut model = on_device(model, &device);
    let mut optim = AdamWConfig::new().with_epsilon(1e-5).init();
    let mut losses = Vec::new();
    for step in 0..STEPS {
        let [x, target] = images(step).map(|image| Tensor::from_data(image.into_data(), &device));
        let loss = (model.plain(x) - target).square().mean();
        losses.push(loss.clone().into_scalar::<f32>());
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        model = optim.step(1e-2, model, grads);
    }
    (losses, model)
}

fn chunk(len: usize, rank: usize) -> Range<usize> {
    let size = len.div_ceil(RANKS);
    (rank * size).min(len)..((rank + 1) * size).min(len)
}

/// What each rank gives and takes of the rows of an input, where row `o` of the output reads rows
/// `reads(o)`.
fn rows(from: usize, to: usize, reads: impl Fn(usize) -> Range<isize>) -> [[usize; 2]; RANKS] {
    let needs = |rank| {
        let rows = chunk(to, rank)
            .flat_map(&reads)
            .filter(|&row| (0..from as isize).contains(&row));
        rows.map(|row| row as usize)
            .collect::<std::collections::BTreeSet<_>>()
    };
    let shared = |owner, reader| {
        chunk(from, owner)
            .filter(|row| owner != reader && needs(reader).contains(row))
            .count()
    };
    std::array::from_fn(|own| {
        [
            (0..RANKS).map(|other| shared(own, other)).sum(),
            (0..RANKS).map(|other| shared(other, own)).sum(),
        ]
    })
}

/// Bytes that a rank gives in forward, and gives back in backward, in one step.
fn formula(rank: usize) -> [u64; 2] {
    let window = |stride: usize, kernel: usize, padding: usize| {
        move |o: usize| {
            let start = (o * stride) as isize - padding as isize;
            start..start + kernel as isize
        }
    };
    // Output row `o` of 7 lies at `(o + 1/2) * 3/7 - 1/2` of 3.
    let resized = |o: usize| {
        let at = ((o as f64 + 0.5) * 3.0 / 7.0 - 0.5).clamp(0.0, 2.0);
        at.floor() as isize..at.ceil() as isize + 1
    };
    let doubled = |o: usize| (o / 2) as isize..(o / 2) as isize + 1;
    // Of each layer: elements in a row of all its channels, and the rows.
    let layers = [
        (WIDTH, rows(14, 14, window(1, 3, 1))),
        (4 * WIDTH, rows(14, 7, window(2, 3, 1))),
        (6 * WIDTH / 2, rows(7, 3, window(2, 2, 0))),
        (6, rows(3, 3, window(1, 3, 1))),
        (6, rows(3, 7, resized)),
        (12 * WIDTH / 2, rows(7, 7, window(1, 3, 1))),
        (6 * WIDTH / 2, rows(7, 14, doubled)),
        (8 * WIDTH, rows(14, 14, window(1, 3, 1))),
    ];
    let bytes = |way: usize, skip: usize| -> u64 {
        layers
            .iter()
            .skip(skip)
            .map(|(row, rows)| (4 * BATCH * row * rows[rank][way]) as u64)
            .sum()
    };
    // The images themselves have no gradient.
    [bytes(0, 0), bytes(1, 1)]
}

#[test]
fn a_u_net_of_sharded_images_trains_equal_and_sends_its_halos() {
    let model = UNet::new(&Device::flex());
    let (expected, weights) = trained(&model);
    MeshTest::new([RANKS], "height").run(|mesh| {
        let device = mesh.device().clone().autodiff();
        let plan = Plan::new().with_style("*", Style::placed(R));
        let mut model = parallelize(on_device(&model, &device), mesh, plan)?;
        let mut optim = AdamWConfig::new().with_epsilon(1e-5).init();
        let (mut losses, ledger) = (Vec::new(), mesh.world().ledger());
        for step in 0..STEPS {
            let [x, target] =
                images(step).map(|image| Tensor::from_data(image.into_data(), &device));
            let [x, target] =
                [x, target].map(|image| DTensor::distribute_replicated(image, mesh, &[S(2)]));
            ledger.reset();
            let y =
                RedistributePolicy::Deny.run(|| Ok::<_, burn_dtensor::Error>(model.sharded(x?)))?;
            let given = ledger.bytes_in(Op::AllToAllList, Phase::Forward);
            assert_eq!(
                ledger.total(|key| key.phase == Phase::Forward).bytes,
                given,
                "nothing else travels"
            );
            let loss = (y - target?).square().mean().full_tensor()?;
            losses.push(loss.clone().into_scalar::<f32>());
            let grads = GradientsParams::from_grads(loss.backward(), &model);
            assert_eq!(
                [given, ledger.bytes_in(Op::AllToAllList, Phase::Backward)],
                formula(mesh.rank())
            );
            model = optim.step(1e-2, model, grads);
        }
        near(&losses, &expected, || "losses".into());
        assert!(losses[STEPS - 1] < losses[0]);
        let diff = max_diff(&values(&full_model(&model)?, None), &values(&weights, None));
        assert!(diff < 1e-4, "weights part by {diff}");
        Ok(())
    });
}
