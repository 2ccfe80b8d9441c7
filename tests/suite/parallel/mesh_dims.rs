//! Plans for meshes of several dimensions: which ranks hold what, gradients against the unsharded
//! model, and what is sent.

use burn::module::Module;
use burn::nn::{LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::optim::GradientsParams;
use burn::tensor::{Device, Tensor};
use burn_dtensor::comm::{Op, Phase};
use burn_dtensor::parallel::ParallelError;
use burn_dtensor::prelude::*;
use burn_dtensor::testing::MeshTest;

use super::support::{devices, full_grads};
use crate::fsdp::support::{max_diff, on_device, tensor, values};

use Placement::{Replicate as R, Shard as S};

#[derive(Module, Debug)]
struct Block {
    norm: LayerNorm,
    up: Linear,
    down: Linear,
}

fn block() -> Block {
    let device = Device::flex();
    device.seed(4);
    let block = Block {
        norm: LayerNormConfig::new(6).init(&device),
        up: LinearConfig::new(6, 9).init(&device),
        down: LinearConfig::new(9, 6).init(&device),
    };
    // Draw now, on one thread.
    let _ = values(&block, None);
    block
}

impl Block {
    fn plain(&self, x: Tensor<3>) -> Tensor<3> {
        x.clone()
            + self
                .down
                .forward(self.up.forward(self.norm.forward(x)).tanh())
    }

    fn parallel(&self, x: DTensor<3>) -> DTensor<3> {
        unit(self, x, |block, x| {
            let h = block
                .up
                .forward_dtensor(block.norm.forward_dtensor(x.clone()))
                .tanh();
            x + block.down.forward_dtensor(h)
        })
    }
}

fn input(device: &Device) -> Tensor<3> {
    tensor(3, [2, 5, 6], device)
}

/// Features over `tp`.
fn features() -> Plan {
    Plan::new()
        .with_style("up", Style::colwise())
        .with_style("down", Style::rowwise())
}

/// The same, with the sequence over `tp` between.
fn features_and_sequence() -> Plan {
    Plan::new()
        .with_style("norm", Style::sequence_parallel())
        .with_style("up", Style::colwise())
        .with_style("down", Style::rowwise().with_output(S(1)))
}

/// The sequence over `cp`, throughout.
fn sequence() -> Plan {
    Plan::new().with_style("**", Style::sequence_parallel())
}

/// Loss and gradients are the unsharded model's, on every mesh, with data-parallel ranks, and
/// sharded before or after.
fn trains(shape: &[usize], names: &[&str], plan: fn() -> Plan, placements: &[Placement]) {
    let plain = block();
    let expected = {
        let device = Device::flex().autodiff();
        let plain = on_device(&plain, &device);
        let loss = plain.plain(input(&device)).square().mean();
        (
            loss.clone().into_scalar::<f32>(),
            values(
                &plain,
                Some(&GradientsParams::from_grads(loss.backward(), &plain)),
            ),
        )
    };
    MeshTest::new(shape, names).run(|mesh| {
        let tensor_dims: Vec<_> = names
            .iter()
            .copied()
            .filter(|name| *name != "shard")
            .collect();
        let tp = mesh.slice(&tensor_dims[..])?;
        for device in devices(mesh) {
            let model = || on_device(&plain, &device);
            let mut models = vec![parallelize(model(), &tp, plan())?];
            if names.contains(&"shard") {
                let shard =
                    |model: Block| fully_shard(model, &mesh.slice("shard")?, FullyShard::new());
                models = vec![
                    shard(parallelize(model(), &tp, plan())?)?,
                    parallelize(shard(model())?, &tp, plan())?,
                ];
            }
            let held: Vec<_> = models
                .iter()
                .map(|model| {
                    named_parameters(model)
                        .unwrap()
                        .iter()
                        .map(ToString::to_string)
                        .collect::<Vec<_>>()
                })
                .collect();
            assert!(
                held.iter().all(|other| *other == held[0]),
                "in either order: {held:?}"
            );
            for model in models {
                let x = DTensor::distribute_replicated(input(&device), &tp, placements)?;
                let loss = model.parallel(x).square().mean().full_tensor()?;
                assert!((loss.clone().into_scalar::<f32>() - expected.0).abs() < 1e-5);
                let grads = GradientsParams::from_grads(loss.backward(), &model);
                let diff = max_diff(&full_grads(&model, &grads)?, &expected.1);
                assert!(diff < 1e-5, "gradients part by {diff} on {mesh}");
                let diff = max_diff(&values(&full_model(&model)?, None), &values(&plain, None));
                assert_eq!(diff, 0.0, "values on {mesh}");
            }
            Ok::<_, Error>(())?;
        }
        Ok(())
    });
}

#[test]
fn sequence_over_one_dimension_and_features_over_another() {
    let plan = || {
        Plan::new()
            .with_mesh_dim_plan("tp", features())
            .with_mesh_dim_plan("cp", sequence())
    };
    trains(&[2, 2], &["cp", "tp"], plan, &[S(1), R]);
    trains(&[2, 3], &["tp", "cp"], plan, &[R, S(1)]);
    trains(&[2, 2, 2], &["shard", "cp", "tp"], plan, &[S(1), R]);
    trains(&[2, 2, 2], &["cp", "shard", "tp"], plan, &[S(1), R]);
}

#[test]
fn sequence_over_both_dimensions() {
    let plan = || {
        Plan::new()
            .with_mesh_dim_plan("tp", features_and_sequence())
            .with_mesh_dim_plan("cp", sequence())
    };
    trains(&[2, 2], &["cp", "tp"], plan, &[S(1), S(1)]);
    trains(&[2, 2, 2], &["shard", "cp", "tp"], plan, &[S(1), S(1)]);
}

#[test]
fn features_over_both_dimensions() {
    let plan = || {
        Plan::new()
            .with_mesh_dim_plan("a", features())
            .with_mesh_dim_plan("b", features())
    };
    trains(&[2, 2], &["a", "b"], plan, &[R, R]);
    trains(&[2, 2, 2], &["a", "shard", "b"], plan, &[R, R]);
}

/// Invariant 2: tensor parallelism cuts first, here over two dimensions.
#[test]
fn a_dimension_is_sharded_by_all_tensor_parallel_dimensions_before_the_data_parallel_one() {
    let plain = block();
    MeshTest::new([2, 2, 2], ["a", "shard", "b"]).run(|mesh| {
        let plan = Plan::new()
            .with_mesh_dim_plan("a", features())
            .with_mesh_dim_plan("b", features());
        let model = parallelize(plain.clone(), &mesh.slice(["a", "b"])?, plan)?;
        let model = fully_shard(model, &mesh.slice("shard")?, FullyShard::new())?;
        let shard = model.down.weight.shard().expect("distributed");
        assert_eq!(
            shard.layout().to_string(),
            "[S(0), S(0), S(0); dim 0 sharded by mesh dims 0, 2, 1]"
        );
        assert_eq!(
            shard.full_tensor()?.into_data(),
            plain.down.weight.val().into_data()
        );
        assert_eq!(model.up.weight.dtensor()?.placements(), [S(1), S(1)]);
        assert_eq!(
            model
                .up
                .weight
                .styles()
                .iter()
                .map(Style::input)
                .collect::<Vec<_>>(),
            [Some(R), Some(R)]
        );
        Ok(())
    });
}

/// Invariant 3, for each set of mesh dimensions along which ranks have terms.
#[test]
fn terms_over_the_same_ranks_are_added_up_at_once() {
    let plain = block();
    MeshTest::new([2, 2], ["cp", "tp"]).run(|mesh| {
        let device = mesh.device().clone().autodiff();
        let reduced = |plan: Plan, placements: &[Placement]| -> Result<_> {
            let model = parallelize(
                on_device(&plain, &device),
                mesh,
                plan.with_mesh_dim_plan("cp", sequence()),
            )?;
            let x = DTensor::distribute_replicated(input(&device), mesh, placements)?;
            let y = model.parallel(x);
            let ledger = mesh.world().ledger();
            ledger.reset();
            y.to_local().square().sum().backward();
            let units = ledger.snapshot();
            let unit = units.total(|key| {
                key.op == Op::AllReduce && &*key.label == "root" && key.phase == Phase::Backward
            });
            Ok((unit.calls, ledger.calls_in(Op::AllReduce, Phase::Backward)))
        };
        // All parameters over `cp`; and the activation over `tp`, which features of `up` read.
        assert_eq!(
            reduced(Plan::new().with_mesh_dim_plan("tp", features()), &[S(1), R])?,
            (1, 2)
        );
        // Weights, and the bias of `down`, over `cp`; the norm over both.
        assert_eq!(
            reduced(
                Plan::new().with_mesh_dim_plan("tp", features_and_sequence()),
                &[S(1), S(1)]
            )?,
            (2, 2)
        );
        Ok(())
    });
}

#[test]
fn the_plan_of_each_dimension_adds_its_units() {
    let plain = vec![block(), block()];
    MeshTest::new([2, 2], ["cp", "tp"]).run(|mesh| {
        let features = Plan::new()
            .with_style("*.up", Style::colwise())
            .with_units(["1"]);
        let plan = Plan::new()
            .with_mesh_dim_plan("cp", sequence().with_units(["0"]))
            .with_mesh_dim_plan("tp", features);
        let model = parallelize(plain.clone(), mesh, plan)?;
        for param in named_parameters(&model)? {
            assert_eq!(Some(&*param.unit), param.path.split('.').next(), "{param}");
        }
        Ok(())
    });
}

#[test]
fn heads_are_not_split_over_any_dimension_that_shards_them() {
    let plain = block();
    MeshTest::new([2, 2], ["a", "b"]).run(|mesh| {
        let colwise = || Plan::new().with_style("down", Style::colwise().with_heads(2));
        // Over two ranks two heads can; over four they cannot.
        parallelize(
            plain.clone(),
            mesh,
            Plan::new().with_mesh_dim_plan("a", colwise()),
        )?;
        match parallelize(
            plain.clone(),
            mesh,
            Plan::new()
                .with_mesh_dim_plan("a", colwise())
                .with_mesh_dim_plan("b", colwise()),
        ) {
            Err(Error::Parallel(
                error @ ParallelError::Heads {
                    heads: 2,
                    len: 6,
                    size: 4,
                    ..
                },
            )) => {
                assert!(error.to_string().contains("`a`, `b`"), "{error}");
            }
            other => panic!("must be refused, got {other:?}"),
        }
        Ok(())
    });
}
