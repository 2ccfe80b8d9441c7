//! Parameters that `with_ignored` leaves out of every unit.

use std::time::Duration;

use burn::optim::GradientsParams;
use burn::tensor::Device;
use burn_dtensor::comm::{Launch, launch};
use burn_dtensor::fsdp::{ParamExt, fully_shard, unit};

use super::net::{WIDTH, config, mesh, net};
use super::params_outside_unit;
use super::support::on_device;

#[test]
fn ignored_parameters_stay_as_they_are() {
    let model = net(&Device::flex());
    launch(Launch::threads(2), |world| {
        let model = on_device(&model, &world.device().clone().autodiff());
        let sharded = fully_shard(model, &mesh(world)?, config().with_ignored(["spare.*"]))?;
        assert!(sharded.spare.weight.shard().is_none());
        assert_eq!(sharded.spare.weight.base().dims(), [WIDTH, WIDTH]);
        assert!(sharded.first.weight.shard().is_some());
        Ok(())
    })
    .unwrap();
}

/// Made before `launch`, an ignored parameter would be one leaf of one graph for all ranks.
#[test]
fn ranks_share_no_leaf_of_an_ignored_parameter() {
    let device = Device::flex().autodiff();
    let model = on_device(&params_outside_unit::net(&device), &device);
    let outcome = launch(
        Launch::threads(2).with_deadline(Duration::from_secs(20)),
        |world| {
            let config = params_outside_unit::config().with_ignored(["first.*"]);
            let net = fully_shard(model.clone(), &mesh(world)?, config)?;
            for _ in 0..20 {
                let y = unit(
                    &net.blocks[0],
                    net.first.forward(params_outside_unit::x(world)),
                    |block, x| block.forward(x),
                );
                let grads = GradientsParams::from_grads(y.sum().backward(), &net);
                assert_eq!(grads.len(), 4);
            }
            Ok(())
        },
    );
    outcome.unwrap();
}
