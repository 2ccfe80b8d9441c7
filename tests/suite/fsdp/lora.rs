//! `fully_shard` of a model with LoRA adapters, and of one with something else attached to its
//! weights.

use burn::module::{Lora, Module, ModuleMapper, Param, Reparameterization, Reparameterizer};
use burn::nn::Linear;
use burn::optim::{AdamWConfig, GradientsParams, ModuleOptimizer};
use burn::tensor::quantization::Calibration;
use burn::tensor::{DType, Device, Shape, Tensor};
use burn_dtensor::comm::Op;
use burn_dtensor::fsdp::ParamError;
use burn_dtensor::fsdp::{full_model_on, remesh};
use burn_dtensor::mesh_test;
use burn_dtensor::prelude::*;
use burn_dtensor::testing::MeshTest;

use super::net::{Net, WIDTH, config, net, with_units};
use super::support::{max_diff, on_device, tensor, values};

/// A net whose weights have adapters that do something, the same on every rank.
fn adapted() -> Net {
    struct Factors(Vec<String>, u64);
    impl ModuleMapper for Factors {
        fn enter_module(&mut self, name: &str, _: &str) {
            self.0.push(name.into());
        }
        fn exit_module(&mut self, _: &str, _: &str) {
            self.0.pop();
        }
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            if !self.0.contains(&"lora".into()) {
                return param;
            }
            self.1 += 1;
            param.map(|factor| tensor(self.1, factor.dims(), &factor.device()))
        }
    }
    net(&Device::flex())
        .apply_lora(Lora::new(2, 3.0))
        .map(&mut Factors(vec![], 100))
}

fn step(optim: &mut ModuleOptimizer, model: Net, batch: u64, device: &Device) -> Net {
    let loss = with_units(&model, tensor(batch, [4, WIDTH], device), 0)
        .square()
        .mean();
    let grads = GradientsParams::from_grads(loss.backward(), &model);
    optim.step(0.1, model, grads)
}

fn train(mut model: Net, device: &Device) -> Net {
    let mut optim = AdamWConfig::new().init();
    for batch in 0..10 {
        model = step(&mut optim, model, batch, device);
    }
    model
}

/// Ten steps: adapters, and the weights under them, which stay.
fn trains_as_on_one_device(mesh: &DeviceMesh) -> Result<()> {
    let model = adapted();
    let device = mesh.device().clone().autodiff();
    let plain = on_device(&model, &device);
    let expected = train(plain.clone(), &device);
    let sharded = train(fully_shard(plain.clone(), mesh, config())?, &device);
    let full = full_model(&sharded)?;
    let adapter = |net: &Net| net.blocks[1].weight.adapter().expect("burn's own").scale;
    assert_eq!((adapter(&full), adapter(&plain)), (1.5, 1.5));
    let (trained, expected) = (values(&full, None), values(&expected, None));
    let diff = max_diff(&trained, &expected);
    assert!(diff < 1e-5, "{diff} apart");
    let begun = values(&plain, None);
    for (path, trained) in &trained {
        // `spare` is not run.
        let is_trained = path.contains(".lora.") && !path.starts_with("spare");
        assert_eq!(
            is_trained,
            *trained != begun[path],
            "{path}: adapters are trained, and nothing else"
        );
    }
    assert!(trained.contains_key("first.weight.lora.a"));
    // What is computed with, too.
    let weight = full.first.weight.val().into_data();
    assert_eq!(sharded.first.weight.val().into_data(), weight);
    assert_ne!(full.first.weight.base().into_data(), weight);
    Ok(())
}

mesh_test!(
    adapters_train_over_sharded_weights,
    [2, 2],
    ["replicate", "shard"],
    trains_as_on_one_device
);

#[test]
fn adapters_train_over_weights_sharded_on_any_number_of_ranks() {
    for ranks in [1, 2, 3, 4, 8] {
        MeshTest::new([ranks], ["shard"]).run(trains_as_on_one_device);
    }
}

#[test]
fn adapters_move_with_their_weights_under_burns_paths() {
    let model = adapted();
    MeshTest::new([2], ["shard"]).run(|mesh| {
        let device = mesh.device().clone().autodiff();
        let sharded = fully_shard(on_device(&model, &device), mesh, config())?;
        let named = named_parameters(&sharded)?;
        for path in [
            "blocks.1.weight",
            "blocks.1.weight.lora.a",
            "blocks.1.weight.lora.b",
        ] {
            let param = named
                .iter()
                .find(|param| param.path == path)
                .expect("it is sharded");
            assert_eq!(
                (&*param.unit, param.spec.placements()),
                ("blocks.1", &[Placement::Shard(0)][..])
            );
        }
        assert_eq!(named.len(), values(&model, None).len());
        assert_eq!(describe(&sharded).global_count(), model.num_params());
        let rows = if mesh.rank() == 0 { 3 } else { 2 };
        assert_eq!(sharded.blocks[1].weight.base().dims(), [rows, WIDTH]);
        let ledger = mesh.world().ledger();
        ledger.reset();
        let loss = with_units(&sharded, tensor(1, [4, WIDTH], &device), 0)
            .square()
            .mean();
        // The root and three blocks; `spare` is not run.
        assert_eq!(
            (ledger.calls(Op::AllGather), ledger.calls(Op::ReduceScatter)),
            (4, 0)
        );
        let grads = GradientsParams::from_grads(loss.backward(), &sharded);
        assert_eq!(ledger.calls(Op::ReduceScatter), 4);
        assert_eq!(grads.len(), 2 * 4, "of adapters alone");
        Ok(())
    });
}

#[test]
fn what_is_done_to_a_model_is_done_to_its_adapters() {
    let model = adapted();
    MeshTest::new([3], ["shard"]).run(|mesh| {
        let device = mesh.device().clone().autodiff();
        let plain = on_device(&model, &device);
        let sharded = fully_shard(plain.clone(), mesh, config())?;
        let x = || tensor(1, [4, WIDTH], &device);
        let expected = with_units(&plain, x(), 0).into_data();
        assert_eq!(with_units(&sharded, x(), 0).into_data(), expected);
        let valid = sharded.valid();
        assert_eq!(with_units(&valid, x().inner(), 0).into_data(), expected);
        assert_eq!(with_units(&valid.train(), x(), 0).into_data(), expected);
        assert_eq!(
            with_units(&sharded.clone().fork(&device), x(), 0).into_data(),
            expected
        );
        // A record is the rank's own, adapters and all.
        let trained = train(sharded.clone(), &device);
        let loaded = sharded.load_record(trained.clone().into_record());
        assert_eq!(values(&loaded, None), values(&trained, None));
        let outputs = [&loaded, &trained].map(|model| with_units(model, x(), 0).into_data());
        assert_eq!(outputs[0], outputs[1]);
        // And the whole's is that of burn's model.
        let full = full_model(&trained)?;
        let complete = plain.load_record(full.clone().into_record());
        assert_eq!(values(&complete, None), values(&full, None));
        // On one rank, and sharded again.
        let on_one = full_model_on(&trained, 1)?;
        assert_eq!(
            on_one.map(|one| values(&one, None)),
            (mesh.rank() == 1).then(|| values(&full, None))
        );
        let again = fully_shard(full.clone(), mesh, config())?;
        assert_eq!(values(&full_model(&again)?, None), values(&full, None));
        let moved = remesh(trained, &DeviceMesh::new(mesh.world(), [3], ["again"])?)?;
        assert_eq!(values(&full_model(&moved)?, None), values(&full, None));
        let next =
            [moved, again].map(|model| step(&mut AdamWConfig::new().init(), model, 20, &device));
        let next = next.map(|model| full_model(&model).map(|model| values(&model, None)));
        let [a, b] = next;
        assert_eq!(a?, b?);
        Ok(())
    });
}

/// The way before, which still is one: of weights that are whole on every rank.
#[test]
fn adapters_are_sharded_and_trained_where_the_bases_are_ignored() {
    let model = adapted();
    MeshTest::new([2], ["shard"]).run(|mesh| {
        let device = mesh.device().clone().autodiff();
        let plain = on_device(&model, &device);
        // Of two the weight is sharded.
        let some = || config().with_ignored(["first.weight", "blocks.0.weight", "blocks.1.weight"]);
        for config in [config().with_ignored(["**.weight"]), some()] {
            let sharded = fully_shard(plain.clone(), mesh, config)?;
            let named = named_parameters(&sharded)?;
            let factor = named
                .iter()
                .find(|param| param.path == "blocks.1.weight.lora.a")
                .expect("it is sharded");
            assert_eq!(
                (&*factor.unit, factor.spec.placements()),
                ("blocks.1", &[Placement::Shard(0)][..])
            );
            assert_eq!(sharded.blocks[1].weight.base().dims(), [WIDTH, WIDTH]);
            let trained = full_model(&train(sharded, &device))?.materialize();
            let expected = train(plain.clone(), &device).materialize();
            let diff = max_diff(&values(&trained, None), &values(&expected, None));
            assert!(diff < 1e-5, "weights differ by {diff}");
        }
        Ok(())
    });
}

#[test]
fn mixed_precision_computes_adapters_in_it_too() {
    let model = adapted();
    MeshTest::new([2], ["shard"]).run(|mesh| {
        let device = mesh.device().clone().autodiff();
        let policy = MixedPrecisionPolicy::new().with_param_dtype(DType::BF16);
        let sharded = fully_shard(
            on_device(&model, &device),
            mesh,
            config().with_mixed_precision(policy),
        )?;
        let expected = with_units(
            &on_device(&model, &device),
            tensor(1, [4, WIDTH], &device),
            0,
        );
        let output = with_units(&sharded, tensor(1, [4, WIDTH], &device), 0);
        assert_eq!(output.dtype(), DType::BF16);
        let output = output.cast(DType::F32);
        let diff = (output - expected).abs().max().into_scalar::<f32>();
        assert!(0.0 < diff && diff < 0.05, "{diff} apart");
        Ok(())
    });
}

#[test]
fn tensor_parallel_weights_take_merged_adapters() {
    let model = adapted();
    MeshTest::new([2], ["tp"]).run(|mesh| {
        let error =
            parallelize(model.clone(), mesh, Plan::new()).expect_err("it places no adapters");
        assert!(
            error.to_string().contains("`model.materialize()`"),
            "{error}"
        );
        let sharded = fully_shard(model.clone(), mesh, config())?;
        let error = parallelize(sharded, mesh, Plan::new()).expect_err("nor sharded ones");
        assert!(
            matches!(error, Error::Param(ParamError::Reparameterized { .. })),
            "{error}"
        );
        let merged = model.clone().materialize();
        let complete = full_model(&parallelize(merged.clone(), mesh, Plan::new())?)?;
        assert_eq!(values(&complete, None), values(&merged, None));
        Ok(())
    });
}

/// burn gives a parameter back the reparameterization it had.
#[test]
fn adapters_applied_to_a_sharded_model_are_dropped_by_burn() {
    let model = net(&Device::flex());
    MeshTest::new([2], ["shard"]).run(|mesh| {
        let sharded = fully_shard(model.clone(), mesh, config())?.apply_lora(Lora::new(2, 4.0));
        assert!(
            named_parameters(&sharded)?
                .iter()
                .all(|param| !param.path.contains("lora"))
        );
        assert_eq!(values(&full_model(&sharded)?, None), values(&model, None));
        Ok(())
    });
}

/// A user's own: rows, scaled.
#[derive(Module, Debug)]
struct Scaled {
    scale: Param<Tensor<1>>,
}

impl Reparameterization for Scaled {
    const NAME: &'static str = "scaled";

    fn apply<const D: usize>(&self, base: Tensor<D>) -> Tensor<D> {
        base * self.scale.val().reshape(Shape::from(vec![1; D]))
    }
}

/// Attaches it to the matrices that have this in their paths.
struct Scale(&'static str);

impl Reparameterizer for Scale {
    type Reparam = Scaled;

    fn reparameterize<const D: usize>(
        &mut self,
        path: &str,
        param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Option<Scaled>) {
        let scale = || Scaled {
            scale: Param::from_tensor(Tensor::full([1], 1.5, &param.lazy_device())),
        };
        let scaled = (D == 2 && path.contains(self.0)).then(scale);
        (param, scaled)
    }
}

/// Writes into the configuration what each error says, until there is none.
fn advised(model: &Net, mesh: &DeviceMesh) -> Result<(FullyShard, usize)> {
    let (mut config, mut errors) = (config(), 0);
    loop {
        let error = match fully_shard(model.clone(), mesh, config.clone()) {
            Ok(_) => return Ok((config, errors)),
            Err(error @ Error::Param(ParamError::Reparameterized { .. })) => error.to_string(),
            Err(error) => return Err(error),
        };
        let advice = error
            .split_once(".with_ignored([\"")
            .and_then(|(_, rest)| rest.split_once("\"])"));
        config = config.with_ignored([advice.expect("the error says what to ignore").0]);
        errors += 1;
    }
}

#[test]
fn other_reparameterizations_say_what_to_do_and_train_then() {
    MeshTest::new([2], ["shard"]).run(|mesh| {
        let device = mesh.device().clone().autodiff();
        let plain =
            on_device(&net(&Device::flex()), &device).apply_reparameterization(Scale("blocks"));
        let plain = Net {
            blocks: plain.blocks.into_iter().map(frozen_base).collect(),
            ..plain
        };
        let (config, errors) = advised(&plain, mesh)?;
        assert_eq!(errors, 3, "one for each weight");
        let trained = full_model(&train(fully_shard(plain.clone(), mesh, config)?, &device))?;
        let expected = train(plain, &device).materialize();
        let diff = max_diff(&values(&trained, None), &values(&expected, None));
        assert!(diff < 1e-5, "weights differ by {diff}");
        Ok(())
    });
}

/// Each rank keeps an ignored weight to itself: it must not be trained.
fn frozen_base(layer: Linear) -> Linear {
    struct Freeze;
    impl ModuleMapper for Freeze {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            let trained = D != 2;
            param.set_require_grad(trained)
        }
    }
    layer.map(&mut Freeze)
}

#[test]
fn adapters_next_to_what_burn_hides_are_refused_with_the_remedy() {
    let model = adapted();
    MeshTest::new([2], ["shard"]).run(|mesh| {
        let refused = |model: Net, config: FullyShard| {
            let error =
                fully_shard(model, mesh, config).expect_err("what else there is would be lost");
            let text = error.to_string();
            let Error::Param(ParamError::AdapterConflict { param, other, name }) = error else {
                panic!("{text}")
            };
            assert!(
                text.contains(&format!(".with_ignored([\"{param}\"])"))
                    && text.contains("in one call"),
                "{text}"
            );
            (param, other, name)
        };
        // Of burn's adapters on some weights, and something else on others.
        let spare = net(mesh.device()).spare.apply_reparameterization(Scale(""));
        let mixed = Net {
            spare,
            ..model.clone()
        };
        let (param, other, name) = refused(mixed, config().with_ignored(["spare.weight"]));
        assert_eq!(
            [param.as_str(), &other, &name],
            ["first.weight", "spare.weight", "scaled"]
        );
        let block = fully_shard(model.blocks[0].clone(), mesh, FullyShard::new())?;
        let inner = Net {
            blocks: vec![block],
            ..model.clone()
        };
        let (_, other, name) = refused(inner, FullyShard::new());
        assert!(
            other.starts_with("blocks.0") && name == "distributed",
            "{other} {name}"
        );
        // Packed weights have no rows to cut.
        let quantizer = burn::module::Quantizer::new(
            Calibration::MinMax,
            mesh.device().settings().quantization.scheme,
        );
        let packed =
            net(mesh.device()).apply_qlora(burn::module::QLora::new(Lora::new(2, 3.0), quantizer));
        let error = fully_shard(packed, mesh, config()).expect_err("it is quantized");
        assert!(
            matches!(error, Error::Param(ParamError::Reparameterized { .. })),
            "{error}"
        );
        Ok(())
    });
}
