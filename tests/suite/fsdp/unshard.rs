//! What is gathered when: ahead, in part, and by a few ranks for backward.

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::{GradientsParams, SgdConfig};
use burn::tensor::{Device, Tensor};
use burn_dtensor::Error;
use burn_dtensor::comm::{CommError, Launch, Op, Phase, launch};
use burn_dtensor::fsdp::ParamError;
use burn_dtensor::fsdp::{
    FsdpModule, FullyShard, ReshardAfterForward, full_model, fully_shard, reshard, unit, unshard,
};

use super::net::{Net, WIDTH, config, mesh, net, with_units};
use super::support::{Holder, Shift, furthest, max_diff, on_device, tensor, values};

#[test]
fn unshard_prefetches_and_reshard_frees() {
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
        assert_eq!(
            output.into_data(),
            with_units(&plain, x.clone(), 0).into_data()
        );
        assert_eq!(
            gathers(),
            4,
            "the root and the third block gather; the others were"
        );
        unshard(&sharded.blocks[0])?.wait()?;
        reshard(&sharded.blocks[0])?;
        let _ = unit(&sharded.blocks[0], x.clone(), |block, x| block.forward(x));
        assert_eq!(gathers(), 6, "what was let go is gathered again");
        // A step makes what was gathered stale.
        unshard(&sharded.blocks[0])?.wait()?;
        let stepped = sharded.clone().map(&mut Shift);
        let output = unit(&stepped.blocks[0], x.clone(), |block, x| block.forward(x));
        assert_eq!(
            output.into_data(),
            plain.map(&mut Shift).blocks[0].forward(x).into_data()
        );
        assert!(matches!(
            unshard(&model),
            Err(Error::Param(ParamError::NotSharded))
        ));
        Ok(())
    })
    .unwrap();
}

/// Rank 1 joins the all-gather only once rank 0 has seen that it is pending.
#[test]
fn wait_returns_when_nothing_is_pending() {
    let (seen, is_seen) = std::sync::mpsc::channel();
    let is_seen = std::sync::Mutex::new(is_seen);
    launch(Launch::threads(2), |world| {
        let device = world.device().clone().autodiff();
        let sharded = fully_shard(
            on_device(&net(&Device::flex()), &device),
            &mesh(world)?,
            config(),
        )?;
        let block = FsdpModule::of(&sharded.blocks[0])?.own();
        if world.rank() == 1 {
            is_seen.lock().unwrap().recv().unwrap();
        }
        let handle = unshard(&sharded.blocks[0])?;
        if world.rank() == 0 {
            let is_there = block.is_prefetched();
            seen.send(()).unwrap();
            assert!(!is_there, "rank 1 has not called yet");
        }
        handle.wait()?;
        assert!(block.is_prefetched());
        Ok(())
    })
    .unwrap();
}

#[test]
fn wait_fails_where_another_rank_never_comes() {
    let ends = launch(Launch::threads(2), |world| {
        let device = world.device().clone().autodiff();
        let sharded = fully_shard(
            on_device(&net(&Device::flex()), &device),
            &mesh(world)?,
            config(),
        )?;
        if world.rank() == 0 {
            unshard(&sharded.blocks[0])?.wait()?;
        }
        Ok(())
    });
    let error = ends.expect_err("rank 1 has returned, and rank 0 waits for it");
    assert!(
        matches!(
            error.cause,
            Error::Comm(CommError::RankReturned { rank: 1, .. })
        ),
        "{error}"
    );
}

/// Between two passes of the root a unit inside it has a forward, a backward and a step of its own:
/// that trains the unit alone, and the root's next pass computes with what the step has made.
#[test]
fn a_unit_trains_alone_between_passes_of_the_root() {
    const RANKS: usize = 3;
    let model = net(&Device::flex());
    for reshard in [
        ReshardAfterForward::Always,
        ReshardAfterForward::Auto,
        ReshardAfterForward::Never,
    ] {
        launch(Launch::threads(RANKS), |world| {
            let device = world.device().clone().autodiff();
            let mut plain = on_device(&model, &device);
            let mut sharded = fully_shard(
                plain.clone(),
                &mesh(world)?,
                config().with_reshard_after_forward(reshard),
            )?;
            let mut optims = [0, 1].map(|_| SgdConfig::new().init());
            let batch = |rank: usize| tensor::<2>(rank as u64 + 1, [4, WIDTH], &device);
            let x = || batch(world.rank());
            let block = |net: &Net, x: Tensor<2>| {
                unit(&net.blocks[1], x, |block, x| block.forward(x).tanh())
                    .square()
                    .sum()
            };
            let root = |net: &Net, x: Tensor<2>| with_units(net, x, 0).square().sum();
            type Loss<'a> = &'a dyn Fn(&Net, Tensor<2>) -> Tensor<1>;
            for loss in [&block as Loss, &root, &block] {
                let output = |net: &Net| {
                    with_units(net, x(), 0)
                        .into_data()
                        .try_to_vec::<f32>()
                        .unwrap()
                };
                assert!(
                    furthest(&output(&sharded), &output(&plain)) < 1e-5,
                    "{reshard:?}: before the step"
                );
                // The mean over ranks, as one device has it that sees all batches.
                let all = (0..RANKS)
                    .map(|rank| loss(&plain, batch(rank)))
                    .reduce(|a, b| a + b)
                    .expect("some ranks");
                let expected = GradientsParams::from_grads((all / RANKS as f32).backward(), &plain);
                let grads = GradientsParams::from_grads(loss(&sharded, x()).backward(), &sharded);
                assert_eq!(
                    grads.len(),
                    expected.len(),
                    "gradients of what the loss has read, and of nothing else"
                );
                let before = full_model(&sharded)?;
                sharded = optims[0].step(0.5, sharded, grads);
                plain = optims[1].step(0.5, plain, expected);
                let found = values(&full_model(&sharded)?, None);
                let diff = max_diff(&found, &values(&plain, None));
                assert!(diff < 1e-5, "{reshard:?}: weights differ by {diff}");
                assert!(
                    max_diff(&found, &values(&before, None)) > 1e-2,
                    "{reshard:?}: the step has changed nothing"
                );
                assert!(
                    furthest(&output(&sharded), &output(&plain)) < 1e-5,
                    "{reshard:?}: after the step"
                );
            }
            Ok(())
        })
        .unwrap();
    }
}

#[test]
fn part_of_a_unit_can_be_gathered() {
    let model = net(&Device::flex());
    launch(Launch::threads(2), |world| {
        let plain = on_device(&model, &world.device().clone().autodiff());
        let sharded = fully_shard(plain.clone(), &mesh(world)?, FullyShard::new())?;
        let spare = full_model(&sharded.spare)?;
        assert_eq!(
            spare.weight.val().into_data(),
            plain.spare.weight.val().into_data()
        );
        Ok(())
    })
    .unwrap();
}

/// A weight of one column and a bias of one element, which most ranks have no part of: backward
/// gathers them among two of the four ranks.
#[test]
fn a_dimension_of_one_is_kept_by_a_few_ranks() {
    const RANKS: usize = 4;
    let model = LinearConfig::new(WIDTH, 1).init(&Device::flex());
    launch(Launch::threads(RANKS), |world| {
        let device = world.device().clone().autodiff();
        let plain = on_device(&model, &device);
        let few = FullyShard::new().with_reshard_after_forward(ReshardAfterForward::Ranks(2));
        let sharded = fully_shard(plain.clone(), &mesh(world)?, few)?;
        let loss = |linear: &Linear, rank: usize| {
            let x = tensor(rank as u64 + 1, [4, WIDTH], &device).require_grad();
            let scaled = |linear: &Linear, x: Tensor<2>| {
                linear.forward(x) * linear.bias.as_ref().unwrap().val().unsqueeze()
            };
            unit(linear, x, scaled).square().sum()
        };
        world.ledger().reset();
        let loss_of_rank = loss(&sharded, world.rank());
        let mut grads = GradientsParams::from_grads(loss_of_rank.backward(), &sharded);
        let gathers = world
            .ledger()
            .recent()
            .into_iter()
            .filter(|entry| entry.op == Op::AllGather);
        let gathers: Vec<_> = gathers
            .map(|entry| (entry.phase, entry.group_size))
            .collect();
        assert_eq!(gathers, [(Phase::Forward, RANKS), (Phase::Backward, 2)]);
        assert_eq!(grads.len(), 2);
        let all = (0..RANKS)
            .map(|rank| loss(&plain, rank))
            .reduce(|a, b| a + b)
            .expect("some ranks");
        let expected = GradientsParams::from_grads((all / RANKS as f32).backward(), &plain);
        let found = values(&full_model(&sharded.map(&mut Holder(&mut grads)))?, None);
        let diff = max_diff(&found, &values(&plain, Some(&expected)));
        assert!(diff < 1e-5, "gradients differ by {diff}");
        Ok(())
    })
    .unwrap();
}
