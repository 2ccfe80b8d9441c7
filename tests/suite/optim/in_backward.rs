//! Steps in backward, against a backward and a step after it.

use burn::grad_clipping::GradientClippingConfig;
use burn::module::{Module, Param, ParamGroup};
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsParams, LionConfig, MuonConfig, SgdConfig};
use burn::tensor::{Device, Tensor};
use burn_dtensor::fsdp::{GradScaler, OffloadPolicy, ParamError, checkpoint_activations};
use burn_dtensor::optim::{OptimError, ShardedOptimizer, sharded};
use burn_dtensor::prelude::*;
use burn_dtensor::replicate::{DataParallel, replicate};
use burn_dtensor::testing::MeshTest;

use crate::fsdp::support::{on_device, tensor, values};

const STEPS: u64 = 4;

/// A model with all that decides when a parameter may be stepped: a layer that is entered twice,
/// a weight that is also read outside its unit, a layer that is checkpointed, a parameter that is
/// not distributed, and one without a gradient.
#[derive(Module, Debug)]
struct Net {
    twice: Linear,
    tied: Linear,
    recomputed: Linear,
    unused: Linear,
    gain: Param<Tensor<1>>,
}

impl Net {
    fn new(device: &Device) -> Self {
        let linear = |seed| Linear {
            weight: Param::from_tensor(tensor(seed, [5, 5], device)),
            bias: Some(Param::from_tensor(tensor(seed + 1, [5], device))),
        };
        Self {
            twice: linear(1),
            tied: linear(3),
            recomputed: linear(7),
            unused: linear(9),
            gain: Param::from_tensor(tensor(11, [5], device)),
        }
    }

    fn loss(&self, x: Tensor<2>) -> Tensor<1> {
        let layer = |layer: &Linear, x| unit(layer, x, |layer, x| layer.forward(x).tanh());
        unit(self, x, |net, x| {
            let x = layer(&net.twice, x);
            let x = layer(&net.tied, x).matmul(net.tied.weight.val());
            let x = checkpoint_activations(&net.recomputed, x, move |recomputed, x| {
                layer(recomputed, x)
            });
            layer(&net.twice, x) * net.gain.val().unsqueeze()
        })
        .square()
        .mean()
    }
}

/// Distributes a [`Net`].
type Distribute = fn(Net, &DeviceMesh) -> Result<Net>;

fn shard(net: Net, mesh: &DeviceMesh) -> Result<Net> {
    fully_shard(net, mesh, units())
}

fn units() -> FullyShard {
    FullyShard::new()
        .with_units(["twice", "tied", "recomputed", "unused"])
        .with_ignored(["gain"])
}

/// Groups with optimizers of their own; weight decay shows a step of a parameter without gradient.
fn optimizer() -> ShardedOptimizer {
    sharded(AdamWConfig::new().with_weight_decay(0.1))
        .with_group(
            ParamGroup::from_predicate("tied"),
            LionConfig::new().with_weight_decay(0.2),
        )
        .with_group(ParamGroup::from_predicate("bias"), SgdConfig::new())
}

fn x(step: u64, rank: usize, device: &Device) -> Tensor<2> {
    tensor(100 + 10 * step + rank as u64, [3, 5], device)
}

/// Weights after each step, of a backward and a step after it, and of steps in backward.
fn agree(test: &MeshTest, distribute: Distribute) {
    test.run(|mesh| {
        let device = mesh.device().clone().autodiff();
        let made = || distribute(on_device(&Net::new(&Device::flex()), &device), mesh);
        let (mut after, mut inside) = (made()?, made()?);
        let (mut optim_after, mut optim_inside) = (optimizer(), optimizer());
        for step in 0..STEPS {
            let rate = 0.1 / (1.0 + step as f64);
            let rank = mesh.world().rank();
            let loss = after.loss(x(step, rank, &device));
            let grads = GradientsParams::from_grads(loss.backward(), &after);
            after = optim_after.step(rate, after, grads)?;
            let loss = inside.loss(x(step, rank, &device));
            inside = optim_inside.backward(rate, inside, loss)?;
            let expected = values(&full_model(&after)?, None);
            assert_eq!(values(&full_model(&inside)?, None), expected, "step {step}");
        }
        let [after, inside] = [
            optim_after.state(&after)?.full()?.into_bytes()?,
            optim_inside.state(&inside)?.full()?.into_bytes()?,
        ];
        assert_eq!(inside, after, "the optimizers' states");
        Ok(())
    });
}

#[test]
fn steps_in_backward_are_those_after_it() {
    for ranks in 1..4 {
        agree(&MeshTest::new([ranks], ["shard"]), shard);
    }
    agree(&MeshTest::new([2, 2], ["replicate", "shard"]), shard);
}

#[test]
fn they_are_however_weights_and_gradients_are_kept() {
    let test = MeshTest::new([2], ["shard"]);
    agree(&test, |net, mesh| {
        fully_shard(
            net,
            mesh,
            units().with_reshard_after_forward(ReshardAfterForward::Always),
        )
    });
    agree(&test, |net, mesh| {
        fully_shard(
            net,
            mesh,
            units().with_reshard_after_forward(ReshardAfterForward::Never),
        )
    });
    agree(&test, |net, mesh| {
        fully_shard(net, mesh, units().with_offload(OffloadPolicy::Cpu))
    });
    agree(&test, |net, mesh| {
        let config = DataParallel::new().with_units(["twice", "tied", "recomputed", "unused"]);
        replicate(
            net,
            mesh,
            config.with_ignored(["gain"]).with_bucket_bytes(0, 200),
        )
    });
}

/// A parameter that is sharded over tensor-parallel ranks, and over those of FSDP.
#[derive(Module, Debug)]
struct Mlp {
    up: Linear,
    down: Linear,
}

#[test]
fn they_are_in_two_dimensions() {
    MeshTest::new([2, 2], ["shard", "tp"]).run(|mesh| {
        let device = mesh.device().clone().autodiff();
        let tp = mesh.slice("tp")?;
        let made = || {
            let linear = |seed, shape: [usize; 2]| Linear {
                weight: Param::from_tensor(tensor(seed, shape, &device)),
                bias: Some(Param::from_tensor(tensor(seed + 1, [shape[1]], &device))),
            };
            let mlp = Mlp {
                up: linear(1, [3, 8]),
                down: linear(3, [8, 3]),
            };
            let plan = Plan::new()
                .with_style("up", Style::colwise())
                .with_style("down", Style::rowwise());
            let mlp = parallelize(mlp, &tp, plan)?;
            fully_shard(mlp, &mesh.slice("shard")?, FullyShard::new())
        };
        let loss = |mlp: &Mlp, step: u64| {
            let seed = 100 + 10 * step + mesh.slice("shard")?.rank() as u64;
            let x = tensor(seed, [4, 3], &device);
            let x = DTensor::distribute_replicated(x, &tp, &[Placement::Replicate])?;
            let y = unit(mlp, x, |mlp, x| {
                mlp.down.forward_dtensor(mlp.up.forward_dtensor(x).tanh())
            });
            y.square().mean().full_tensor()
        };
        let (mut after, mut inside) = (made()?, made()?);
        let [mut optim_after, mut optim_inside] = [(); 2].map(|()| sharded(AdamWConfig::new()));
        for step in 0..STEPS {
            let grads = GradientsParams::from_grads(loss(&after, step)?.backward(), &after);
            after = optim_after.step(0.1, after, grads)?;
            let loss = loss(&inside, step)?;
            inside = optim_inside.backward(0.1, inside, loss)?;
            let expected = values(&full_model(&after)?, None);
            assert_eq!(values(&full_model(&inside)?, None), expected, "step {step}");
        }
        Ok(())
    });
}

/// A forward without a backward leaves a pass that waits for one.
#[test]
fn forwards_without_a_backward_change_nothing() {
    MeshTest::new([2], ["shard"]).run(|mesh| {
        let device = mesh.device().clone().autodiff();
        let made = || shard(on_device(&Net::new(&Device::flex()), &device), mesh);
        let (mut after, mut inside) = (made()?, made()?);
        let (mut optim_after, mut optim_inside) = (optimizer(), optimizer());
        for step in 0..STEPS {
            let rank = mesh.world().rank();
            let kept = [&after, &inside].map(|net| net.loss(x(7, rank, &device)));
            let loss = after.loss(x(step, rank, &device));
            let grads = GradientsParams::from_grads(loss.backward(), &after);
            after = optim_after.step(0.1, after, grads)?;
            let loss = inside.loss(x(step, rank, &device));
            inside = optim_inside.backward(0.1, inside, loss)?;
            drop(kept);
            let expected = values(&full_model(&after)?, None);
            assert_eq!(values(&full_model(&inside)?, None), expected, "step {step}");
        }
        Ok(())
    });
}

/// Gradients that earlier backwards have not reduced are part of the step.
#[test]
fn the_last_backward_of_an_accumulation_may_step() {
    MeshTest::new([2], ["shard"]).run(|mesh| {
        let device = mesh.device().clone().autodiff();
        let made = || shard(on_device(&Net::new(&Device::flex()), &device), mesh);
        let (mut after, mut inside) = (made()?, made()?);
        let (mut optim_after, mut optim_inside) = (optimizer(), optimizer());
        for step in 0..STEPS {
            let rank = mesh.world().rank();
            for net in [&after, &inside] {
                FsdpModule::of(net)?.set_requires_gradient_sync(false);
                let _ = net.loss(x(step + 20, rank, &device)).backward();
            }
            let refused =
                optim_inside.backward(0.1, inside.clone(), inside.loss(x(9, rank, &device)));
            let text = in_backward(refused);
            assert!(
                text.contains("does not synchronize its gradients"),
                "{text}"
            );
            for net in [&after, &inside] {
                FsdpModule::of(net)?.set_requires_gradient_sync(true);
            }
            let loss = after.loss(x(step, rank, &device));
            let grads = GradientsParams::from_grads(loss.backward(), &after);
            after = optim_after.step(0.1, after, grads)?;
            let loss = inside.loss(x(step, rank, &device));
            inside = optim_inside.backward(0.1, inside, loss)?;
            let mut expected = values(&full_model(&after)?, None);
            let mut found = values(&full_model(&inside)?, None);
            // burn keeps no gradients of parameters that are not distributed.
            for values in [&mut expected, &mut found] {
                values.remove("gain");
            }
            assert_eq!(found, expected, "step {step}");
        }
        Ok(())
    });
}

/// The text of the error of a step that cannot be made in backward.
fn in_backward<T>(result: Result<T>) -> String {
    match result.map(drop).unwrap_err() {
        error @ Error::Optim(OptimError::InBackward { .. }) => {
            let text = error.to_string();
            assert!(
                text.contains("Call `loss.backward()`, and then `step`"),
                "{text}"
            );
            text
        }
        other => panic!("{other}"),
    }
}

#[test]
fn what_needs_all_gradients_is_refused_before_backward() {
    MeshTest::new([2], ["shard"]).run(|mesh| {
        let device = mesh.device().clone().autodiff();
        let model = fully_shard::<Linear>(
            LinearConfig::new(4, 3).init(&device),
            mesh,
            FullyShard::new(),
        )?;
        let loss = |model: &Linear| {
            let x = Tensor::<2>::ones([2, 4], &device);
            unit(model, x, |model, x| model.forward(x)).square().mean()
        };
        let before = values(&full_model(&model)?, None);
        let mut muon = sharded(AdamWConfig::new())
            .with_muon(ParamGroup::from_predicate("weight"), MuonConfig::new());
        let text = in_backward(muon.backward(0.1, model.clone(), loss(&model)));
        assert!(text.contains("Muon"), "{text}");
        let clip = GradientClippingConfig::Norm(1.0);
        let mut clipped = sharded(AdamWConfig::new().with_grad_clipping(Some(clip)));
        let text = in_backward(clipped.backward(0.1, model.clone(), loss(&model)));
        assert!(text.contains("norm"), "{text}");
        let mut plain = sharded(AdamWConfig::new());
        let mut scaler = GradScaler::new();
        let scaled = scaler.scale(loss(&model));
        // Another loss is scaled after it.
        let other = scaler.scale(loss(&model));
        let text = in_backward(plain.backward(0.1, model.clone(), scaled));
        assert!(text.contains("GradScaler"), "{text}");
        let mut grads = GradientsParams::from_grads(other.backward(), &model);
        scaler.unscale(&model, &mut grads)?;
        assert_eq!(values(&full_model(&model)?, None), before);
        // The model and the optimizer go on.
        let stepped = plain.backward(0.1, model.clone(), loss(&model))?;
        assert_ne!(values(&full_model(&stepped)?, None), before);
        Ok(())
    });
}

/// Part of the loss is scaled: the rank unwinds before any step.
#[test]
fn a_scaled_part_of_a_loss_is_refused_before_any_step() {
    let error = MeshTest::new([2], ["shard"]).run_failing(|mesh| {
        let device = mesh.device().clone().autodiff();
        let model = fully_shard::<Linear>(
            LinearConfig::new(4, 3).init(&device),
            mesh,
            FullyShard::new(),
        )?;
        let x = Tensor::<2>::ones([2, 4], &device);
        let loss = unit(&model, x, |model, x| model.forward(x)).square().mean();
        let loss = GradScaler::new().scale(loss) / 4.0;
        sharded(AdamWConfig::new())
            .backward(0.1, model, loss)
            .map(drop)
    });
    let Error::Optim(OptimError::InBackward { problem }) = &error.cause else {
        panic!("{error}")
    };
    assert!(problem.contains("GradScaler"), "{problem}");
}

/// A clone of the model and of the optimizer stays as it was, a frozen parameter too, and the model
/// whose weights stay unsharded after backward reads the stepped ones.
#[test]
fn clones_frozen_parameters_and_weights_that_stay() {
    MeshTest::new([2], ["shard"]).run(|mesh| {
        let device = mesh.device().clone().autodiff();
        let made = || {
            let mut net = on_device(&Net::new(&Device::flex()), &device);
            net.tied = net.tied.freeze();
            let net = shard(net, mesh)?;
            FsdpModule::of(&net)?.set_reshard_after_backward(false);
            Ok::<_, Error>(net)
        };
        let (mut after, mut inside) = (made()?, made()?);
        let [mut optim_after, mut optim_inside] = [optimizer(), optimizer()];
        for step in 0..STEPS {
            let rank = mesh.world().rank();
            let loss = after.loss(x(step, rank, &device));
            let grads = GradientsParams::from_grads(loss.backward(), &after);
            after = optim_after.step(0.1, after, grads)?;
            let kept = (inside.clone(), optim_inside.clone());
            let before = values(&full_model(&kept.0)?, None);
            let state = kept.1.state(&kept.0)?.full()?.into_bytes()?;
            let loss = inside.loss(x(step, rank, &device));
            inside = optim_inside.backward(0.1, inside, loss)?;
            assert_eq!(values(&full_model(&kept.0)?, None), before, "step {step}");
            assert_eq!(kept.1.state(&kept.0)?.full()?.into_bytes()?, state);
            let expected = values(&full_model(&after)?, None);
            assert_eq!(values(&full_model(&inside)?, None), expected, "step {step}");
        }
        Ok(())
    });
}

/// A failed call without a step leaves postponed gradients as they were.
#[test]
fn postponed_gradients_survive_a_backward_of_another_model() {
    MeshTest::new([2], ["shard"]).run(|mesh| {
        let device = mesh.device().clone().autodiff();
        let made = || {
            let layer = LinearConfig::new(4, 3).init(&device);
            fully_shard::<Linear>(layer, mesh, FullyShard::new())
        };
        let (model, other) = (made()?, made()?);
        let loss = |model: &Linear| {
            let x = Tensor::<2>::ones([2, 4], &device);
            unit(model, x, |model, x| model.forward(x)).square().mean()
        };
        FsdpModule::of(&model)?.set_requires_gradient_sync(false);
        let _ = loss(&model).backward();
        FsdpModule::of(&model)?.set_requires_gradient_sync(true);
        let mut optim = sharded(AdamWConfig::new());
        let refused = optim.backward(0.1, model.clone(), loss(&other)).map(drop);
        let error = refused.unwrap_err();
        assert!(
            matches!(error, Error::Param(ParamError::StepWithoutGradients { .. })),
            "{error}"
        );
        optim.backward(0.1, model.clone(), loss(&model)).map(drop)
    });
}

/// A penalty on the stored shard gives it a gradient that no reduction has.
#[test]
fn a_gradient_outside_the_unit_is_an_error_that_names_the_parameter() {
    MeshTest::new([2], ["shard"]).run(|mesh| {
        let device = mesh.device().clone().autodiff();
        let model = fully_shard::<Linear>(
            LinearConfig::new(4, 3).init(&device),
            mesh,
            FullyShard::new(),
        )?;
        let x = Tensor::<2>::ones([2, 4], &device);
        let loss = unit(&model, x, |model, x| model.forward(x)).square().mean();
        let penalty = model.weight.base().square().sum();
        let mut optim = sharded(AdamWConfig::new());
        let error = optim
            .backward(0.1, model.clone(), loss + penalty)
            .map(drop)
            .unwrap_err();
        let Error::Param(ParamError::LateGradient { param }) = &error else {
            panic!("{error}")
        };
        assert_eq!(param, "weight");
        Ok(())
    });
}

/// A checkpointed block around the unit computes in a graph of its own, which is not the loss's.
#[test]
fn a_gradient_outside_the_unit_is_found_where_a_block_runs_first() {
    MeshTest::new([2], ["shard"]).run(|mesh| {
        let device = mesh.device().clone().autodiff();
        let model = fully_shard::<Linear>(
            LinearConfig::new(4, 3).init(&device),
            mesh,
            FullyShard::new(),
        )?;
        let x = Tensor::<2>::ones([2, 4], &device);
        let loss = checkpoint_activations(&model, x, |model, x| {
            unit(model, x, |model, x| model.forward(x)).square()
        });
        let loss = loss.mean() + model.weight.base().square().sum();
        let mut optim = sharded(AdamWConfig::new());
        let error = optim
            .backward(0.1, model.clone(), loss)
            .map(drop)
            .unwrap_err();
        let found =
            matches!(&error, Error::Param(ParamError::LateGradient { param }) if param == "weight");
        assert!(found, "{error}");
        Ok(())
    });
}

#[test]
fn a_loss_of_another_model_has_no_gradients() {
    MeshTest::new([2], ["shard"]).run(|mesh| {
        let device = mesh.device().clone().autodiff();
        let made = || {
            fully_shard::<Linear>(
                LinearConfig::new(4, 3).init(&device),
                mesh,
                FullyShard::new(),
            )
        };
        let (model, other) = (made()?, made()?);
        let x = Tensor::<2>::ones([2, 4], &device);
        let loss = unit(&other, x, |other, x| other.forward(x)).square().mean();
        let mut optim = sharded(AdamWConfig::new());
        let error = optim.backward(0.1, model, loss).map(drop).unwrap_err();
        assert!(
            matches!(error, Error::Optim(OptimError::NoGradients { .. })),
            "{error}"
        );
        Ok(())
    });
}
