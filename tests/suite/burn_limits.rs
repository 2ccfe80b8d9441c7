//! Limits of burn 0.22 that `docs/limits.md` lists: a test that fails here says that burn
//! has mended it. Then its line goes, and what works round it.

use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::module::Module;
use burn::nn::LinearConfig;
use burn::tensor::ops::{AttentionModuleOptions, ConvOptions};
use burn::tensor::{Bool, Device, Tensor, module};

fn device() -> Device {
    Device::flex().autodiff()
}

/// "results of reused leaves that no loss uses".
#[test]
fn a_second_backward_fails_where_a_result_of_its_leaves_is_unused() {
    let leaf = |shape: [usize; 3]| Tensor::<3>::ones(shape, &device()).require_grad();
    let (x, y) = (leaf([10, 5, 6]), leaf([10, 1, 6]));
    let twice = catch_unwind(AssertUnwindSafe(|| {
        for _ in 0..2 {
            let parts = x.clone().chunk(3, 1);
            let unused = parts[1].clone() - parts[0].clone() - y.clone();
            let used = parts[1].clone();
            drop((parts, unused));
            used.sum().backward();
        }
    }));
    let payload = twice.expect_err("burn has mended it");
    let message = payload.downcast_ref::<String>().cloned();
    let message = message
        .or_else(|| payload.downcast_ref::<&str>().map(ToString::to_string))
        .unwrap_or_default();
    assert!(message.contains("already been consumed"), "{message}");
}

/// "the gradient of a grouped `conv1d`'s weight": of a length of 3, a kernel of 2 and a stride of 2
/// one element is left over.
#[test]
fn the_weight_gradient_of_a_grouped_conv1d_is_wrong_where_its_stride_leaves_elements_over() {
    let x = Tensor::<3>::from_data([[[1.0, 2.0, 40.0], [3.0, 5.0, 70.0]]], &device());
    let weight = Tensor::<3>::ones([6, 1, 2], &device()).require_grad();
    let y = module::conv1d(x, weight.clone(), None, ConvOptions::new([2], [0], [1], 2));
    assert_eq!(y.dims(), [1, 6, 1]);
    let gradient: Vec<f32> = weight
        .grad(&y.sum().backward())
        .expect("a leaf")
        .into_data()
        .iter::<f32>()
        .collect();
    // Every output is the sum of the first two elements of its group's channel.
    let expected = [[1.0, 2.0]; 3]
        .into_iter()
        .chain([[3.0, 5.0]; 3])
        .flatten()
        .collect::<Vec<f32>>();
    assert_ne!(gradient, expected, "burn has mended it");
}

/// "a row of attention that is masked altogether".
#[test]
fn the_gradient_of_a_bias_through_a_wholly_masked_row_is_no_number() {
    let one = |value: f32| Tensor::<4>::full([1, 1, 1, 1], value, &device());
    let bias = one(0.0).require_grad();
    let mask = Tensor::<4, Bool>::full([1, 1, 1, 1], true, &device());
    // The gradient times the value is more than 4, times 1 / the smallest positive number infinite.
    let options = AttentionModuleOptions::default();
    let y = module::attention(
        one(1.0),
        one(1.0),
        one(5.0),
        Some(mask),
        Some(bias.clone()),
        options,
    );
    assert_eq!(y.clone().into_scalar::<f32>(), 0.0);
    let gradient = bias
        .grad(&y.sum().backward())
        .expect("a leaf")
        .into_scalar::<f32>();
    assert!(gradient.is_nan(), "burn has mended it: {gradient}");
}

/// "if its parameters were not drawn yet".
#[test]
fn freezing_a_clone_of_a_layer_that_is_not_drawn_freezes_the_layer() {
    let layer = LinearConfig::new(2, 2).init(&device());
    drop(layer.clone().freeze());
    let is_trained = layer.weight.val().is_require_grad();
    assert!(!is_trained, "burn has mended it");
    // One that was read keeps its own setting.
    let layer = LinearConfig::new(2, 2).init(&device());
    drop(layer.weight.val());
    assert!(!layer.clone().freeze().weight.val().is_require_grad());
    assert!(layer.weight.val().is_require_grad());
}
