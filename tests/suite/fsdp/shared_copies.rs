//! Unsharded copies of a unit's parameters: passes over the same shards share one, and a pass over
//! others has its own.

use std::collections::BTreeMap;

use burn::module::Module;
use burn::optim::GradientsParams;
use burn::tensor::{Device, Tensor};
use burn_dtensor::Result;
use burn_dtensor::comm::{Launch, Op, World, launch};
use burn_dtensor::fsdp::{FsdpModule, FullyShard, ReshardAfterForward, full_model, fully_shard};
use burn_dtensor::mesh::DeviceMesh;

use super::collective_counts::{BLOCKS, Stack, WIDTH, stack};
use super::support::{Holder, Shift, max_diff, on_device, tensor, values};

const UNITS: u64 = BLOCKS as u64 + 1;

type Grads = BTreeMap<String, Vec<f32>>;

fn loss(model: &Stack, seed: u64, device: &Device) -> Tensor<1> {
    model
        .forward(tensor(seed, [2, WIDTH], device))
        .square()
        .sum()
}

fn plain_grads(model: &Stack, loss: &Tensor<1>) -> Grads {
    values(
        model,
        Some(&GradientsParams::from_grads(loss.backward(), model)),
    )
}

fn sharded_grads(model: &Stack, loss: &Tensor<1>) -> Result<Grads> {
    let mut grads = GradientsParams::from_grads(loss.backward(), model);
    Ok(values(
        &full_model(&model.clone().map(&mut Holder(&mut grads)))?,
        None,
    ))
}

fn sharded(
    world: &World,
    plain: &Stack,
    reshard: ReshardAfterForward,
    stays: bool,
) -> Result<Stack> {
    let mesh = DeviceMesh::new(world, [world.size()], ["shard"])?;
    let config = FullyShard::new()
        .with_units(["blocks.*"])
        .with_reshard_after_forward(reshard);
    let model = fully_shard(plain.clone(), &mesh, config)?;
    FsdpModule::of(&model)?.set_reshard_after_backward(!stays);
    Ok(model)
}

/// All ranks have the same batch, so that the averaged gradients are those of one device.
fn assert_close(found: &Grads, expected: &Grads, case: &str) {
    let largest = expected
        .values()
        .flatten()
        .fold(1.0, |largest: f64, x| largest.max(f64::from(x.abs())));
    let diff = max_diff(found, expected);
    assert!(diff < 1e-5 * largest, "{case}: {diff} of {largest}");
}

#[test]
fn a_forward_after_a_step_has_its_own_copy_while_an_earlier_backward_is_pending() {
    let model = stack(&Device::flex());
    for reshard in [
        ReshardAfterForward::Never,
        ReshardAfterForward::Auto,
        ReshardAfterForward::Always,
    ] {
        for stays in [false, true] {
            launch(Launch::threads(2), |world| {
                let device = world.device().clone().autodiff();
                let plain = on_device(&model, &device);
                let stepped = plain.clone().map(&mut Shift);
                let expected = [
                    plain_grads(&plain, &loss(&plain, 1, &device)),
                    plain_grads(&stepped, &loss(&stepped, 2, &device)),
                ];

                let model = sharded(world, &plain, reshard, stays)?;
                let first = loss(&model, 1, &device);
                let stepped = model.clone().map(&mut Shift);
                let second = loss(&stepped, 2, &device);
                let case = format!("{reshard:?}, stays {stays}");
                assert_close(&sharded_grads(&stepped, &second)?, &expected[1], &case);
                assert_close(&sharded_grads(&model, &first)?, &expected[0], &case);
                Ok(())
            })
            .unwrap();
        }
    }
}

/// A teacher with other weights runs between two forwards of the student: the student's second
/// forward uses the copy of its first, and neither reads the other's.
#[test]
fn a_teacher_between_two_forwards_leaves_the_copy_to_the_student() {
    let model = stack(&Device::flex());
    launch(Launch::threads(2), |world| {
        let device = world.device().clone().autodiff();
        let plain = on_device(&model, &device);
        let other = plain.clone().map(&mut Shift);
        let expected = [1, 3].map(|seed| plain_grads(&plain, &loss(&plain, seed, &device)));
        let expected_teacher = plain_grads(&other, &loss(&other, 2, &device));

        let student = sharded(world, &plain, ReshardAfterForward::Never, true)?;
        let teacher = student.clone().map(&mut Shift);
        let gathers = || world.ledger().calls(Op::AllGather);
        world.ledger().reset();
        let first = loss(&student, 1, &device);
        assert_eq!(gathers(), UNITS);
        let between = loss(&teacher, 2, &device);
        assert_eq!(gathers(), 2 * UNITS, "the teacher has other shards");
        let second = loss(&student, 3, &device);
        assert_eq!(gathers(), 2 * UNITS, "the student's are there");
        assert_close(&sharded_grads(&student, &second)?, &expected[1], "second");
        assert_close(
            &sharded_grads(&teacher, &between)?,
            &expected_teacher,
            "teacher",
        );
        assert_close(&sharded_grads(&student, &first)?, &expected[0], "first");
        Ok(())
    })
    .unwrap();
}

/// One copy that several passes use is gathered once for all of them after it was freed by hand.
#[test]
fn a_copy_that_was_freed_by_hand_is_gathered_once_for_its_passes() {
    let model = stack(&Device::flex());
    launch(Launch::threads(2), |world| {
        let device = world.device().clone().autodiff();
        let plain = on_device(&model, &device);
        let expected = [1, 2].map(|seed| plain_grads(&plain, &loss(&plain, seed, &device)));
        let model = sharded(world, &plain, ReshardAfterForward::Never, true)?;
        let [first, second] = [1, 2].map(|seed| loss(&model, seed, &device));
        world.ledger().reset();
        FsdpModule::of(&model)?.reshard();
        let grads = GradientsParams::from_grads(second.backward(), &model);
        let other = GradientsParams::from_grads(first.backward(), &model);
        assert_eq!(world.ledger().calls(Op::AllGather), UNITS);
        for (mut grads, expected) in [(other, &expected[0]), (grads, &expected[1])] {
            assert_close(
                &values(
                    &full_model(&model.clone().map(&mut Holder(&mut grads)))?,
                    None,
                ),
                expected,
                "by hand",
            );
        }
        Ok(())
    })
    .unwrap();
}
