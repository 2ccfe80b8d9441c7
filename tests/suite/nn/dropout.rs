//! Dropout of plain tensors, and what else data-parallel ranks draw for themselves.

use burn::module::Param;
use burn::nn::{DropoutConfig, Linear, LinearConfig};
use burn::optim::{GradientsParams, SgdConfig};
use burn::prelude::*;
use burn::tensor::Distribution;
use burn_dtensor::dtensor::ops::random;
use burn_dtensor::nn::dropout;
use burn_dtensor::prelude::*;
use itertools::Itertools;

use crate::fsdp::support::fill;
use crate::launched;

fn on_ranks<T: Send>(
    ranks: usize,
    program: impl Fn(&World, &Device) -> Result<T> + Sync,
) -> Vec<T> {
    let outcome = launch(Launch::threads(ranks), |world| {
        program(world, &world.device().clone().autodiff())
    });
    outcome
        .map(launched::values)
        .unwrap_or_else(|error| panic!("{ranks} ranks: {error}"))
}

fn bits<const D: usize>(tensor: Tensor<D>) -> Vec<u32> {
    tensor
        .into_data()
        .try_to_vec::<f32>()
        .unwrap()
        .into_iter()
        .map(f32::to_bits)
        .collect()
}

fn ones(shape: [usize; 2], device: &Device) -> Tensor<2> {
    Tensor::ones(shape, device)
}

/// Two steps of a sharded model, with noise and dropout; what each rank drew, and the model.
fn program(ranks: usize) -> Vec<Vec<Vec<u32>>> {
    on_ranks(ranks, |world, device| {
        let mesh = DeviceMesh::new(world, [ranks], ["shard"])?;
        let linear: Linear = LinearConfig::new(4, 4).with_bias(false).init(device);
        let weight = Param::from_data(fill(3, &[4, 4]), device);
        let mut model = fully_shard(Linear { weight, ..linear }, &mesh, FullyShard::new())?;
        let mut optim = SgdConfig::new().init();
        let mut drawn = Vec::new();
        for step in 0..2 {
            random::seed(random::fold_in(5, step));
            let x = random::tensor::<2>([64, 4], Distribution::Normal(0.0, 1.0), device);
            let y = dropout(model.forward(x.clone()), 0.3);
            let again = || bits(dropout(ones([8, 8], device), 0.5));
            drawn.extend([bits(x), bits(y.clone()), again(), again()]);
            let grads = GradientsParams::from_grads(y.square().mean().backward(), &model);
            model = optim.step(0.1, model, grads);
        }
        drawn.push(bits(full_model(&model)?.weight.val()));
        Ok(drawn)
    })
}

#[test]
fn a_program_with_dropout_has_the_same_bits_at_every_run_and_ranks_draw_others() {
    for ranks in [2, 3] {
        let first = program(ranks);
        assert_eq!(program(ranks), first, "{ranks} ranks");
        let (weights, drawn): (Vec<_>, Vec<_>) = first
            .iter()
            .map(|rank| rank.split_last().expect("weights"))
            .unzip();
        assert!(weights.iter().all_equal());
        assert!(
            drawn.into_iter().flatten().all_unique(),
            "every draw of every rank is another"
        );
    }
}

/// Of `n` elements, drawn apart with probability `p`, as many as that: four standard errors.
fn assert_share(hits: usize, n: usize, p: f64) {
    let (hits, n) = (hits as f64, n as f64);
    assert!(
        (hits - n * p).abs() < 4.0 * (n * p * (1.0 - p)).sqrt(),
        "{hits} of {n}, expected {}",
        n * p
    );
}

#[test]
fn what_is_kept_is_scaled_and_as_many_as_asked_for_and_ranks_keep_others() {
    const N: usize = 1 << 14;
    for (prob, scale) in [(0.25, 4.0 / 3.0), (0.5, 2.0), (0.9, 10.0)] {
        let masks = on_ranks(3, |_, device| {
            let y: Vec<f32> = dropout(ones([128, N / 128], device), prob)
                .into_data()
                .try_to_vec()
                .unwrap();
            assert!(
                y.iter()
                    .all(|&y| y == 0.0 || (y - scale).abs() < 1e-5 * scale),
                "{prob}"
            );
            Ok(y.into_iter().map(|y| y != 0.0).collect_vec())
        });
        let keep = 1.0 - prob;
        for mask in &masks {
            assert_share(mask.iter().filter(|&&kept| kept).count(), N, keep);
        }
        for (a, b) in masks.iter().tuple_combinations() {
            // Independent masks agree where both keep and where both drop.
            let same = a.iter().zip(b).filter(|(a, b)| a == b).count();
            assert_share(same, N, keep * keep + prob * prob);
        }
    }
}

/// Against the mask itself, which ones show; with gradient checkpointing too.
#[test]
fn the_gradient_passes_where_the_value_does() {
    on_ranks(2, |_, device| {
        for device in [device.clone(), device.clone().gradient_checkpointing()] {
            random::seed(8);
            let mask = dropout(ones([5, 6], &device), 0.4);
            random::seed(8);
            let x = Tensor::<2>::from_data(fill(1, &[5, 6]), &device).require_grad();
            let weights = Tensor::<2>::from_data(fill(2, &[5, 6]), &device);
            let y = dropout(x.clone(), 0.4);
            assert_eq!(bits(y.clone()), bits(x.clone() * mask.clone()));
            let grads = (y * weights.clone()).sum().backward();
            assert_eq!(
                bits(x.grad(&grads).expect("tracked")),
                bits((weights * mask).inner())
            );
        }
        Ok(())
    });
}

/// As burn's own.
#[test]
fn nothing_is_dropped_or_drawn_outside_of_training() {
    on_ranks(2, |_, device| {
        let next = || bits(random::tensor::<1>([4], Distribution::Default, device));
        let expected = next();
        random::seed(0);
        let plain = ones([3, 3], &device.clone().inner());
        assert_eq!(bits(dropout(plain.clone(), 0.5)), bits(plain.clone()));
        assert_eq!(
            bits(DropoutConfig::new(0.5).init().forward(plain.clone())),
            bits(plain.clone())
        );
        assert_eq!(bits(dropout(ones([3, 3], device), 0.0)), bits(plain));
        assert_eq!(next(), expected, "none of these took from the stream");
        Ok(())
    });
}

/// A rank that drops more often than another, such as for a longer sequence, draws the same seeds
/// for what it has together with it.
#[test]
fn a_ranks_own_draws_leave_those_of_all_ranks_alone() {
    let seeds = on_ranks(3, |world, device| {
        for _ in 0..world.rank() {
            let _ = dropout(ones([2, 2], device), 0.5);
        }
        Ok([random::next_seed(), random::next_seed()])
    });
    assert!(seeds.iter().all_equal());
}

#[test]
fn a_probability_to_drop_is_below_one() {
    let error = launch(Launch::threads(1), |world| {
        let _ = dropout(ones([1, 1], &world.device().clone().autodiff()), 1.0);
        Ok::<_, Error>(())
    })
    .expect_err("nothing would be left");
    assert!(error.to_string().contains("dropout of 1"), "{error}");
}
