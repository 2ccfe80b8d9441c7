//! What is gathered when: ahead, in part, and by a few ranks for backward.

use burn::module::Module;
use burn::nn::LinearConfig;
use burn::optim::GradientsParams;
use burn::tensor::Device;
use burn_dtensor::Error;
use burn_dtensor::comm::{Launch, Op, launch};
use burn_dtensor::fsdp::{FullyShard, ReshardAfterForward, full_model, fully_shard, reshard, unit, unshard};
use burn_dtensor::param::ParamError;

use super::net::{WIDTH, config, mesh, net, with_units};
use super::support::{Shift, on_device, tensor};

#[test]
fn unshard_gathers_ahead_and_reshard_lets_go() {
    let model = net(&Device::flex());
    launch(Launch::threads(2), |world| {
        let device = world.device().clone().autodiff();
        let plain = on_device(&model, &device);
        let sharded = fully_shard(plain.clone(), &mesh(world)?, config())?;
        let gathers = || world.ledger().calls(Op::AllGather);
        world.ledger().reset();
        unshard(&sharded.blocks[0])?.wait()?;
        let pending = unshard(&sharded.blocks[1])?;
        drop(pending);
        assert_eq!(gathers(), 2);
        let x = tensor(1, [4, WIDTH], &device);
        let output = with_units(&sharded, x.clone(), 0);
        assert_eq!(output.into_data(), with_units(&plain, x.clone(), 0).into_data());
        assert_eq!(gathers(), 4, "the root and the third block gather; the others were");
        unshard(&sharded.blocks[0])?.wait()?;
        reshard(&sharded.blocks[0])?;
        let _ = unit(&sharded.blocks[0], x.clone(), |block, x| block.forward(x));
        assert_eq!(gathers(), 6, "what was let go is gathered again");
        // A step makes what was gathered stale.
        unshard(&sharded.blocks[0])?.wait()?;
        let stepped = sharded.clone().map(&mut Shift);
        let output = unit(&stepped.blocks[0], x.clone(), |block, x| block.forward(x));
        assert_eq!(output.into_data(), plain.map(&mut Shift).blocks[0].forward(x).into_data());
        assert!(matches!(unshard(&model), Err(Error::Param(ParamError::NotSharded))));
        Ok(())
    })
    .unwrap();
}

#[test]
fn part_of_a_unit_can_be_gathered() {
    let model = net(&Device::flex());
    launch(Launch::threads(2), |world| {
        let plain = on_device(&model, &world.device().clone().autodiff());
        let sharded = fully_shard(plain.clone(), &mesh(world)?, FullyShard::new())?;
        let spare = full_model(&sharded.spare)?;
        assert_eq!(spare.weight.val().into_data(), plain.spare.weight.val().into_data());
        Ok(())
    })
    .unwrap();
}

#[test]
fn a_dimension_of_one_is_kept_by_a_few_ranks() {
    launch(Launch::threads(4), |world| {
        let device = world.device().clone().autodiff();
        let plain = on_device(&LinearConfig::new(WIDTH, 1).init(&device), &device);
        let few = FullyShard::new().reshard_after_forward(ReshardAfterForward::Ranks(2));
        let sharded = fully_shard(plain, &mesh(world)?, few)?;
        let x = tensor(1, [4, WIDTH], &device);
        let output = unit(&sharded, x, |linear, x| linear.forward(x) * linear.bias.as_ref().unwrap().val().unsqueeze());
        let grads = GradientsParams::from_grads(output.sum().backward(), &sharded);
        assert_eq!(grads.len(), 2);
        Ok(())
    })
    .unwrap();
}
