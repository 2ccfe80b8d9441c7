//! `fully_shard` of a model with LoRA adapters, as its error advises.

use burn::module::{Lora, Module};
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::Device;
use burn_dtensor::param::ParamError;
use burn_dtensor::prelude::*;
use burn_dtensor::testing::MeshTest;

use super::net::{Net, WIDTH, config, net, with_units};
use super::support::{max_diff, on_device, tensor, values};

/// A net whose weights have adapters that do something.
fn adapted() -> Net {
    let device = Device::flex();
    let model = net(&device).apply_lora(Lora::new(2, 4.0));
    let _ = values(&model, None);
    model
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
        let advice = error.split_once(".ignore([\"").and_then(|(_, rest)| rest.split_once("\"])"));
        config = config.ignore([advice.expect("the error says what to ignore").0]);
        errors += 1;
    }
}

fn train(mut model: Net, device: &Device) -> Net {
    let mut optim = AdamWConfig::new().init();
    for step in 0..4 {
        let loss = with_units(&model, tensor(step, [4, WIDTH], device), 0).square().mean();
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        model = optim.step(0.1, model, grads);
    }
    model
}

#[test]
fn adapters_are_sharded_and_trained_where_the_bases_are_ignored() {
    let model = adapted();
    MeshTest::new([2], ["shard"]).run(|mesh| {
        let device = mesh.device().clone().autodiff();
        let plain = on_device(&model, &device);
        let (config, errors) = advised(&plain, mesh)?;
        assert_eq!(errors, 5, "one for each weight");
        let sharded = fully_shard(plain.clone(), mesh, config)?;
        let named = named_parameters(&sharded)?;
        let factor = named.iter().find(|param| param.path == "blocks.1.weight.lora.a").expect("it is sharded");
        assert_eq!((&*factor.unit, factor.spec.placements()), ("blocks.1", &[Placement::Shard(0)][..]));
        assert_eq!(sharded.blocks[1].weight.base().dims(), [WIDTH, WIDTH]);

        let (trained, expected) = (full_model(&train(sharded, &device))?, train(plain.clone(), &device).materialize());
        let (trained, expected) = (values(&trained, None), values(&expected, None));
        let diff = max_diff(&trained, &expected);
        assert!(diff < 1e-6, "weights differ by {diff}");
        assert!(max_diff(&trained, &values(&plain.materialize(), None)) > 1e-2, "it has trained");
        Ok(())
    });
}

/// The other remedy.
#[test]
fn merged_adapters_are_no_obstacle() {
    let model = adapted();
    MeshTest::new([2], ["shard"]).run(|mesh| {
        for sharding in [true, false] {
            let place = |model: Net| match sharding {
                true => fully_shard(model, mesh, config()),
                false => parallelize(model, mesh, Plan::new()),
            };
            let error = place(model.clone()).expect_err("burn allows one reparameterization");
            assert!(error.to_string().contains("`model.materialize()`"), "{error}");
            let whole = full_model(&place(model.clone().materialize())?)?;
            assert_eq!(values(&whole, None), values(&model.clone().materialize(), None));
        }
        Ok(())
    });
}

/// burn gives a parameter back the reparameterization it had.
#[test]
fn adapters_applied_to_a_sharded_model_are_dropped_by_burn() {
    let model = net(&Device::flex());
    MeshTest::new([2], ["shard"]).run(|mesh| {
        let sharded = fully_shard(model.clone(), mesh, config())?.apply_lora(Lora::new(2, 4.0));
        assert!(named_parameters(&sharded)?.iter().all(|param| !param.path.contains("lora")));
        assert_eq!(values(&full_model(&sharded)?, None), values(&model, None));
        Ok(())
    });
}
