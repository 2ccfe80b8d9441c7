//! Without sharding, and without a launch: a plain burn model's blocks.

use burn::module::{Initializer, Module, Param};
use burn::nn::{BatchNorm, BatchNormConfig, Embedding, EmbeddingConfig};
use burn::tensor::{Device, Int, Tensor};
use burn_dtensor::fsdp::checkpoint_activations;
use burn_dtensor::nn::dropout;
use burn_dtensor::{Error, Result, dtensor::ops::random};

use super::{Drops, KEPT, Tower, WAYS, WIDTH, batch, full_grads, linear};

fn devices() -> [Device; 2] {
    let device = Device::flex().autodiff();
    [device.clone(), device.gradient_checkpointing()]
}

#[test]
fn gradients_are_those_of_the_model_that_keeps_activations() -> Result<()> {
    for device in devices() {
        let tower = Tower::new(&device);
        let run = |how| {
            random::seed(3);
            let x = batch(1, &device).require_grad();
            let output = tower.forward(x.clone(), how);
            let grads = (output.clone() * output.clone()).sum().backward();
            let of_input = x.grad(&grads).expect("it is tracked").into_data();
            let loss = {
                random::seed(3);
                tower.forward(x, how).square().sum()
            };
            Ok::<_, Error>((output.into_data(), of_input, full_grads(&tower, loss)?))
        };
        let expected = run(KEPT.drops(Drops::Own))?;
        for how in WAYS {
            assert_eq!(run(how.drops(Drops::Own))?, expected, "{how:?}");
        }
    }
    Ok(())
}

/// Its first block is given numbers, of which there is no gradient.
#[test]
fn a_block_without_a_tracked_input_trains() -> Result<()> {
    for device in devices() {
        let initializer = Initializer::Uniform {
            min: -1.0,
            max: 1.0,
        };
        let table: Embedding = EmbeddingConfig::new(7, WIDTH)
            .with_initializer(initializer)
            .init(&device);
        let tokens = || Tensor::<2, Int>::from_data([[0, 3, 3], [6, 1, 0]], &device);
        let kept = full_grads(&table, table.forward(tokens()).square().sum())?;
        let again = checkpoint_activations(&table, tokens(), |table, tokens| table.forward(tokens));
        assert_eq!(full_grads(&table, again.square().sum())?, kept);
    }
    Ok(())
}

/// Some outputs are read, or none is tracked, or one is no float, or is an input.
#[test]
fn outputs_that_nothing_reads_count_as_zeros() {
    let device = Device::flex().autodiff();
    let layer = linear(1, &device);
    let (x, y) = (
        batch(1, &device).require_grad(),
        batch(2, &device).require_grad(),
    );
    let outputs = checkpoint_activations(
        &layer,
        (x.clone(), y.clone(), 3usize),
        |layer, (x, y, n)| {
            let plain = Tensor::<1>::full([n], 2.0, &x.device().inner());
            let count = Tensor::<1, Int>::from_data([n as i32], &x.device());
            (
                layer.forward(x.clone()),
                (layer.forward(y) * 2.0, count),
                Some(x),
                plain,
            )
        },
    );
    let (first, (_, count), same, plain) = outputs;
    assert_eq!(count.into_scalar::<i32>(), 3);
    assert!(!plain.is_autodiff());
    let grads = (first.sum() + same.expect("it was given").sum() * 5.0).backward();
    let kept = (layer.forward(x.clone()).sum() + x.clone().sum() * 5.0).backward();
    assert_eq!(
        x.grad(&grads).map(Tensor::into_data),
        x.grad(&kept).map(Tensor::into_data)
    );
    let of = |grads: &_| layer.weight.val().grad(grads).map(Tensor::into_data);
    assert_eq!(of(&grads), of(&kept));
    assert_eq!(
        y.grad(&grads)
            .expect("what made it expects one")
            .sum()
            .into_scalar::<f32>(),
        0.0
    );
}

/// A frozen parameter has no gradient, and what is not trained at all is not kept twice.
#[test]
fn frozen_parameters_stay_so() -> Result<()> {
    for device in devices() {
        let mut tower = Tower::new(&device);
        tower.blocks[1] = tower.blocks[1].clone().no_grad();
        tower.blocks[2].up = tower.blocks[2].up.clone().no_grad();
        let expected = full_grads(&tower, tower.forward(batch(1, &device), KEPT).sum())?;
        for how in WAYS {
            let grads = tower.forward(batch(1, &device), how).sum().backward();
            assert!(tower.blocks[1].up.weight.val().grad(&grads).is_none());
            assert_eq!(
                full_grads(&tower, tower.forward(batch(1, &device), how).sum())?,
                expected,
                "{how:?}"
            );
        }
    }
    let tower = Tower::new(&Device::flex().autodiff()).no_grad();
    let output = tower.forward(batch(1, &Device::flex().autodiff()), WAYS[2]);
    assert!(!output.is_tracked());
    Ok(())
}

/// What is not in training is computed once.
#[test]
fn a_valid_model_computes_once() {
    let device = Device::flex();
    let tower = Tower::new(&device.clone().autodiff()).valid();
    let [kept, again] =
        [KEPT, WAYS[2]].map(|how| tower.forward(batch(1, &device), how).into_data());
    assert_eq!(kept, again);
}

#[derive(Module, Debug)]
struct Normed {
    norm: BatchNorm,
    shift: Param<Tensor<1>>,
}

/// Statistics follow a batch once.
#[test]
fn running_statistics_see_a_batch_once() {
    let device = Device::flex().autodiff();
    let normed = || Normed {
        norm: BatchNormConfig::new(WIDTH).init(&device),
        shift: Param::from_tensor(Tensor::zeros([WIDTH], &device)),
    };
    let compute = |normed: &Normed, x: Tensor<2>| {
        let [rows, width] = x.dims();
        normed
            .norm
            .forward(x.reshape([rows, width, 1]))
            .reshape([rows, width])
            + normed.shift.val().unsqueeze()
    };
    let (kept, again) = (normed(), normed());
    for step in 0..3 {
        compute(&kept, batch(step, &device))
            .square()
            .sum()
            .backward();
        checkpoint_activations(&again, batch(step, &device), compute)
            .square()
            .sum()
            .backward();
    }
    let statistics = |normed: &Normed| {
        (
            normed.norm.running_mean.value_sync(),
            normed.norm.running_var.value_sync(),
        )
    };
    let ((mean, var), (mean_again, var_again)) = (statistics(&kept), statistics(&again));
    assert_eq!(
        [mean_again, var_again].map(Tensor::into_data),
        [mean, var].map(Tensor::into_data)
    );
}

/// A program that draws goes on after backward where it would be without.
#[test]
fn backward_leaves_the_stream_where_it_is() {
    let device = Device::flex().autodiff();
    let layer = linear(1, &device);
    let drawn = |again: bool| {
        random::seed(5);
        let compute = |layer: &_, x| dropout(burn::nn::Linear::forward(layer, x), 0.5);
        let output = match again {
            true => checkpoint_activations(&layer, batch(1, &device), compute),
            false => compute(&layer, batch(1, &device)),
        };
        random::next_seed();
        let grads = output.sum().backward();
        let grad = layer
            .weight
            .val()
            .grad(&grads)
            .expect("it is trained")
            .into_data();
        (grad, random::next_seed(), random::rng_state())
    };
    assert_eq!(drawn(true), drawn(false));
}
