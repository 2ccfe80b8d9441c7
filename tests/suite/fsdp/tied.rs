//! Tied weights: within a unit, across units, and clones of one parameter.

use burn::optim::GradientsParams;
use burn::tensor::Device;
use burn_dtensor::Error;
use burn_dtensor::comm::{Launch, launch};
use burn_dtensor::fsdp::{FullyShard, ParamError, ParamExt, fully_shard};
use burn_dtensor::parallel::{Plan, parallelize};

use super::module_reuse::{Use, trains_as_on_one_device};
use super::params_outside_unit::{Net, WIDTH, config, mesh, net};
use super::support::{on_device, tensor};

#[test]
fn clones_of_one_parameter_are_refused() {
    let model = net(&Device::flex());
    launch(Launch::threads(2), |world| {
        let tied = || Net {
            blocks: vec![model.first.clone(), model.blocks[0].clone()],
            ..model.clone()
        };
        let configs = [
            FullyShard::new(),
            config(),
            FullyShard::new().with_ignored(["first.*"]),
        ];
        let sharded = configs.map(|config| fully_shard(tied(), &mesh(world)?, config));
        for refused in sharded
            .into_iter()
            .chain([parallelize(tied(), &mesh(world)?, Plan::new())])
        {
            let error = refused.map(|_| ()).unwrap_err();
            let Error::Param(ParamError::Tied { param, other }) = &error else {
                panic!("{error}")
            };
            assert_eq!(
                (param.as_str(), other.as_str()),
                ("first.weight", "blocks.0.weight")
            );
        }
        // Left to burn altogether: one leaf, of whose gradient the optimizer sees all.
        let device = world.device().clone().autodiff();
        let grad = |net: &Net| {
            let x = tensor(1, [3, WIDTH], &device);
            let y = net.first.forward(x.clone()) * 2.0 + net.blocks[0].forward(x);
            GradientsParams::from_grads(y.square().mean().backward(), net)
                .get::<2>(net.first.weight.id)
        };
        let plain = on_device(&tied(), &device);
        let full = Net {
            blocks: vec![plain.first.clone(), plain.blocks[1].clone()],
            ..plain
        };
        let ignored = fully_shard(
            full.clone(),
            &mesh(world)?,
            FullyShard::new().with_ignored(["first.*", "blocks.0.*"]),
        )?;
        assert!(ignored.blocks[1].weight.shard().is_some());
        assert_eq!(
            grad(&ignored).unwrap().into_data(),
            grad(&full).unwrap().into_data()
        );
        Ok(())
    })
    .unwrap();
}

#[test]
fn a_weight_tied_across_units_trains_as_on_one_device() {
    trains_as_on_one_device(Use::Tied);
}
