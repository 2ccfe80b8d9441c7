//! What losses send, and what they say of odd targets.

use burn::tensor::activation::log_softmax;
use burn::tensor::{DType, Int, Tensor, TensorData};
use burn_dtensor::comm::{Op, Phase};
use burn_dtensor::dtensor::ops::loss::{CrossEntropyLossConfig, Reduction, cross_entropy};
use burn_dtensor::prelude::*;
use burn_dtensor::testing::MeshTest;
use itertools::Itertools;

use super::{R, S, SUM, ramp, values};

/// Loss parallel: the largest logits, then the terms; nothing in backward, and nothing gathered.
#[test]
fn loss_parallel_is_two_all_reduces_forward_and_none_backward() {
    for smoothing in [0.0, 0.1] {
        MeshTest::new([4], ["tp"]).run(|mesh| {
            let device = mesh.device().clone().autodiff();
            let logits =
                DTensor::distribute_replicated(ramp([3, 10], 0.0, &device), mesh, &[S(1)])?
                    .require_grad();
            let targets = Tensor::<1, Int>::from_ints([0, 5, 9], &device);
            let targets = DTensor::distribute_replicated(targets, mesh, &[R])?;
            let ledger = mesh.world().ledger();
            ledger.reset();
            let loss = CrossEntropyLossConfig::new()
                .with_smoothing(smoothing)
                .init(&device)
                .forward(logits, targets);
            assert_eq!(loss.placements(), [R]);
            assert_eq!(ledger.calls_in(Op::AllReduce, Phase::Forward), 2);
            loss.to_local().backward();
            assert_eq!(ledger.total(|_| true).calls, 2);
            Ok(())
        });
    }
}

/// On a mesh of both, samples cost nothing until the loss is asked for.
#[test]
fn sharded_samples_leave_the_loss_partial() {
    MeshTest::new([2, 2], ["dp", "tp"]).run(|mesh| {
        let device = mesh.device().clone().autodiff();
        let logits =
            DTensor::distribute_replicated(ramp([3, 5], 0.0, &device), mesh, &[S(0), S(1)])?
                .require_grad();
        let targets = Tensor::<1, Int>::from_ints([0, 4, 2], &device);
        let targets = DTensor::distribute_replicated(targets, mesh, &[S(0), R])?;
        let ledger = mesh.world().ledger();
        ledger.reset();
        let loss = cross_entropy(logits.clone(), targets.clone());
        assert_eq!(loss.placements(), [SUM, R]);
        assert_eq!(ledger.total(|_| true).calls, 2);
        let loss = loss.full_tensor()?;
        assert_eq!(ledger.total(|_| true).calls, 3);
        loss.backward();
        assert_eq!(ledger.total(|_| true).calls, 3);
        // How many samples count is one more number to agree on.
        ledger.reset();
        let _ = CrossEntropyLossConfig::new()
            .with_ignore_index(2)
            .init(&device)
            .forward(logits, targets);
        assert_eq!(ledger.calls_in(Op::AllReduce, Phase::Forward), 3);
        assert_eq!(ledger.total(|_| true).calls, 3);
        Ok(())
    });
}

/// Whatever the number of mesh dimensions: two all-reduces over all that cut classes, and one more
/// for what samples count. Values are burn's on the whole.
#[test]
fn classes_sharded_over_several_mesh_dimensions_send_no_more() {
    let weights = [1.0, 0.5, 2.0, 1.5, 0.25];
    let meshes: [(&[usize], &[Placement]); 4] = [
        (&[2, 2], &[S(1), S(1)]),
        (&[2, 3], &[S(1), S(0)]),
        (&[2, 2, 2], &[S(0), S(1), S(1)]),
        (&[2, 2, 2], &[S(1), R, S(1)]),
    ];
    for (shape, placements) in meshes {
        MeshTest::new(shape, &["a", "b", "c"][..shape.len()]).run(|mesh| {
            let device = mesh.device().clone().autodiff();
            let by_samples: Vec<_> = placements
                .iter()
                .map(|own| if *own == S(0) { S(0) } else { R })
                .collect();
            let has_samples = by_samples.contains(&S(0));
            for (weighted, smoothing, reduction) in [false, true]
                .into_iter()
                .cartesian_product([0.0, 0.1])
                .cartesian_product([Reduction::Mean, Reduction::Sum])
                .map(|((a, b), c)| (a, b, c))
            {
                let full = (ramp([7, 5], 0.0, &device) * 0.1).sin().require_grad();
                let targets = Tensor::<1, Int>::from_ints([0, 4, 2, 1, 3, 4, 2], &device);
                let soft = targets.clone().one_hot::<2>(5).float() * (1.0 - f64::from(smoothing))
                    + f64::from(smoothing) / 5.0;
                let weights = if weighted { weights } else { [1.0; 5] };
                let class_weights = Tensor::<1>::from_floats(weights, &device);
                let losses =
                    (soft * class_weights.clone().unsqueeze() * log_softmax(full.clone(), 1))
                        .sum()
                        .neg();
                let expected = match reduction {
                    Reduction::Mean => losses / class_weights.select(0, targets.clone()).sum(),
                    Reduction::Sum => losses,
                };
                let expected_grad = full.grad(&expected.clone().backward()).expect("a leaf");

                let logits =
                    DTensor::distribute_replicated(full.detach(), mesh, placements)?.require_grad();
                let targets = DTensor::distribute_replicated(targets, mesh, &by_samples)?;
                let mut config = CrossEntropyLossConfig::new()
                    .with_smoothing(smoothing)
                    .with_reduction(reduction);
                if weighted {
                    config = config.with_weights(weights);
                }
                let loss = config.init(&device);
                let ledger = mesh.world().ledger();
                ledger.reset();
                let found = loss.forward(logits.clone(), targets.clone());
                let counted =
                    usize::from(has_samples && weighted && reduction == Reduction::Mean) as u64;
                assert_eq!(ledger.total(|_| true).calls, 2 + counted, "on {mesh}");
                let found = found.full_tensor()?;
                let summed = u64::from(has_samples);
                assert_eq!(
                    ledger.calls(Op::AllReduce),
                    2 + counted + summed,
                    "on {mesh}"
                );
                let grads = found.backward();
                assert_eq!(
                    ledger.total(|_| true).calls,
                    2 + counted + summed,
                    "nothing in backward"
                );
                let near = |a: Vec<f32>, b: Vec<f32>| {
                    assert!(
                        a.len() == b.len() && a.iter().zip(&b).all(|(a, b)| (a - b).abs() < 1e-5),
                        "{a:?} for {b:?} on {mesh}"
                    );
                };
                near(values(found), values(expected));
                let grad = logits.local().grad(&grads).map(values).unwrap_or_default();
                near(grad, super::part(expected_grad, &logits));
                // Of each sample, too, nothing is sent beyond the two.
                ledger.reset();
                let samples = loss.forward_no_reduction(logits, targets);
                assert_eq!(
                    (samples.placements(), ledger.total(|_| true).calls),
                    (&by_samples[..], 2)
                );
            }
            Ok(())
        });
    }
}

/// PyTorch's default ignored index is no class.
#[test]
fn an_ignored_target_need_not_be_a_class_and_others_must() {
    MeshTest::new([2], ["tp"]).run(|mesh| {
        let device = mesh.device().clone();
        let logits = DTensor::distribute_replicated(ramp([3, 4], 0.0, &device), mesh, &[S(1)])?;
        let targets = DTensor::distribute_replicated(
            Tensor::<1, Int>::from_ints([-100, 4, 3], &device),
            mesh,
            &[R],
        )?;
        let loss = CrossEntropyLossConfig::new()
            .with_ignore_index(-100)
            .init(&device);
        let losses = values(loss.forward_no_reduction(logits, targets).to_local());
        assert_eq!(losses[0], 0.0);
        assert!(losses[1].is_nan());
        assert!((losses[2] - 0.440_189_7).abs() < 1e-6, "{losses:?}");
        Ok(())
    });
}

/// Of a sure prediction the loss is what the other classes have, which eight significant bits lose
/// beside the one.
#[test]
fn half_precision_logits_have_the_loss_of_single_precision() {
    const CLASSES: usize = 4096;
    let targets = [5, 4000];
    let logit = |row: usize, class: usize| {
        if class == targets[row] as usize {
            0.0
        } else {
            -12.0 - 4.0 * row as f32
        }
    };
    let logits: Vec<f32> = (0..2 * CLASSES)
        .map(|at| logit(at / CLASSES, at % CLASSES))
        .collect();
    let others = |row: usize| (CLASSES - 1) as f64 * (-12.0 - 4.0 * row as f64).exp();
    let expected = (others(0).ln_1p() + others(1).ln_1p()) / 2.0;
    for dtype in [DType::BF16, DType::F16] {
        for placement in [R, S(0), S(1)] {
            MeshTest::new([2], ["tp"]).run(|mesh| {
                let device = mesh.device().clone().autodiff();
                let data = TensorData::new(logits.clone(), [2, CLASSES]).convert_dtype(dtype);
                let x = Tensor::<2>::from_data(data, (&device, dtype));
                let x = DTensor::distribute_replicated(x, mesh, &[placement])?.require_grad();
                let targets = Tensor::<1, Int>::from_ints(targets, &device);
                let targets = DTensor::distribute_replicated(targets, mesh, &[R])?;
                let loss = cross_entropy(x.clone(), targets.clone());
                assert_eq!(loss.dtype(), dtype);
                let loss = loss.full_tensor()?;
                let found = loss.clone().into_scalar::<f64>();
                // It is rounded: to a part of 256 of bf16.
                assert!(
                    (found - expected).abs() < expected / 100.0,
                    "{dtype:?} {placement}: {found} for {expected}"
                );
                let samples = CrossEntropyLossConfig::new()
                    .init(&device)
                    .forward_no_reduction(x.clone(), targets);
                assert_eq!(samples.dtype(), dtype);
                assert_eq!(
                    x.local().grad(&loss.backward()).expect("a leaf").dtype(),
                    dtype
                );
                Ok(())
            });
        }
    }
}
