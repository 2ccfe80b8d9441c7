//! Several models of equal shapes, and clones of one: ranks that run them in different orders are
//! told, and no value is mixed.

use burn::grad_clipping::GradientClippingConfig;
use burn::module::ParamGroup;
use burn::module::{Module, Param};
use burn::nn::{BatchNorm, BatchNormConfig, Initializer, Linear, LinearConfig};
use burn::optim::{GradientsParams, MuonConfig, SgdConfig};
use burn::tensor::{Device, Tensor};
use burn_dtensor::comm::{CommError, Op};
use burn_dtensor::fsdp::{remesh, unshard};
use burn_dtensor::optim::{ShardedOptimizer, ema, sharded};
use burn_dtensor::prelude::*;
use burn_dtensor::testing::MeshTest;

/// A layer of two inputs and one output, whose weights have this value.
fn layer(value: f64, device: &Device) -> Linear {
    LinearConfig::new(2, 1)
        .with_bias(false)
        .with_initializer(Initializer::Constant { value })
        .init(device)
}

/// The output for ones: the sum of the two weights.
fn output(model: &Linear) -> f32 {
    let x = Tensor::<2>::ones([1, 2], &model.weight.base().device());
    unit(model, x, |model, x| model.forward(x)).into_scalar()
}

/// The gradients of the output.
fn gradients(model: &Linear) -> GradientsParams {
    let x = Tensor::<2>::ones([1, 2], &model.weight.base().device());
    GradientsParams::from_grads(
        unit(model, x, |model, x| model.forward(x)).sum().backward(),
        model,
    )
}

/// The model after a step down these gradients, which are 1.
fn stepped(model: Linear) -> Linear {
    let grads = gradients(&model);
    SgdConfig::new().init().step(1.0, model, grads)
}

/// The models in the order in which this rank runs them: every other rank begins with the second.
fn in_order<'a>(mesh: &DeviceMesh, [a, b]: [&'a Linear; 2]) -> [&'a Linear; 2] {
    if mesh.rank() % 2 == 1 { [b, a] } else { [a, b] }
}

/// Runs models in an order of each rank's own: every rank is told, in an operation like this, by a
/// text that has all `words`.
fn are_told_apart(
    mesh: &MeshTest,
    op: Op,
    words: &[&str],
    run: impl Fn(&DeviceMesh) -> Result<f32> + Sync,
) {
    mesh.run(|mesh| {
        let error = Error::catch(|| run(mesh)).expect_err("they run in different orders");
        let text = error.to_string();
        let Error::Comm(CommError::Mismatch {
            during, differs, ..
        }) = error
        else {
            panic!("{text}")
        };
        assert!(
            during.op == op && words.iter().all(|word| differs.contains(word)),
            "{text}"
        );
        Ok(())
    });
}

fn meshes() -> [MeshTest; 2] {
    [
        MeshTest::new([2], ["shard"]),
        MeshTest::new([2, 2], ["replicate", "shard"]),
    ]
}

fn pair(mesh: &DeviceMesh, device: &Device, reshard: ReshardAfterForward) -> Result<[Linear; 2]> {
    let shard = |value| {
        fully_shard(
            layer(value, device),
            mesh,
            FullyShard::new().with_reshard_after_forward(reshard),
        )
    };
    Ok([shard(1.0)?, shard(10.0)?])
}

/// Of models that were sharded by two calls at one place.
const MODELS: [&str; 3] = ["model ", " (Linear, sharded at ", "several_models.rs:"];

#[test]
fn models_run_in_another_order_are_named_on_every_rank() {
    for mesh in &meshes() {
        for reshard in [ReshardAfterForward::Always, ReshardAfterForward::Auto] {
            for tracked in [false, true] {
                are_told_apart(
                    mesh,
                    Op::AllGather,
                    &[&MODELS[..], &["1 (", "2 ("][..]].concat(),
                    |mesh| {
                        let device = mesh.device().clone();
                        let [a, b] = pair(
                            mesh,
                            &if tracked { device.autodiff() } else { device },
                            reshard,
                        )?;
                        let [first, second] = in_order(mesh, [&a, &b]);
                        Ok(output(first) + output(second))
                    },
                );
            }
        }
    }
}

#[test]
fn models_prefetched_in_another_order_are_named() {
    are_told_apart(&meshes()[0], Op::AllGather, &MODELS, |mesh| {
        let [a, b] = pair(mesh, mesh.device(), ReshardAfterForward::Always)?;
        in_order(mesh, [&a, &b])
            .into_iter()
            .try_for_each(|model| unshard(model)?.wait())?;
        Ok(output(&a))
    });
}

#[test]
fn models_gathered_completely_in_another_order_are_named() {
    are_told_apart(&meshes()[0], Op::AllGather, &MODELS, |mesh| {
        let [a, b] = pair(mesh, mesh.device(), ReshardAfterForward::Always)?;
        let [first, second] = in_order(mesh, [&a, &b]);
        Ok(output(&full_model(first)?) + output(&full_model(second)?))
    });
}

/// What they then hold are the first rank's values, in the order in which that one has sharded
/// them.
#[test]
fn models_sharded_in_another_order_are_named_when_they_run() {
    are_told_apart(&meshes()[0], Op::AllGather, &MODELS, |mesh| {
        let shard = |value| fully_shard(layer(value, mesh.device()), mesh, FullyShard::new());
        let [a, b] = match mesh.rank() {
            0 => [shard(1.0)?, shard(10.0)?],
            _ => {
                let b = shard(10.0)?;
                [shard(1.0)?, b]
            }
        };
        Ok(output(&a) + output(&b))
    });
}

#[test]
fn norms_of_gradients_taken_in_another_order_are_of_the_models_named() {
    are_told_apart(&meshes()[0], Op::AllReduce, &MODELS, |mesh| {
        let models = pair(
            mesh,
            &mesh.device().clone().autodiff(),
            ReshardAfterForward::Auto,
        )?;
        let mut grads = models.each_ref().map(gradients);
        let order = if mesh.rank() == 0 { [0, 1] } else { [1, 0] };
        order
            .map(|i| clip_grad_norm(&models[i], &mut grads[i], 1.0, NormType::L2))
            .into_iter()
            .sum::<Result<f64>>()?;
        Ok(0.0)
    });
}

#[test]
fn models_that_are_stepped_in_another_order_are_named_on_every_rank() {
    let clipped = || {
        sharded(SgdConfig::new().with_gradient_clipping(Some(GradientClippingConfig::Norm(1.0))))
    };
    let muon = || sharded(SgdConfig::new()).with_muon(ParamGroup::all(), MuonConfig::new());
    let optimizers: [(Op, &(dyn Fn() -> ShardedOptimizer + Sync)); 2] =
        [(Op::AllReduce, &clipped), (Op::AllToAllList, &muon)];
    for (op, optimizer) in optimizers {
        are_told_apart(
            &meshes()[0],
            op,
            &["model ", " (Linear, sharded at "],
            |mesh| {
                let models = pair(
                    mesh,
                    &mesh.device().clone().autodiff(),
                    ReshardAfterForward::Auto,
                )?;
                let mut models: Vec<_> = models
                    .into_iter()
                    .map(|model| (gradients(&model), model))
                    .collect();
                if mesh.rank() == 0 {
                    models.reverse();
                }
                models
                    .into_iter()
                    .try_for_each(|(grads, model)| optimizer().step(0.1, model, grads).map(drop))?;
                Ok(0.0)
            },
        );
    }
}

#[test]
fn buffers_made_equal_in_another_order_are_of_the_models_named() {
    for policy in [BufferSync::FirstRank, BufferSync::Average] {
        let op = if policy == BufferSync::Average {
            Op::AllReduce
        } else {
            Op::Broadcast
        };
        are_told_apart(
            &meshes()[0],
            op,
            &["model ", " (BatchNorm, sharded at "],
            |mesh| {
                let shard = || {
                    fully_shard(
                        BatchNormConfig::new(2).init(mesh.device()),
                        mesh,
                        FullyShard::new().with_buffer_sync(policy),
                    )
                };
                let models: [BatchNorm; 2] = [shard()?, shard()?];
                let order = if mesh.rank() == 0 { [0, 1] } else { [1, 0] };
                order
                    .into_iter()
                    .try_for_each(|i| sync_buffers(&models[i]))?;
                Ok(0.0)
            },
        );
    }
}

#[test]
fn models_trained_in_another_order_by_replicas_are_named() {
    are_told_apart(
        &MeshTest::new([2, 1], ["replicate", "shard"]),
        Op::AllReduce,
        &MODELS,
        |mesh| {
            let [a, b] = pair(
                mesh,
                &mesh.device().clone().autodiff(),
                ReshardAfterForward::Auto,
            )?;
            let _ = in_order(mesh, [&a, &b]).map(gradients);
            Ok(0.0)
        },
    );
}

/// After a step of one, and after both have changed: then no rank has run either since.
#[test]
fn clones_that_have_parted_are_told_apart() {
    for mesh in &meshes() {
        for average in [false, true] {
            are_told_apart(
                mesh,
                Op::AllGather,
                &[
                    "clone of model 1 (Linear, sharded at ",
                    "`weight` is in state",
                ],
                |mesh| {
                    let device = mesh.device().clone().autodiff();
                    let student = fully_shard(layer(1.0, &device), mesh, FullyShard::new())?;
                    let mut teacher = student.clone().no_grad();
                    let student = stepped(student);
                    if average {
                        teacher = ema(teacher, &student, 0.5)?;
                    }
                    let [first, second] = in_order(mesh, [&student, &teacher]);
                    Ok(output(first) + output(second))
                },
            );
        }
    }
}

#[test]
fn students_of_one_model_are_told_apart() {
    are_told_apart(&meshes()[0], Op::AllGather, &["clone of model 1"], |mesh| {
        let device = mesh.device().clone().autodiff();
        let model = fully_shard(layer(1.0, &device), mesh, FullyShard::new())?;
        let (a, b) = (stepped(model.clone()), stepped(stepped(model)));
        let [first, second] = in_order(mesh, [&a, &b]);
        Ok(output(first) + output(second))
    });
}

/// Clones that are equal may run in any order, and what one rank does with one of its own is its
/// own affair.
#[test]
fn right_programs_run() {
    for mesh in &meshes() {
        let outputs = mesh.run(|mesh| {
            let device = mesh.device().clone().autodiff();
            let mut student = fully_shard(layer(8.0, &device), mesh, FullyShard::new())?;
            let mut other = fully_shard(layer(1.0, &device), mesh, FullyShard::new())?;
            let mut teacher = student.clone().freeze();
            let equal = student.clone();
            let mut outputs: Vec<f32> = in_order(mesh, [&student, &equal]).map(output).into();
            for step in 0..2 {
                let _kept = (mesh.rank() == 0).then(|| student.clone());
                student = stepped(student);
                teacher = ema(teacher, &student, 0.5)?;
                // One rank looks at its shards.
                if mesh.rank() == 0 {
                    drop(student.clone().no_grad());
                    assert!(student.num_params() <= 2);
                }
                outputs.extend([&student, &teacher].map(output));
                outputs.push(output(&student.valid()));
                // Nothing trains it in one of the steps.
                let grads = if step == 0 {
                    GradientsParams::new()
                } else {
                    gradients(&other)
                };
                other = SgdConfig::new().init().step(1.0, other, grads);
                outputs.push(output(&other));
            }
            sync_buffers(&student)?;
            outputs.push(output(&student));
            let x = Tensor::<2>::ones([1, 2], &device);
            outputs.push(
                checkpoint_activations(&student, x, |model: &Linear, x| model.forward(x))
                    .into_scalar(),
            );
            let student = remesh(student, mesh)?;
            outputs.extend(in_order(mesh, [&student, &student.clone()]).map(output));
            Ok(outputs)
        });
        // Sums of two equal weights.
        let expected = [
            16.0, 16.0, 14.0, 15.0, 14.0, 2.0, 12.0, 13.5, 12.0, 0.0, 12.0, 12.0, 12.0, 12.0,
        ];
        assert!(
            outputs.iter().all(|found| found == &expected),
            "{outputs:?}"
        );
    }
}

/// A rank that leaves a weight unused steps it all the same, with the others.
#[test]
fn ranks_that_differ_in_what_they_use_stay_in_step() {
    #[derive(Module, Debug)]
    struct Two {
        a: Param<Tensor<2>>,
        b: Param<Tensor<2>>,
    }
    let sums = meshes()[0].run(|mesh| {
        let device = mesh.device().clone().autodiff();
        let weight = || Param::from_tensor(Tensor::ones([2, 2], &device));
        let mut model = fully_shard(
            Two {
                a: weight(),
                b: weight(),
            },
            mesh,
            FullyShard::new(),
        )?;
        let mut sums = Vec::new();
        for step in 0..3 {
            let y = unit(&model, Tensor::<2>::ones([2, 2], &device), |model, x| {
                let y = x.clone() * model.a.val();
                if mesh.rank() == step % 2 {
                    y + x * model.b.val()
                } else {
                    y
                }
            });
            let grads = GradientsParams::from_grads(y.sum().backward(), &model);
            model = SgdConfig::new().init().step(1.0, model, grads);
            let x = Tensor::<2>::ones([2, 2], &device);
            sums.push(
                unit(&model, x, |model, _| model.a.val() + model.b.val())
                    .sum()
                    .into_scalar::<f32>(),
            );
        }
        Ok(sums)
    });
    // `a` goes down by 1 a step, and `b` by half of it.
    assert_eq!(sums, [[2.0, -4.0, -10.0]; 2]);
}
