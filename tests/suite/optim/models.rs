//! The state of burn's own optimizer of a distributed model, by path.

use std::collections::BTreeMap;

use burn::module::{Module, ModuleVisitor, Param, ParamGroup};
use burn::nn::{Linear, LinearConfig};
use burn::optim::momentum::MomentumConfig;
use burn::optim::{AdafactorConfig, AdamWConfig, GradientsParams, ModuleOptimizer, SgdConfig};
use burn::tensor::{Device, Tensor, TensorData};
use burn_dtensor::optim::{
    FullOptimizerState, OptimError, Scalar, load_optimizer_state, optimizer_state, parameter_specs,
};
use burn_dtensor::prelude::*;
use burn_dtensor::testing::MeshTest;

use crate::fsdp::optimizers::{EQUAL, grads, layers};
use crate::fsdp::support::{on_device, values};

/// Some steps, from `step` on.
fn train(
    optim: &mut ModuleOptimizer,
    mut model: Vec<Linear>,
    steps: std::ops::Range<u64>,
) -> Vec<Linear> {
    for step in steps {
        let grads = grads(&model, step);
        model = optim.step(0.05, model, grads);
    }
    model
}

/// `optim` after two steps of a model on one device.
fn alone_after(optim: &mut ModuleOptimizer, model: &Vec<Linear>) -> ModuleOptimizer {
    train(optim, on_device(model, &Device::flex().autodiff()), 0..2);
    optim.clone()
}

/// burn's record, with paths in the place of ids.
pub fn recorded(optim: &ModuleOptimizer, model: &Vec<Linear>) -> FullOptimizerState {
    struct Paths(Vec<String>, BTreeMap<String, String>);
    impl ModuleVisitor for Paths {
        fn enter_module(&mut self, name: &str, _: &str) {
            self.0.push(name.into());
        }
        fn exit_module(&mut self, _: &str, _: &str) {
            self.0.pop();
        }
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            self.1.insert(param.id.val().to_string(), self.0.join("."));
        }
    }
    let mut paths = Paths(vec![], BTreeMap::new());
    model.visit(&mut paths);
    let reader = burn_pack::Reader::from_bytes(optim.into_bytes().expect("it is written"))
        .expect("it is read");
    let name = |name: &str| {
        let (id, field) = name.split_once('.').expect("an id and a field");
        (field != "__rank").then(|| format!("{}.{field}", paths.1[id]))
    };
    let scalars: BTreeMap<String, Scalar> = reader
        .scalars()
        .iter()
        .filter_map(|(key, scalar)| Some((name(key)?, *scalar)))
        .collect();
    let tensors = reader
        .into_tensors()
        .expect("tensors")
        .into_iter()
        .map(|tensor| {
            let (key, dtype, shape, _, bytes) = tensor.into_parts().expect("a tensor");
            (
                name(&key).expect("a field"),
                TensorData::from_bytes(bytes, shape, dtype),
            )
        });
    FullOptimizerState {
        tensors: tensors.collect(),
        scalars,
    }
}

/// Cut over `shard` ranks, and split over `tp` ranks before that, if the mesh has them.
fn distribute(model: Vec<Linear>, mesh: &DeviceMesh) -> Result<Vec<Linear>> {
    if mesh.ndim() == 1 {
        return fully_shard(model, mesh, FullyShard::new());
    }
    let plan = Plan::new()
        .with_style("0", Style::colwise())
        .with_style("1", Style::rowwise());
    fully_shard(
        parallelize(model, &mesh.slice("tp")?, plan)?,
        &mesh.slice("shard")?,
        FullyShard::new(),
    )
}

fn meshes() -> [MeshTest; 4] {
    let one = [1, 2, 3].map(|ranks| MeshTest::new([ranks], ["shard"]));
    let [a, b, c] = one;
    [a, b, c, MeshTest::new([2, 2], ["shard", "tp"])]
}

/// To the bit, and laid out as the parameters.
#[test]
fn a_models_state_is_that_of_one_device_by_path() {
    let model = layers(true);
    for (name, configurations) in EQUAL {
        for init in configurations {
            let mut optim = init();
            let alone = train(
                &mut optim,
                on_device(&model, &Device::flex().autodiff()),
                0..3,
            );
            let expected = recorded(&optim, &alone);
            for mesh in meshes() {
                mesh.run(|mesh| {
                    let mut optim = init();
                    let sharded =
                        distribute(on_device(&model, &mesh.device().clone().autodiff()), mesh)?;
                    let sharded = train(&mut optim, sharded, 0..3);
                    let calls = mesh.world().ledger().total(|_| true).calls;
                    let state = optimizer_state(&optim, &sharded)?;
                    assert_eq!(
                        mesh.world().ledger().total(|_| true).calls,
                        calls,
                        "it is local"
                    );
                    let specs = parameter_specs(&sharded)?;
                    for (tensor, kept) in state.tensors() {
                        let (_, spec) = specs
                            .iter()
                            .find(|(path, _)| tensor.starts_with(*path))
                            .expect("a parameter");
                        assert_eq!(kept.spec(), spec, "{tensor}");
                    }
                    assert_eq!(state.full()?, expected, "{name} on {mesh}");
                    Ok(())
                });
            }
        }
    }
}

#[test]
fn names_are_paths_and_burns_fields() {
    let model = layers(true);
    MeshTest::new([2], ["shard"]).run(|mesh| {
        let mut optim = AdamWConfig::new().init();
        let sharded = distribute(on_device(&model, &mesh.device().clone().autodiff()), mesh)?;
        let sharded = train(&mut optim, sharded, 0..2);
        let state = optimizer_state(&optim, &sharded)?;
        let names: Vec<_> = state.tensors().map(|(name, _)| name).collect();
        assert_eq!(
            &names[..2],
            ["0.bias.momentum.moment_1", "0.bias.momentum.moment_2"]
        );
        assert_eq!(names.len(), 8);
        assert_eq!(
            usize::try_from(state.scalar("1.weight.momentum.time").expect("it counts")),
            Ok(2)
        );
        let moment = state
            .tensor::<2>("1.weight.momentum.moment_2")
            .expect("there");
        assert_eq!(
            moment.spec(),
            sharded[1].weight.shard().expect("sharded").spec()
        );
        Ok(())
    });
}

/// Saved on two ranks, loaded on every mesh: as if nothing had happened.
#[test]
fn training_goes_on_on_any_mesh() {
    let model = layers(true);
    for (name, configurations) in EQUAL {
        for init in configurations {
            let alone = train(
                &mut init(),
                on_device(&model, &Device::flex().autodiff()),
                0..6,
            );
            let expected = values(&alone, None);
            let saved = MeshTest::new([2], ["shard"]).run(|mesh| {
                let mut optim = init();
                let sharded =
                    distribute(on_device(&model, &mesh.device().clone().autodiff()), mesh)?;
                let sharded = train(&mut optim, sharded, 0..3);
                Ok((
                    full_model(&sharded)?,
                    optimizer_state(&optim, &sharded)?.full()?.into_bytes()?,
                ))
            });
            for mesh in meshes() {
                mesh.run(|mesh| {
                    let (model, bytes) = &saved[0];
                    let sharded =
                        distribute(on_device(model, &mesh.device().clone().autodiff()), mesh)?;
                    let full = FullOptimizerState::from_bytes(bytes.clone())?;
                    let state = full.distribute(parameter_specs(&sharded)?)?;
                    let mut optim = load_optimizer_state(init(), &sharded, state)?;
                    let found = values(&full_model(&train(&mut optim, sharded, 3..6))?, None);
                    assert_eq!(found, expected, "{name} on {mesh}");
                    Ok(())
                });
            }
        }
    }
}

/// Each group's state goes to its own optimizer, also that of parameters which are left to burn.
#[test]
fn groups_and_parameters_that_are_not_distributed_keep_their_own() {
    let model = layers(true);
    let init = || {
        let momentum = SgdConfig::new()
            .with_momentum(Some(MomentumConfig::new()))
            .build();
        let group = ParamGroup::from_predicate("bias");
        AdamWConfig::new().init().with_group(group, momentum, None)
    };
    let expected = values(
        &train(
            &mut init(),
            on_device(&model, &Device::flex().autodiff()),
            0..4,
        ),
        None,
    );
    MeshTest::new([2], ["shard"]).run(|mesh| {
        let plain = on_device(&model, &mesh.device().clone().autodiff());
        let sharded = fully_shard(plain, mesh, FullyShard::new().with_ignored(["1.*"]))?;
        let mut optim = init();
        let sharded = train(&mut optim, sharded, 0..2);
        let state = optimizer_state(&optim, &sharded)?;
        let names: Vec<_> = state.tensors().map(|(name, _)| name).collect();
        let of = |at| {
            [
                "bias.momentum.velocity",
                "weight.momentum.moment_1",
                "weight.momentum.moment_2",
            ]
            .map(|field| format!("{at}.{field}"))
        };
        assert_eq!(names, [of(0), of(1)].concat());
        let goes_on = |mut optim: ModuleOptimizer| {
            let trained = train(&mut optim, sharded.clone(), 2..4);
            assert_eq!(values(&full_model(&trained)?, None), expected);
            Ok::<_, Error>(())
        };
        // One that has stepped nothing yet finds the group by path.
        let fresh = load_optimizer_state(init(), &sharded, state.clone())?;
        assert_eq!(optimizer_state(&fresh, &sharded)?.full()?, state.full()?);
        goes_on(fresh)?;
        // What the state does not contain of those that are not distributed stays where it is.
        let mut distributed = state.full()?;
        distributed.tensors.retain(|name, _| name.starts_with("0."));
        distributed.scalars.retain(|name, _| name.starts_with("0."));
        goes_on(load_optimizer_state(
            optim,
            &sharded,
            distributed.distribute(parameter_specs(&sharded)?)?,
        )?)
    });
}

/// It steps as burn's optimizer without state does, not with the state that it had before.
#[test]
fn a_distributed_parameter_that_the_loaded_state_does_not_contain_has_none() {
    let plain = layers(true);
    let init = || AdamWConfig::new().init();
    let mut optim = init();
    let alone = on_device(&plain, &Device::flex().autodiff());
    let alone = train(&mut optim, alone, 0..2);
    let stepped = |mut optim| values(&train(&mut optim, alone.clone(), 2..4), None);
    let (continued, mut expected) = (stepped(optim), stepped(init()));
    expected.extend(
        continued
            .into_iter()
            .filter(|(path, _)| path.starts_with("0.")),
    );
    MeshTest::new([2], ["shard"]).run(|mesh| {
        let mut optim = init();
        let sharded = distribute(on_device(&plain, &mesh.device().clone().autodiff()), mesh)?;
        let sharded = train(&mut optim, sharded, 0..2);
        let mut state = optimizer_state(&optim, &sharded)?.full()?;
        state.tensors.retain(|name, _| name.starts_with("0."));
        state.scalars.retain(|name, _| name.starts_with("0."));
        let state = state.distribute(parameter_specs(&sharded)?)?;
        let mut optim = load_optimizer_state(optim, &sharded, state)?;
        let trained = train(&mut optim, sharded, 2..4);
        assert_eq!(values(&full_model(&trained)?, None), expected);
        Ok(())
    });
}

#[test]
fn what_does_not_fit_is_a_typed_error() {
    let model = layers(true);
    MeshTest::new([2], ["shard"]).run(|mesh| {
        let plain = on_device(&model, &mesh.device().clone().autodiff());
        let sharded = distribute(plain.clone(), mesh)?;
        let mut optim = AdamWConfig::new().init();
        let sharded = train(&mut optim, sharded, 0..1);
        let state = optimizer_state(&optim, &sharded)?;
        let refused = |result: Result<ModuleOptimizer>| match result
            .map(|_| ())
            .expect_err("it must be refused")
        {
            Error::Optim(error) => error,
            other => panic!("{other}"),
        };
        let sgd = SgdConfig::new()
            .with_momentum(Some(MomentumConfig::new()))
            .init();
        let error = refused(load_optimizer_state(sgd, &sharded, state.clone()));
        assert!(
            matches!(&error, OptimError::Foreign { path, .. } if path == "0.bias"),
            "{error}"
        );
        let columns = FullyShard::new()
            .with_shard_placement_fn(|param| Some(Placement::Shard(param.shape.len() - 1)));
        let other = fully_shard(plain.clone(), mesh, columns)?;
        let error = refused(load_optimizer_state(
            AdamWConfig::new().init(),
            &other,
            state.clone(),
        ));
        assert!(
            matches!(&error, OptimError::Layout { path, .. } if path == "0.weight"),
            "{error}"
        );
        let moved = state.clone().redistribute(parameter_specs(&other)?)?;
        let loaded = load_optimizer_state(AdamWConfig::new().init(), &other, moved)?;
        assert_eq!(optimizer_state(&loaded, &other)?.full()?, state.full()?);
        let fewer = fully_shard(plain[..1].to_vec(), mesh, FullyShard::new())?;
        let error = refused(load_optimizer_state(
            AdamWConfig::new().init(),
            &fewer,
            state,
        ));
        assert!(
            matches!(&error, OptimError::NoParameter { name, .. } if name == "1.bias"),
            "{error}"
        );

        let mut optim = AdafactorConfig::new().init();
        let sharded = train(&mut optim, distribute(plain, mesh)?, 0..1);
        let Err(Error::Optim(error)) = optimizer_state(&optim, &sharded) else {
            panic!("no part of the whole's")
        };
        assert!(
            matches!(&error, OptimError::Shape { name, .. } if name.starts_with("0.weight.")),
            "{error}"
        );
        Ok(())
    });
}

/// burn's means over rows and columns, which are of the whole.
#[test]
fn a_full_state_is_refused_where_the_parameter_is_sharded() {
    let plain = layers(true);
    let mut alone = AdafactorConfig::new().init();
    let full = recorded(&alone_after(&mut alone, &plain), &plain);
    MeshTest::new([2], ["shard"]).run(|mesh| {
        let sharded = distribute(on_device(&plain, &mesh.device().clone().autodiff()), mesh)?;
        let state = full.clone().distribute(parameter_specs(&sharded)?)?;
        let Err(Error::Optim(error)) =
            load_optimizer_state(AdafactorConfig::new().init(), &sharded, state)
        else {
            panic!("no part of the whole's")
        };
        let OptimError::Shape { name, expected, .. } = &error else {
            panic!("{error}")
        };
        assert!(name.starts_with("0.weight."), "{error}");
        assert_eq!(*expected, [if mesh.rank() == 0 { 3 } else { 2 }, 4]);
        assert!(error.to_string().contains("DTensorOptimizer"), "{error}");
        Ok(())
    });
}

#[test]
fn a_full_state_is_taken_and_loaded_where_parameters_are_replicated() {
    let plain = layers(true);
    let mut alone = AdafactorConfig::new().init();
    let half = recorded(&alone_after(&mut alone, &plain), &plain);
    MeshTest::new([2], ["tp"]).run(|mesh| {
        let replicated = || {
            parallelize(
                on_device(&plain, &mesh.device().clone().autodiff()),
                mesh,
                Plan::new(),
            )
        };
        let mut optim = AdafactorConfig::new().init();
        let model = train(&mut optim, replicated()?, 0..2);
        assert_eq!(optimizer_state(&optim, &model)?.full()?, half);
        let state = half.clone().distribute(parameter_specs(&model)?)?;
        let mut loaded = load_optimizer_state(AdafactorConfig::new().init(), &model, state)?;
        let (went_on, again) = (
            train(&mut optim, model.clone(), 2..4),
            train(&mut loaded, model, 2..4),
        );
        assert_eq!(
            values(&full_model(&went_on)?, None),
            values(&full_model(&again)?, None)
        );
        assert_eq!(
            optimizer_state(&loaded, &again)?.full()?,
            optimizer_state(&optim, &went_on)?.full()?
        );
        Ok(())
    });
}

/// It has no layout in which it could be saved. An optimizer that has made no step has nothing to
/// lose.
#[test]
fn a_state_for_a_model_that_is_not_distributed_is_an_error() -> Result<()> {
    let device = Device::flex().autodiff();
    let model: Linear = LinearConfig::new(4, 2).init(&device);
    let mut optim: ModuleOptimizer = AdamWConfig::new().init();
    assert_eq!(optimizer_state(&optim, &model)?.paths().count(), 0);
    let loss = model.forward(Tensor::<2>::ones([1, 4], &device)).sum();
    let grads = GradientsParams::from_grads(loss.backward(), &model);
    let model = optim.step(0.1, model, grads);
    let error = optimizer_state(&optim, &model)
        .map(drop)
        .expect_err("its state would be lost");
    assert!(
        matches!(error, Error::Optim(OptimError::Undistributed)),
        "{error}"
    );
    Ok(())
}
