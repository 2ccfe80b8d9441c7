//! State dicts of models and optimizers, without files.

use std::collections::BTreeMap;

use burn::module::{Lora, Module, ModuleVisitor, Param, ParamGroup, ParamId};
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::{Bool, DType, Device, Float, Int, Tensor, TensorData};
use burn_dtensor::checkpoint::{CheckpointError, LoadKind, LoadOptions, StateDict};
use burn_dtensor::optim::sharded;
use burn_dtensor::prelude::*;
use burn_dtensor::testing::MeshTest;

use super::net::{LAYOUTS, Net, address, config, device, filled, kept, test, values};
use crate::fsdp::support::tensor;
use crate::parallel;

fn strict() -> LoadOptions {
    LoadOptions::new()
}

fn calls(mesh: &DeviceMesh) -> usize {
    mesh.world().ledger().total(|_| true).calls as usize
}

/// Asserts that every tensor of the state dict is the memory of the model's.
fn assert_shared<M: Module>(state: &StateDict, model: &M) {
    struct Shared<'a>(&'a StateDict, Vec<String>, usize);
    impl Shared<'_> {
        fn check<const D: usize, K: burn_dtensor::dtensor::Kind>(&mut self, stored: Tensor<D, K>) {
            // A shard's marker in records is not a tensor of the model.
            let path = self.1.join(".");
            if path.contains("distributed.part") {
                return;
            }
            let tensor = self
                .0
                .get::<D, K>(&path)
                .unwrap_or_else(|| panic!("`{path}` is there"));
            assert_eq!(address(tensor.to_local()), address(stored), "{path}");
            self.2 += 1;
        }
    }
    impl ModuleVisitor for Shared<'_> {
        fn enter_module(&mut self, name: &str, _: &str) {
            self.1.push(name.into());
        }

        fn exit_module(&mut self, _: &str, _: &str) {
            self.1.pop();
        }

        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            self.check(param.base());
        }

        fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
            self.check(param.val());
        }

        fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<D, Bool>>) {
            self.check(param.val());
        }
    }
    let mut shared = Shared(state, vec![], 0);
    model.visit(&mut shared);
    assert_eq!(shared.2, state.len());
}

/// Taken without a copy and without communication, it has the values of the model that was
/// distributed.
#[test]
fn a_state_dict_has_the_tensors_of_the_model_itself() {
    let expected = values(&Net::new(1, &Device::flex()));
    test().run(|mesh| {
        for (layout, distribute) in LAYOUTS {
            let model = distribute(Net::new(1, &device(mesh)), mesh)?;
            let sent = calls(mesh);
            let state = StateDict::of_model(&model, mesh)?;
            assert_eq!(calls(mesh), sent, "{layout}");
            assert_shared(&state, &model);
            assert!(
                state
                    .tensors()
                    .all(|(_, tensor)| !tensor.spec().layout().has_partial())
            );
            assert_eq!(state.full()?, expected, "{layout}");
            let one = state.full_if(mesh.rank() == 3)?;
            assert_eq!(
                one,
                (mesh.rank() == 3).then(|| expected.clone()),
                "{layout}"
            );
            for parameter in named_parameters(&model)? {
                let tensor = state
                    .tensors()
                    .find(|(path, _)| *path == parameter.path)
                    .expect("it is there")
                    .1;
                assert_eq!(*tensor.spec(), parameter.spec, "{layout}");
            }
        }
        Ok(())
    });
}

/// Not those of the optimizer, and not those of forwards, which change running statistics.
#[test]
fn later_steps_do_not_show_in_a_state_dict() {
    test().run(|mesh| {
        let device = device(mesh);
        for (layout, distribute) in LAYOUTS {
            let mut model = distribute(Net::new(1, &device), mesh)?;
            let mut optim = sharded(AdamWConfig::new());
            // So that a postponed update of statistics is pending.
            model.loss(0, 0, &device);
            let (state, before) = (
                StateDict::of_model(&model, mesh)?,
                values(&full_model(&model)?),
            );
            assert_eq!(state.full()?, before, "{layout}");
            for step in 1..3 {
                let grads = model.grads(step, 0, &device);
                model = optim.step(0.1, model, grads)?;
            }
            assert_eq!(state.full()?, before, "{layout}");
            let after = StateDict::of_model(&model, mesh)?.full()?;
            let same: Vec<_> = before
                .keys()
                .filter(|path| before[*path] == after[*path])
                .collect();
            assert_eq!(
                same,
                ["frozen.bias", "frozen.weight", "mask", "steps"],
                "{layout}"
            );
        }
        Ok(())
    });
}

/// Ways to distribute the model load the state dicts of each other.
#[test]
fn a_state_dict_loads_into_every_layout() {
    let expected = values(&Net::new(1, &Device::flex()));
    test().run(|mesh| {
        let device = device(mesh);
        for (at, (from, distribute_from)) in LAYOUTS.into_iter().enumerate() {
            let source = distribute_from(Net::new(1, &device), mesh)?;
            let state = StateDict::of_model(&source, mesh)?;
            // Itself and the next three, if there is no time for all.
            let others = LAYOUTS
                .into_iter()
                .cycle()
                .skip(at)
                .take(if crate::effort::is_long() {
                    LAYOUTS.len()
                } else {
                    4
                });
            for (to, distribute_to) in others {
                let target = distribute_to(Net::new(2, &device), mesh)?;
                // An update of statistics that is pending must not come after the load.
                target.loss(0, 0, &device);
                let (before, sent) = (kept(&target), calls(mesh));
                let (loaded, report) = state.load_model(target, mesh, &strict())?;
                let sent = calls(mesh) - sent;
                assert!(report.loaded.iter().eq(expected.keys()), "{report:?}");
                assert!(
                    [
                        &report.cast,
                        &report.missing,
                        &report.skipped,
                        &report.unexpected
                    ]
                    .iter()
                    .all(|l| l.is_empty())
                );
                assert_eq!(kept(&loaded), before, "{from} into {to}");
                if from == to {
                    assert_shared(&state, &loaded);
                    assert_eq!(sent, 1, "{from}: only the ranks' agreement");
                    let losses = [&source, &loaded].map(|net| net.loss(1, 0, &device));
                    let losses = losses.map(|loss| (loss.clone().into_data(), loss.backward()));
                    assert_eq!(losses[0].0, losses[1].0, "{from}");
                    let [one, other] =
                        losses.map(|(_, grads)| GradientsParams::from_grads(grads, &source).len());
                    assert_eq!((one, other), (8, 0), "{from}: leaves of its own");
                    // That forward has changed the statistics of both.
                    continue;
                }
                assert_eq!(values(&full_model(&loaded)?), expected, "{from} into {to}");
            }
        }
        Ok(())
    });
}

/// HSDP and tensor parallelism, and a mesh of the same ranks in another order.
#[test]
fn a_state_dict_of_three_dimensions_loads_on_another_mesh() {
    use parallel::support::{Net, distribute_with, plan};
    let model = Net::new(&Device::flex());
    let expected = values(&model);
    MeshTest::new([2, 2, 2], ["replicate", "shard", "tp"]).run(|mesh| {
        let units = || FullyShard::new().with_units(["blocks.*"]);
        let state = StateDict::of_model(
            &distribute_with(model.clone(), mesh, plan(), units())?,
            mesh,
        )?;
        assert_eq!(state.full()?, expected);
        let fresh = || filled(model.clone(), 3);
        for (shape, names) in [(vec![2, 4], ["tp", "shard"]), (vec![4, 2], ["shard", "tp"])] {
            let other = DeviceMesh::new(mesh.world(), shape, names)?;
            let target = distribute_with(fresh(), &other, plan(), units())?;
            let (loaded, _) = state.load_model(target, &other, &strict())?;
            assert_eq!(values(&full_model(&loaded)?), expected);
        }
        Ok(())
    });
}

fn adapted(seed: u64, device: &Device) -> Net {
    let lora =
        Lora::new(2, 3.0).set_param_group(ParamGroup::from_paths(vec!["up.weight", "down.weight"]));
    filled(Net::new(seed, device).apply_lora(lora), seed)
}

#[test]
fn adapters_are_in_the_state_dict_and_load_alone() {
    let expected = values(&adapted(1, &Device::flex()));
    assert!(expected.contains_key("up.weight.lora.a"));
    test().run(|mesh| {
        let device = device(mesh);
        for (layout, distribute) in [LAYOUTS[0], LAYOUTS[2], LAYOUTS[3], LAYOUTS[6]] {
            let mut state = StateDict::of_model(&distribute(adapted(1, &device), mesh)?, mesh)?;
            assert_eq!(state.full()?, expected, "{layout}");
            let target = || distribute(adapted(2, &device), mesh);
            // `full_model` merges the adapters of parameters that are not distributed.
            let full = |net: &Net| {
                if named_parameters(net)?.is_empty() {
                    Ok(net.clone())
                } else {
                    full_model(net)
                }
            };
            let (loaded, _) = state.load_model(target()?, mesh, &strict())?;
            assert_eq!(values(&full(&loaded)?), expected, "{layout}");
            // The adapters into another base.
            state.retain(|path| path.contains(".lora."));
            let (loaded, report) =
                state.load_model(target()?, mesh, &strict().with_partial(true))?;
            assert_eq!(
                (report.loaded.len(), report.missing.len()),
                (4, expected.len() - 4)
            );
            let base = values(&adapted(2, &Device::flex()));
            for (path, value) in values(&full(&loaded)?) {
                let from = if path.contains(".lora.") {
                    &expected
                } else {
                    &base
                };
                assert_eq!(value, from[&path], "{layout}: {path}");
            }
        }
        Ok(())
    });
}

#[test]
fn lazy_parameters_are_not_drawn_by_a_load() {
    let lazy = |device: &Device| -> Linear {
        let weight = Param::uninitialized(
            ParamId::new(),
            |_, _| panic!("drawn"),
            device.clone(),
            true,
            [4, 6].into(),
        );
        Linear {
            weight,
            bias: LinearConfig::new(4, 6).init(device).bias,
        }
    };
    MeshTest::new([2], ["shard"]).run(|mesh| {
        let device = device(mesh);
        let source = filled(LinearConfig::new(4, 6).init(&device), 1);
        let state = StateDict::of_model(&source, mesh)?;
        // Ordinary, and to be loaded in part only.
        let (loaded, _) = state.load_model(lazy(&device), mesh, &strict())?;
        assert_eq!(values(&loaded), values(&source));
        assert!(loaded.weight.is_require_grad());
        let bias_only = strict()
            .with_renamed(|path| (path == "bias").then(|| path.into()))
            .with_partial(true);
        let (loaded, report) = state.load_model(lazy(&device), mesh, &bias_only)?;
        assert!(!loaded.weight.is_initialized());
        assert_eq!(
            (report.loaded, report.skipped),
            (vec!["bias".into()], vec!["weight".into()])
        );
        // Taken, they are drawn: burn's own initial values.
        let fresh: Linear = LinearConfig::new(4, 6).init(&device);
        let state = StateDict::of_model(&fresh, mesh)?;
        assert_eq!(
            state
                .get::<2, Float>("weight")
                .unwrap()
                .to_local()
                .into_data(),
            fresh.weight.val().into_data()
        );
        Ok(())
    });
}

/// burn's clones of one parameter: still one leaf, of whose gradient the optimizer sees all.
#[test]
fn tied_parameters_stay_tied_unless_their_values_differ() {
    let tied = |net: Net| Net {
        frozen: net.up.clone(),
        ..net
    };
    let sharded = |net: Net, mesh: &DeviceMesh| {
        fully_shard(
            tied(net),
            mesh,
            config()
                .with_ignored(["spare", "up.*", "frozen.*"])
                .with_units(["down"]),
        )
    };
    let of_leaf = |net: &Net| {
        let loss = net.up.weight.val().sum() + net.frozen.weight.val().sum() * 2.0;
        GradientsParams::from_grads(loss.backward(), net)
            .get::<2>(net.up.weight.id)
            .unwrap()
            .into_data()
    };
    MeshTest::new([2], ["shard"]).run(|mesh| {
        let device = device(mesh);
        let source = sharded(Net::new(1, &device), mesh)?;
        let expected = of_leaf(&source);
        assert_eq!(expected.iter::<f32>().next(), Some(3.0));
        let state = StateDict::of_model(&source, mesh)?;
        let from_data = StateDict::from_full(state.full()?, mesh)?;
        for state in [&state, &from_data] {
            let (loaded, _) =
                state.load_model(sharded(Net::new(2, &device), mesh)?, mesh, &strict())?;
            assert_eq!(of_leaf(&loaded), expected);
        }
        // One key serves both, and two values are two parameters.
        let from_one = strict()
            .with_renamed(|path| Some(path.replace("frozen.", "up.")))
            .with_partial(true);
        let (loaded, report) =
            state.load_model(sharded(Net::new(2, &device), mesh)?, mesh, &from_one)?;
        assert_eq!(
            (of_leaf(&loaded), report.unexpected),
            (expected, vec!["frozen.bias".into(), "frozen.weight".into()])
        );
        let mut full = state.full()?;
        let zeros = TensorData::zeros::<f32, _>(full["frozen.weight"].shape().clone());
        full.insert("frozen.weight".into(), zeros.clone());
        let (loaded, _) = StateDict::from_full(full, mesh)?.load_model(
            sharded(Net::new(2, &device), mesh)?,
            mesh,
            &strict(),
        )?;
        assert_eq!(
            loaded.up.weight.val().into_data(),
            source.up.weight.val().into_data()
        );
        assert_eq!(loaded.frozen.weight.val().into_data(), zeros);
        Ok(())
    });
}

/// Renamed, in part, and in another dtype.
#[test]
fn a_report_names_what_was_loaded_and_what_was_not() {
    test().run(|mesh| {
        let device = device(mesh);
        let values_of = |seed| values(&Net::new(seed, &Device::flex()));
        let mut saved: BTreeMap<_, _> = values_of(1)
            .into_iter()
            .map(|(path, data)| (path.replace("up.", "encoder."), data))
            .filter(|(key, _)| key != "spare")
            .collect();
        let down = saved["down.weight"].clone().convert_dtype(DType::F64);
        let steps = saved["steps"].clone().convert_dtype(DType::I16);
        saved.extend([
            ("down.weight".into(), down),
            ("steps".into(), steps),
            ("extra".into(), TensorData::from([1.0])),
        ]);
        let options = strict().with_partial(true).with_renamed(|path| match path {
            "norm.beta" => None,
            path => Some(path.replace("up.", "encoder.")),
        });
        for (layout, distribute) in LAYOUTS {
            let state = StateDict::from_full(saved.clone(), mesh)?;
            let (loaded, report) =
                state.load_model(distribute(Net::new(2, &device), mesh)?, mesh, &options)?;
            assert_eq!(report.cast, ["down.weight", "steps"], "{layout}");
            assert_eq!(
                (&report.missing[..], &report.skipped[..]),
                (&["spare".into()][..], &["norm.beta".into()][..])
            );
            assert_eq!(report.unexpected, ["extra"]);
            assert!(report.loaded.contains(&"up.weight".into()) && report.loaded.len() == 12);
            let (one, other) = (values_of(1), values_of(2));
            for (path, value) in values(&full_model(&loaded)?) {
                let from = if ["spare", "norm.beta"].contains(&path.as_str()) {
                    &other
                } else {
                    &one
                };
                assert_eq!(value, from[&path], "{layout}: {path}");
            }
        }
        Ok(())
    });
}

fn refused<T>(result: Result<T>) -> [Vec<String>; 3] {
    match result.map(drop) {
        Err(Error::Checkpoint(CheckpointError::Keys {
            of: LoadKind::Model,
            missing,
            unexpected,
            mismatched,
        })) => [missing, unexpected, mismatched],
        other => panic!("{other:?}"),
    }
}

#[test]
fn all_keys_that_do_not_fit_are_in_one_error() {
    test().run(|mesh| {
        let device = device(mesh);
        for (layout, distribute) in LAYOUTS {
            let mut saved = values(&Net::new(1, &Device::flex()));
            saved.retain(|path, _| path != "spare" && path != "down.bias");
            let wide = TensorData::zeros::<f32, _>([5, 8]);
            let bools = TensorData::from([true, false]);
            saved.extend([
                ("up.weight".into(), wide),
                ("steps".into(), bools),
                ("a.b".into(), TensorData::from([1])),
            ]);
            let state = StateDict::from_full(saved, mesh)?;
            let load = |options: &LoadOptions| {
                let error = state
                    .load_model(distribute(Net::new(2, &device), mesh)?, mesh, options)
                    .map(drop);
                let text = error.as_ref().unwrap_err().to_string();
                Ok::<_, Error>((text, refused(error)))
            };
            let (text, [missing, unexpected, mismatched]) = load(&strict())?;
            assert_eq!(
                (missing, unexpected),
                (vec!["down.bias".into(), "spare".into()], vec!["a.b".into()]),
                "{layout}"
            );
            let shapes = "`up.weight` is [5, 7] f32, but `up.weight` was saved as [5, 8] f32";
            assert!(
                mismatched.len() == 2
                    && mismatched[1] == shapes
                    && mismatched[0].contains("`steps`"),
                "{mismatched:?}"
            );
            let parts = [
                "Not saved: `down.bias`, `spare`. ",
                "Not in the model: `a.b`. ",
                shapes,
                "with_partial",
            ];
            assert!(parts.iter().all(|part| text.contains(part)), "{text}");
            // A partial load does not forgive a shape, and is not proposed for it.
            let (text, [missing, unexpected, mismatched]) = load(&strict().with_partial(true))?;
            assert!(
                missing.is_empty() && unexpected.is_empty() && mismatched.len() == 2,
                "{layout}"
            );
            assert!(
                text.contains("allows no other shapes") && !text.contains("To load the rest"),
                "{text}"
            );
        }
        Ok(())
    });
}

/// No rank loads if one refuses, and each learns why.
#[test]
fn ranks_refuse_a_state_dict_together() {
    test().run(|mesh| {
        let device = device(mesh);
        let mut state = StateDict::of_model(&Net::new(1, &device), mesh)?;
        if mesh.rank() == 2 {
            state.retain(|path| path != "spare");
        }
        let load = |options: &LoadOptions| state.load_model(Net::new(2, &device), mesh, options);
        assert_eq!(
            refused(load(&strict())).map(|keys| keys.join(" ")),
            ["spare", "", ""]
        );
        // The group is in order.
        assert_eq!(
            load(&strict().with_partial(true))?.1.missing.len(),
            usize::from(mesh.rank() == 2)
        );
        Ok(())
    });
}

#[test]
fn one_rank_has_the_values_for_all() {
    let expected = values(&Net::new(1, &Device::flex()));
    test().run(|mesh| {
        let device = device(mesh);
        // What the other ranks pass does not count.
        let given = |rank: usize| match rank {
            0 => Some(expected.clone()),
            1 => Some(BTreeMap::new()),
            _ => None,
        };
        for (layout, distribute) in LAYOUTS {
            let target = distribute(Net::new(2, &device), mesh)?;
            let before = kept(&target);
            let (loaded, report) =
                StateDict::load_model_from_first(given(mesh.rank()), target, mesh, &strict())?;
            assert!(report.loaded.iter().eq(expected.keys()), "{layout}");
            assert_eq!(kept(&loaded), before, "{layout}");
            assert_eq!(values(&full_model(&loaded)?), expected, "{layout}");
        }
        let mut half = expected.clone();
        let spare = half.remove("spare").unwrap().convert_dtype(DType::F64);
        half.remove("steps");
        half.insert("other".into(), spare);
        let half = (mesh.rank() == 0).then_some(half);
        let load = |options: &LoadOptions| {
            let target = LAYOUTS[5].1(Net::new(2, &device), mesh)?;
            StateDict::load_model_from_first(half.clone(), target, mesh, options)
        };
        assert_eq!(
            refused(load(&strict())).map(|keys| keys.join(" ")),
            ["spare steps", "other", ""]
        );
        // One value for several parameters.
        let options = strict().with_partial(true).with_renamed(|path| match path {
            "spare" | "norm.gamma" => Some("other".into()),
            path => Some(path.into()),
        });
        let (loaded, report) = load(&options)?;
        assert_eq!(
            (&report.cast[..], report.missing.len()),
            (&["norm.gamma".into(), "spare".into()][..], 1)
        );
        let loaded = values(&full_model(&loaded)?);
        assert!(
            ["spare", "norm.gamma"]
                .iter()
                .all(|path| loaded[*path] == expected["spare"])
        );
        let none =
            StateDict::load_model_from_first(None, Net::new(2, &device), mesh, &strict()).map(drop);
        assert!(
            matches!(
                none,
                Err(Error::Checkpoint(CheckpointError::NoValues { rank: 0 }))
            ),
            "{none:?}"
        );
        Ok(())
    });
}

/// Model and optimizer move to another layout and back, and the training continues as if they had
/// not.
#[test]
fn an_optimizers_state_moves_with_the_model() {
    test().run(|mesh| {
        let device = device(mesh);
        for (at, (layout, distribute)) in LAYOUTS.into_iter().enumerate().skip(1) {
            // The ordinary model has no state that is distributed.
            let (other_layout, other) = LAYOUTS[1 + at % (LAYOUTS.len() - 1)];
            let optimizer = || sharded(AdamWConfig::new());
            let (mut model, mut optim) = (distribute(Net::new(1, &device), mesh)?, optimizer());
            for step in 0..2 {
                let grads = model.grads(step, 0, &device);
                model = optim.step(0.1, model, grads)?;
            }
            let own = optim.state(&model)?;
            let (state, full) = (StateDict::of_optimizer(&own), own.full()?);
            assert!(
                state.tensors().map(|(key, _)| key).eq(full.tensors.keys()),
                "{layout}"
            );
            assert!(
                state.scalars().eq(full
                    .scalars
                    .iter()
                    .map(|(key, scalar)| (key.as_str(), *scalar)))
            );
            assert_eq!(
                (state.full()?, state.len()),
                (
                    full.tensors.clone(),
                    full.tensors.len() + full.scalars.len()
                )
            );
            let moment = own.tensor::<2>("up.weight.momentum.moment_1").unwrap();
            let taken = state
                .get::<2, Float>("up.weight.momentum.moment_1")
                .unwrap();
            assert_eq!(
                (address(taken.clone().to_local()), taken.spec()),
                (address(moment.local().clone()), moment.spec())
            );

            let onto = |to: fn(Net, &DeviceMesh) -> Result<Net>, model: &Net, state: &StateDict| {
                let values = StateDict::of_model(model, mesh)?;
                let (model, _) =
                    values.load_model(to(Net::new(2, &device), mesh)?, mesh, &strict())?;
                let (state, _) = state.optimizer_state(&model, &strict())?;
                let optim = optimizer().load_state(&model, state)?;
                Ok::<_, Error>((model, optim))
            };
            let (moved, there) = onto(other, &model, &state)?;
            let state_there = there.state(&moved)?;
            assert_eq!(state_there.full()?, full, "{layout} to {other_layout}");
            let (mut back, mut again) =
                onto(distribute, &moved, &StateDict::of_optimizer(&state_there))?;
            for step in 2..4 {
                let [grads, of_back] = [&model, &back].map(|net| net.grads(step, 0, &device));
                model = optim.step(0.1, model, grads)?;
                back = again.step(0.1, back, of_back)?;
            }
            assert_eq!(
                again.state(&back)?.full()?,
                optim.state(&model)?.full()?,
                "{layout}"
            );
            assert_eq!(
                values(&full_model(&back)?),
                values(&full_model(&model)?),
                "{layout}"
            );
        }
        let model = LAYOUTS[1].1(Net::new(1, &device), mesh)?;
        let foreign =
            StateDict::from_full([("nowhere.moment_1".into(), TensorData::from([1.0]))], mesh)?;
        let error = foreign
            .optimizer_state(&model, &strict())
            .map(drop)
            .unwrap_err();
        let unexpected = vec!["nowhere.moment_1".to_owned()];
        let of = LoadKind::Optimizer;
        let expected = CheckpointError::Keys {
            of,
            missing: vec![],
            unexpected: unexpected.clone(),
            mismatched: vec![],
        };
        assert!(
            matches!(&error, Error::Checkpoint(error) if *error == expected),
            "{error}"
        );
        let (nothing, report) = foreign.optimizer_state(&model, &strict().with_partial(true))?;
        assert_eq!(
            (
                nothing.paths().count(),
                report.loaded.len(),
                report.unexpected
            ),
            (0, 0, unexpected)
        );
        Ok(())
    });
}

/// The state follows a renamed parameter, and that of a parameter that is left out is not loaded.
#[test]
fn an_optimizers_state_follows_renamed_parameters() {
    test().run(|mesh| {
        let device = device(mesh);
        let mut model = LAYOUTS[1].1(Net::new(1, &device), mesh)?;
        let mut optim = sharded(AdamWConfig::new());
        let grads = model.grads(0, 0, &device);
        model = optim.step(0.1, model, grads)?;
        let own = optim.state(&model)?;
        let keyed = |path: &str| {
            if path.starts_with("up.") {
                format!("before.{path}")
            } else {
                path.to_owned()
            }
        };
        let saved = own
            .full()?
            .tensors
            .into_iter()
            .map(|(key, data)| (keyed(&key), data));
        let saved = StateDict::from_full(saved, mesh)?;

        let error = saved
            .optimizer_state(&model, &strict())
            .map(drop)
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("before.up.weight.momentum.moment_1"),
            "{error}"
        );
        let left_out = own
            .paths()
            .find(|path| !path.starts_with("up."))
            .unwrap()
            .to_owned();
        let renamed = {
            let left_out = left_out.clone();
            strict().with_renamed(move |path| (path != left_out).then(|| keyed(path)))
        };
        let (state, report) = saved.optimizer_state(&model, &renamed)?;
        let loaded: Vec<_> = own.paths().filter(|path| *path != left_out).collect();
        assert_eq!(
            (report.loaded, report.skipped.contains(&left_out)),
            (loaded.iter().map(|path| path.to_string()).collect(), true)
        );
        assert!(state.paths().eq(loaded));
        for (name, tensor) in state.tensors() {
            let same = own.tensors().find(|(other, _)| *other == name).unwrap().1;
            assert_eq!(
                (tensor.local_data(), tensor.spec()),
                (same.local_data(), same.spec()),
                "{name}"
            );
        }
        Ok(())
    });
}

/// Errors that need no agreement: the other rank is not reached.
#[test]
fn a_replaced_parameter_is_named() {
    MeshTest::new([1], ["shard"]).run(|mesh| {
        let device = device(mesh);
        let state = StateDict::of_model(&Net::new(1, &device), mesh)?;
        let mut model = fully_shard(Net::new(1, &device), mesh, FullyShard::new())?;
        model.up.weight = Param::from_tensor(tensor(1, [5, 7], &device));
        for error in [
            StateDict::of_model(&model, mesh).map(drop).unwrap_err(),
            state
                .load_model(model, mesh, &strict())
                .map(drop)
                .unwrap_err(),
        ] {
            assert!(error.to_string().contains("up.weight"), "{error}");
        }
        Ok(())
    });
}
