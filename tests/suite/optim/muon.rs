//! burn's Muon of a sharded model, beside burn's own on one device.

use burn::lr_scheduler::linear::LinearLrSchedulerConfig;
use burn::lr_scheduler::module_lr_scheduler::ModuleLrSchedulerConfig;
use burn::module::ParamGroup;
use burn::nn::{Linear, LinearConfig};
use burn::optim::momentum::MomentumConfig;
use burn::optim::{
    AdamWConfig, AdjustLrFn, GradientsParams, LearningRate, ModuleOptimizer, MuonConfig,
    decay::WeightDecayConfig,
};
use burn::tensor::{Device, Tensor};
use burn_dtensor::comm::Op;
use burn_dtensor::fsdp::{OffloadPolicy, ParamInfo, ParamPlacement};
use burn_dtensor::optim::{
    FullOptimizerState, OptimError, ShardedOptimizer, optimizer_state, parameter_specs, sharded,
};
use burn_dtensor::prelude::*;
use burn_dtensor::testing::MeshTest;
use burn_dtensor::{mesh_test, optim::load_optimizer_state};

use super::models::recorded;
use crate::fsdp::optimizers::grads;
use crate::fsdp::support::{max_diff, on_device, tensor, values};

const STEPS: u64 = 10;

/// Wide and tall ones, one of a row and one of a column, and two of one size.
const SHAPES: [[usize; 2]; 7] = [[5, 4], [7, 3], [3, 8], [6, 6], [6, 6], [1, 5], [9, 1]];

fn layers() -> Vec<Linear> {
    let device = Device::flex();
    device.seed(7);
    let layer = |[rows, columns]: [usize; 2]| LinearConfig::new(rows, columns).init(&device);
    let layers = SHAPES.map(layer).to_vec();
    let _ = values(&layers, None);
    layers
}

/// Of each setting another value.
fn configurations() -> [MuonConfig; 3] {
    let plain = MomentumConfig {
        momentum: 0.9,
        dampening: 0.1,
        nesterov: false,
    };
    [
        MuonConfig::new(),
        MuonConfig::new()
            .with_weight_decay(Some(WeightDecayConfig::new(0.1)))
            .with_adjust_lr_fn(AdjustLrFn::MatchRmsAdamW),
        MuonConfig::new()
            .with_momentum(plain)
            .with_ns_steps(3)
            .with_ns_coefficients((3.0, -4.0, 2.0))
            .with_epsilon(0.5),
    ]
}

fn matrices() -> ParamGroup {
    ParamGroup::from_predicate("weight")
}

/// burn's own, for one device.
fn unsharded(config: &MuonConfig) -> ModuleOptimizer {
    AdamWConfig::new()
        .init()
        .with_group(matrices(), config.build(), None)
}

fn on_shards(config: &MuonConfig) -> ShardedOptimizer {
    sharded(AdamWConfig::new()).with_muon(matrices(), config.clone())
}

fn alone(
    optim: &mut ModuleOptimizer,
    mut model: Vec<Linear>,
    steps: std::ops::Range<u64>,
) -> Vec<Linear> {
    for step in steps {
        let grads = grads(&model, step);
        model = optim.step(lr(step), model, grads);
    }
    model
}

fn together(
    optim: &mut ShardedOptimizer,
    mut model: Vec<Linear>,
    steps: std::ops::Range<u64>,
) -> Result<Vec<Linear>> {
    for step in steps {
        let grads = grads(&model, step);
        model = optim.step(lr(step), model, grads)?;
    }
    Ok(model)
}

/// Another one in every step.
fn lr(step: u64) -> LearningRate {
    0.05 / (1.0 + step as f64)
}

/// FSDP, HSDP, or, with a dimension of that name, tensor parallelism in it.
fn distribute(model: Vec<Linear>, mesh: &DeviceMesh, config: FullyShard) -> Result<Vec<Linear>> {
    if !mesh.names().contains(&"tp".into()) {
        return fully_shard(model, mesh, config);
    }
    let styles = (0..SHAPES.len() - 2).map(|at| {
        (
            at.to_string(),
            if at % 2 == 0 {
                Style::colwise()
            } else {
                Style::rowwise()
            },
        )
    });
    let plan = styles.fold(Plan::new(), |plan, (layer, style)| {
        plan.with_style(layer, style)
    });
    fully_shard(
        parallelize(model, &mesh.slice("tp")?, plan)?,
        &mesh.slice("shard")?,
        config,
    )
}

/// How far the weights of ten steps on the mesh are from those of one device.
fn apart(test: &MeshTest, config: &MuonConfig, shard: impl Fn() -> FullyShard + Sync) -> f64 {
    let model = layers();
    let expected = values(
        &alone(
            &mut unsharded(config),
            on_device(&model, &Device::flex().autodiff()),
            0..STEPS,
        ),
        None,
    );
    assert!(
        max_diff(&expected, &values(&model, None)) > 1e-2,
        "it has stepped"
    );
    let apart = test.run(|mesh| {
        let plain = on_device(&model, &mesh.device().clone().autodiff());
        let model = together(
            &mut on_shards(config),
            distribute(plain, mesh, shard())?,
            0..STEPS,
        )?;
        Ok(max_diff(&values(&full_model(&model)?, None), &expected))
    });
    apart
        .into_iter()
        .fold(0.0, |a, b| if b > a || b.is_nan() { b } else { a })
}

#[test]
fn on_shards_it_equals_burns_on_full_parameters_to_the_bit() {
    for config in configurations() {
        for ranks in [1, 2, 3, 4, 8] {
            let test = MeshTest::new([ranks], ["shard"]);
            assert_eq!(
                apart(&test, &config, FullyShard::new),
                0.0,
                "{config} on {test}"
            );
        }
    }
}

#[test]
fn replicas_take_the_same_step_and_tensor_parallel_shards_one() {
    let [config, ..] = configurations();
    for shape in [[2, 2], [1, 3], [2, 3]] {
        for names in [["replicate", "shard"], ["shard", "tp"]] {
            let test = MeshTest::new(shape, names);
            assert_eq!(apart(&test, &config, FullyShard::new), 0.0, "on {test}");
        }
    }
}

#[test]
fn column_shards_uneven_shards_and_none_make_no_difference() {
    let [config, ..] = configurations();
    let columns = || {
        FullyShard::new().with_shard_placement_fn(|param| {
            (param.shape.len() == 2).then_some(Placement::Shard(1))
        })
    };
    let uneven_rows = || {
        FullyShard::new().with_shard_placement_fn(|param: ParamInfo| {
            let rows = param.shape[0];
            Some(ParamPlacement::uneven(0, [rows / 3, 0, rows - rows / 3]))
        })
    };
    let mixed = || {
        FullyShard::new().with_shard_placement_fn(|param: ParamInfo| match param.path {
            "3.weight" => Some(Placement::Replicate),
            "4.weight" => Some(Placement::Shard(1)),
            _ => None,
        })
    };
    let test = MeshTest::new([3], ["shard"]);
    assert_eq!(apart(&test, &config, columns), 0.0);
    assert_eq!(apart(&test, &config, uneven_rows), 0.0);
    assert_eq!(apart(&test, &config, mixed), 0.0);
    let both = MeshTest::new([3, 2], ["shard", "tp"]);
    assert_eq!(apart(&both, &config, columns), 0.0);
}

/// One matrix has a schedule of its own.
#[test]
fn schedulers_of_burn_set_the_rates_of_matrices_by_path() {
    let (model, [config, ..]) = (layers(), configurations());
    let schedule = || {
        let linear = |lr| LinearLrSchedulerConfig::new(lr, lr / 10.0, 5);
        ModuleLrSchedulerConfig::new(linear(0.1).into())
            .with_group(ParamGroup::from_path("3.weight"), linear(0.02))
            .init()
            .expect("a schedule")
    };
    let mut expected = on_device(&model, &Device::flex().autodiff());
    let (mut own, mut rates) = (unsharded(&config), schedule());
    for step in 0..STEPS {
        let full_grads = grads(&expected, step);
        expected = own.step(rates.step(), expected, full_grads);
    }
    let expected = values(&expected, None);
    MeshTest::new([3], ["shard"]).run(|mesh| {
        let plain = on_device(&model, &mesh.device().clone().autodiff());
        let mut model = fully_shard(plain, mesh, FullyShard::new())?;
        let (mut optim, mut rates) = (on_shards(&config), schedule());
        for step in 0..STEPS {
            let shard_grads = grads(&model, step);
            model = optim.step(rates.step(), model, shard_grads)?;
        }
        assert_eq!(values(&full_model(&model)?, None), expected);
        Ok(())
    });
}

/// Whole gradients, as backward reduces them: the ranks' batches are other ones.
fn trains(mesh: &DeviceMesh) -> Result<()> {
    let device = mesh.device().clone().autodiff();
    let layer = |seed| {
        let mut layer = LinearConfig::new(6, 6).init(&device);
        layer.weight = layer
            .weight
            .map(|_| tensor(seed, [6, 6], &device).require_grad());
        layer.bias = layer
            .bias
            .map(|bias| bias.map(|_| tensor(seed + 1, [6], &device).require_grad()));
        layer
    };
    let plain: Vec<Linear> = [10, 20, 30].map(layer).to_vec();
    let loss = |model: &Vec<Linear>, x: Tensor<2>| {
        unit(model, x, |model, x| {
            model.iter().fold(x, |x, layer| {
                unit(layer, x, |layer, x| layer.forward(x).tanh())
            })
        })
        .square()
        .mean()
    };
    let batch = |step: u64, rank: usize| tensor::<2>(100 * step + rank as u64, [4, 6], &device);
    let mut model = fully_shard(plain.clone(), mesh, FullyShard::new().with_units(["*"]))?;
    let mut expected = plain;
    let config = MuonConfig::new();
    let (mut optim, mut own) = (on_shards(&config), unsharded(&config));
    for step in 0..STEPS {
        let grads =
            GradientsParams::from_grads(loss(&model, batch(step, mesh.rank())).backward(), &model);
        model = optim.step(0.02, model, grads)?;
        let all = (0..mesh.size()).map(|rank| batch(step, rank)).collect();
        let grads =
            GradientsParams::from_grads(loss(&expected, Tensor::cat(all, 0)).backward(), &expected);
        expected = own.step(0.02, expected, grads);
    }
    let diff = max_diff(
        &values(&full_model(&model)?, None),
        &values(&expected, None),
    );
    // Sums over batches come in another order, and ten orthogonal steps pass that on.
    assert!(diff < 2e-5, "{diff} apart on {mesh}");
    Ok(())
}

mesh_test!(
    it_trains_as_one_device_does,
    [2, 2],
    ["replicate", "shard"],
    trains
);

#[test]
fn it_trains_as_one_device_does_on_any_number_of_ranks() {
    for ranks in [1, 2, 3, 4, 8] {
        MeshTest::new([ranks], ["shard"]).run(trains);
    }
}

#[test]
fn shards_in_host_memory_make_no_difference() {
    let [config, ..] = configurations();
    let offloaded = || FullyShard::new().with_offload(OffloadPolicy::Cpu);
    for ranks in [1, 3] {
        let test = MeshTest::new([ranks], ["shard"]);
        assert_eq!(apart(&test, &config, offloaded), 0.0, "on {test}");
    }
}

/// Parts go to owners and come back, each once; what every rank has whole does not move.
#[test]
fn collectives_and_bytes_are_those_of_the_formula() {
    for (count, ranks) in [(4, 2), (5, 2), (3, 4), (2_usize, 1)] {
        MeshTest::new([ranks], ["shard"]).run(|mesh| {
            let device = mesh.device().clone().autodiff();
            let layer = |_| LinearConfig::new(8, 4).with_bias(false).init(&device);
            let model: Vec<Linear> = (0..count).map(layer).collect();
            let model = fully_shard(model, mesh, FullyShard::new())?;
            let grads = grads(&model, 0);
            let ledger = mesh.world().ledger();
            ledger.reset();
            let model = on_shards(&MuonConfig::new()).step(0.1, model, grads)?;
            let calls = if ranks == 1 {
                0
            } else {
                2 * count.div_ceil(ranks)
            };
            assert_eq!(
                ledger.total(|_| true).calls,
                calls as u64,
                "{count} on {ranks}"
            );
            assert_eq!(ledger.calls(Op::AllToAllList), calls as u64);
            // Owners take turns, from the first rank on.
            let part = 8 / ranks * 4 * 4;
            let owned = count / ranks + usize::from(mesh.rank() < count % ranks);
            let given = (count - owned) * part + owned * (ranks - 1) * part;
            assert_eq!(
                ledger.bytes(Op::AllToAllList),
                given as u64,
                "{count} on {ranks}"
            );
            drop(model);
            Ok(())
        });
    }
}

#[test]
fn its_state_is_burns_by_path_on_any_mesh() {
    let (model, [config, ..]) = (layers(), configurations());
    let mut own = unsharded(&config);
    let half = alone(
        &mut own,
        on_device(&model, &Device::flex().autodiff()),
        0..4,
    );
    let expected = recorded(&own, &half);
    let end = values(&alone(&mut own, half, 4..STEPS), None);
    let saved = MeshTest::new([2], ["shard"]).run(|mesh| {
        let plain = on_device(&model, &mesh.device().clone().autodiff());
        let mut optim = on_shards(&config);
        let model = together(
            &mut optim,
            fully_shard(plain, mesh, FullyShard::new())?,
            0..4,
        )?;
        let state = optim.state(&model)?;
        let velocity = state
            .tensor::<2>("3.weight.momentum.velocity")
            .expect("Muon has one");
        assert_eq!(
            velocity.spec(),
            model[3].weight.shard().expect("it is sharded").spec()
        );
        // burn's record of the rank, as well.
        let again = on_shards(&config).load_record(optim.to_record());
        assert_eq!(again.state(&model)?.full()?, state.full()?);
        Ok((full_model(&model)?, state.full()?))
    });
    assert_eq!(saved[0].1, expected);
    for test in [
        MeshTest::new([3], ["shard"]),
        MeshTest::new([2, 2], ["shard", "tp"]),
    ] {
        test.run(|mesh| {
            let (model, full): &(Vec<Linear>, FullOptimizerState) = &saved[0];
            let plain = on_device(model, &mesh.device().clone().autodiff());
            let model = distribute(plain, mesh, FullyShard::new())?;
            let state = full.distribute(parameter_specs(&model)?)?;
            let mut optim = on_shards(&config).load_state(&model, state)?;
            let model = together(&mut optim, model, 4..STEPS)?;
            assert_eq!(values(&full_model(&model)?, None), end, "on {test}");
            Ok(())
        });
    }
    // And back to burn's own.
    let alone_again = on_device(&saved[0].0, &Device::flex().autodiff());
    MeshTest::new([1], ["shard"]).run(|mesh| {
        let model = fully_shard(alone_again.clone(), mesh, FullyShard::new())?;
        let state = saved[0].1.distribute(parameter_specs(&model)?)?;
        let mut own = load_optimizer_state(unsharded(&config), &model, state)?;
        assert_eq!(optimizer_state(&own, &model)?.full()?, saved[0].1);
        assert_eq!(
            values(&full_model(&alone(&mut own, model, 4..STEPS))?, None),
            end
        );
        Ok(())
    });
}

/// A weight that no rank has used has no gradient, a frozen one neither, and an ignored one is each
/// rank's own.
#[test]
fn what_has_no_gradient_stays_and_what_is_not_sharded_is_stepped_where_it_is() {
    let (model, [config, ..]) = (layers(), configurations());
    let left_out = |grads: &mut GradientsParams, model: &Vec<Linear>| {
        let _ = (
            grads.remove::<2>(model[3].weight.id),
            grads.remove::<1>(model[0].bias.as_ref().expect("it has one").id),
        );
    };
    let step = |model: &Vec<Linear>| {
        let mut grads = grads(model, 0);
        left_out(&mut grads, model);
        grads
    };
    let plain = on_device(&model, &Device::flex().autodiff());
    let grads = step(&plain);
    let expected = values(&unsharded(&config).step(0.1, plain, grads), None);
    MeshTest::new([2], ["shard"]).run(|mesh| {
        let plain = on_device(&model, &mesh.device().clone().autodiff());
        let model = fully_shard(plain, mesh, FullyShard::new().with_ignored(["4.weight"]))?;
        let grads = step(&model);
        let model = on_shards(&config).step(0.1, model, grads)?;
        assert_eq!(values(&full_model(&model)?, None), expected);
        Ok(())
    });
}

#[test]
fn what_is_no_matrix_is_refused_before_anything_is_stepped() {
    let model = layers();
    MeshTest::new([2], ["shard"]).run(|mesh| {
        let plain = on_device(&model, &mesh.device().clone().autodiff());
        let model = fully_shard(plain, mesh, FullyShard::new())?;
        let grads = grads(&model, 0);
        let mut optim = sharded(AdamWConfig::new()).with_muon(ParamGroup::all(), MuonConfig::new());
        mesh.world().ledger().reset();
        let error = optim.step(0.1, model.clone(), grads).map(drop).expect_err("a bias is no matrix");
        let text = error.to_string();
        assert!(matches!(&error, Error::Optim(OptimError::NotAMatrix { path, dims: 1 }) if path == "0.bias"), "{text}");
        assert!(text.contains("`0.bias`") && text.contains("ParamGroup::exclude"), "{text}");
        assert_eq!(mesh.world().ledger().total(|_| true).calls, 0);
        assert_eq!(optim.state(&model)?.paths().count(), 0, "nothing of it is remembered");
        Ok(())
    });
}
