//! Parameters that are replaced after `fully_shard` or `parallelize`: nobody would reduce their
//! gradients.

use burn::module::Module;
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::{Device, Tensor};
use burn_dtensor::fsdp::ParamError;
use burn_dtensor::fsdp::{reshard, unshard};
use burn_dtensor::optim::sharded;
use burn_dtensor::prelude::*;
use burn_dtensor::testing::MeshTest;

use super::net::{Net, WIDTH, config, net};
use super::support::{on_device, tensor};

/// A change of a sharded model, and the parameter that it loses.
type Change = (fn(&mut Net, &Device), &'static str);

/// What sees the whole model.
type Use = fn(&Net, &DeviceMesh) -> Result<()>;

const CHANGES: [Change; 6] = [
    (
        |net, device| net.first = LinearConfig::new(WIDTH, WIDTH).init(device),
        "first.weight",
    ),
    (
        |net, device| net.first = LinearConfig::new(WIDTH, WIDTH).init(device).no_grad(),
        "first.weight",
    ),
    (
        |net, _| net.first.weight = net.first.weight.clone().map(|weight| weight * 2.0),
        "first.weight",
    ),
    (
        |net, _| net.scale = net.scale.clone().set_require_grad(false),
        "scale",
    ),
    (
        |net, device| net.blocks[1] = LinearConfig::new(WIDTH, WIDTH).init(device),
        "blocks.1.weight",
    ),
    (
        |net, device| {
            net.blocks
                .push(LinearConfig::new(WIDTH, WIDTH).init(device))
        },
        "blocks.3.weight",
    ),
];

#[test]
fn a_replaced_parameter_is_named_by_whatever_sees_the_model() {
    let model = net(&Device::flex());
    for (change, lost) in CHANGES {
        let uses: [(&str, Use); 8] = [
            ("clip_grad_norm", |net, _| {
                clip_grad_norm(net, &mut GradientsParams::new(), 1.0, NormType::L2).map(|_| ())
            }),
            ("ShardedOptimizer::step", |net, _| {
                sharded(AdamWConfig::new())
                    .step(0.1, net.clone(), GradientsParams::new())
                    .map(|_| ())
            }),
            ("full_model", |net, _| full_model(net).map(|_| ())),
            ("named_parameters", |net, _| {
                named_parameters(net).map(|_| ())
            }),
            ("fully_shard", |net, mesh| {
                fully_shard(net.clone(), mesh, FullyShard::new()).map(|_| ())
            }),
            ("parallelize", |net, mesh| {
                parallelize(net.clone(), mesh, Plan::new()).map(|_| ())
            }),
            ("unshard", |net, _| unshard(net).map(|_| ())),
            ("reshard", |net, _| reshard(net)),
        ];
        MeshTest::new([2], ["shard"]).run(|mesh| {
            let device = mesh.device().clone().autodiff();
            let mut sharded = fully_shard(on_device(&model, &device), mesh, config())?;
            named_parameters(&sharded)?;
            change(&mut sharded, &device);
            for (name, using) in uses {
                let error = using(&sharded, mesh).expect_err(name);
                let Error::Param(ParamError::Replaced { param }) = &error else {
                    panic!("{name}: {error}")
                };
                assert_eq!(param, lost, "{name}");
                assert!(error.to_string().contains("full_model"), "{error}");
            }
            Ok(())
        });
        let error = MeshTest::new([2], ["shard"]).run_failing(|mesh| {
            let device = mesh.device().clone().autodiff();
            let mut sharded = fully_shard(on_device(&model, &device), mesh, config())?;
            let x = tensor(1, [2, WIDTH], &device);
            unit(&sharded, x.clone(), |_, x| x);
            change(&mut sharded, &device);
            unit(&sharded, x, |_, x| -> Tensor<2> {
                unreachable!("it is not entered, with {x}")
            });
            Ok(())
        });
        assert!(
            matches!(&error.cause, Error::Param(ParamError::Replaced { param }) if param == lost),
            "{error}"
        );
    }
}

/// Where one unit is entered it knows of its own module.
#[test]
fn a_unit_names_a_replaced_parameter_by_its_path_in_the_model() {
    let model = net(&Device::flex());
    let error = MeshTest::new([2], ["shard"]).run_failing(|mesh| {
        let device = mesh.device().clone().autodiff();
        let mut sharded = fully_shard(on_device(&model, &device), mesh, config())?;
        sharded.blocks[2].bias = sharded.blocks[2]
            .bias
            .clone()
            .map(|bias| bias.map(|bias| bias.zeros_like()));
        for block in &sharded.blocks {
            unit(block, tensor(1, [2, WIDTH], &device), |block, x| {
                block.forward(x)
            });
        }
        Ok(())
    });
    assert!(
        matches!(&error.cause, Error::Param(ParamError::Replaced { param }) if param == "blocks.2.bias"),
        "{error}"
    );
}

/// Over tensor-parallel ranks too, and before data-parallel ranks cut the rest. Two modules without
/// units of their own have equally many parameters that are distributed and that are not: those of
/// one were ignored, and one of the other was replaced.
#[test]
fn a_module_that_passed_the_check_does_not_stand_for_another() {
    let model = net(&Device::flex());
    let error = MeshTest::new([2], ["shard"]).run_failing(|mesh| {
        let device = mesh.device().clone().autodiff();
        let config = FullyShard::new().with_ignored(["first.bias"]);
        let mut sharded = fully_shard(on_device(&model, &device), mesh, config)?;
        let pass = |layer: &Linear| {
            drop(unit(layer, tensor(1, [2, WIDTH], &device), |layer, x| {
                layer.forward(x)
            }))
        };
        pass(&sharded.first);
        sharded.spare.bias = sharded
            .spare
            .bias
            .clone()
            .map(|bias| bias.map(|bias| bias.zeros_like()));
        pass(&sharded.spare);
        Ok(())
    });
    assert!(
        matches!(&error.cause, Error::Param(ParamError::Replaced { param }) if param == "spare.bias"),
        "{error}"
    );
}

#[test]
fn a_parameter_replaced_after_parallelize_is_named() {
    let model = net(&Device::flex());
    MeshTest::new([2, 2], ["dp", "tp"]).run(|mesh| {
        let device = mesh.device().clone().autodiff();
        let mut placed = parallelize(on_device(&model, &device), &mesh.slice("tp")?, Plan::new())?;
        placed.spare = LinearConfig::new(WIDTH, WIDTH).init(&device);
        let error = fully_shard(placed, &mesh.slice("dp")?, FullyShard::new()).expect_err("it is not parallelized");
        assert!(matches!(&error, Error::Param(ParamError::Replaced { param }) if param == "spare.weight"), "{error}");
        Ok(())
    });
}

/// What the error advises.
#[test]
fn a_parameter_of_the_gathered_model_is_replaced_and_sharded_again() {
    let model = net(&Device::flex());
    MeshTest::new([2], ["shard"]).run(|mesh| {
        let device = mesh.device().clone().autodiff();
        let sharded = fully_shard(on_device(&model, &device), mesh, config())?;
        let error = fully_shard(sharded.clone(), mesh, config())
            .expect_err("it is sharded")
            .to_string();
        assert!(
            error.contains("fully_shard(full_model(&model)?, ..)"),
            "{error}"
        );
        let mut full = full_model(&sharded)?;
        full.first = LinearConfig::new(WIDTH, 7).init(&device);
        let again = fully_shard(full, mesh, config())?;
        assert_eq!(
            named_parameters(&again)?[0].spec.shape().as_slice(),
            [WIDTH, 7]
        );
        Ok(())
    });
}

#[derive(Module, Debug)]
struct Normed {
    inner: Linear,
    norm: BatchNorm,
    own: Linear,
}

#[derive(Module, Debug)]
struct Around {
    model: Normed,
    extra: Linear,
}

/// Ignored parameters, replaced or not; buffers; what lies outside; parts of the model used alone.
#[test]
fn what_was_never_distributed_is_no_replacement() {
    let device = Device::flex().autodiff();
    let linear = || LinearConfig::new(4, 4).init(&device);
    let model = Normed {
        inner: linear(),
        norm: BatchNormConfig::new(4).init(&device),
        own: linear(),
    };
    MeshTest::new([2], ["shard"]).run(|mesh| {
        let device = mesh.device().clone().autodiff();
        let config = FullyShard::new()
            .with_units(["inner"])
            .with_ignored(["own.*"]);
        let mut sharded = fully_shard(on_device(&model, &device), mesh, config)?;
        sharded.own = LinearConfig::new(4, 4).init(&device);
        assert_eq!(named_parameters(&sharded)?.len(), 2 + 2);
        let x = || Tensor::<2>::ones([2, 4], &device);
        let forward = |model: &Normed, x| {
            let x = unit(&model.inner, x, |inner, x| inner.forward(x));
            model.own.forward(model.norm.forward(x))
        };
        let plain = unit(&sharded, x(), forward);
        for enter in [
            unit(&sharded, x(), forward),
            unit(&sharded.valid().train(), x(), forward),
        ] {
            assert_eq!(enter.shape(), plain.shape());
        }
        let around = Around {
            model: sharded.clone(),
            extra: LinearConfig::new(4, 4).init(&device),
        };
        unit(&around, x(), |around, x| {
            around.extra.forward(forward(&around.model, x))
        });
        assert_eq!(named_parameters(&around)?.len(), 2 + 2);
        let part = vec![sharded.inner.clone(), LinearConfig::new(4, 4).init(&device)];
        assert_eq!(named_parameters(&part)?.len(), 2);
        unit(&part[0], x(), |part, x| part.forward(x));
        assert_eq!(full_model(&sharded.inner)?.weight.dims(), [4, 4]);
        // Nor does it hide one.
        sharded.inner.bias = sharded.inner.bias.map(|bias| bias.set_require_grad(false));
        let error = full_model(&sharded).expect_err("it is not sharded");
        assert!(
            matches!(&error, Error::Param(ParamError::Replaced { param }) if param == "inner.bias"),
            "{error}"
        );
        Ok(())
    });
}

#[derive(Module, Debug)]
struct Tuned {
    blocks: Vec<Linear>,
    head: Linear,
}

/// Under the paths that they had, beside a layer that was never in that model.
#[test]
fn units_of_one_model_may_stand_in_another() {
    let model = net(&Device::flex());
    MeshTest::new([2], ["shard"]).run(|mesh| {
        let device = mesh.device().clone().autodiff();
        let full = on_device(&model, &device);
        let head = LinearConfig::new(WIDTH, 2).init(&device);
        let sharded = fully_shard(full.clone(), mesh, config())?;
        let tuned = fully_shard(
            Tuned {
                blocks: sharded.blocks,
                head,
            },
            mesh,
            FullyShard::new(),
        )?;
        let x = || tensor::<2>(1, [4, WIDTH], &device);
        let forward = |tuned: &Tuned, x| tuned.head.forward(tuned.blocks[1].forward(x));
        let output = unit(&tuned, x(), forward);
        let expected = forward(&full_model(&tuned)?, x());
        assert_eq!(output.to_data(), expected.to_data());
        let block = |net: &Tuned| net.blocks[1].weight.val().to_data();
        assert_eq!(
            block(&full_model(&tuned)?),
            full.blocks[1].weight.val().to_data()
        );
        assert_eq!(
            tuned.head.weight.shard().expect("sharded").placements(),
            [Placement::Shard(0)]
        );
        Ok(())
    });
}
