//! Weights in the scope of their unit, and those that leave it.

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::GradientsParams;
use burn::tensor::{Device, Int, Tensor, Tolerance};
use burn_dtensor::comm::{Launch, Op, launch};
use burn_dtensor::fsdp::{
    FullyShard, ReshardAfterForward, TensorTree, full_model, fully_shard, unit,
};
use burn_dtensor::placement::Placement;
use itertools::iproduct;

use super::net::{Net, WIDTH, compare, config, mesh, net};
use super::support::{Holder, Shift, max_diff, on_device, tensor, values};

#[test]
fn another_clones_shards_are_not_the_scopes() {
    let model = net(&Device::flex());
    launch(Launch::threads(2), |world| {
        let device = world.device().clone().autodiff();
        let plain = on_device(&model, &device);
        let sharded = fully_shard(plain.clone(), &mesh(world)?, config())?;
        let teacher = sharded.clone().map(&mut Shift);
        let x = tensor(1, [4, WIDTH], &device);
        // Read inside the student's scope, whose unit it shares.
        let output = unit(&sharded.blocks[0], x.clone(), |block, x| {
            let frozen = block.clone().no_grad();
            block.forward(x.clone()) + teacher.blocks[0].forward(x.clone()) + frozen.forward(x)
        });
        let shifted = plain.clone().map(&mut Shift);
        let student = plain.blocks[0].forward(x.clone());
        let expected = student.clone() + shifted.blocks[0].forward(x.clone()) + student;
        assert_eq!(output.clone().into_data(), expected.into_data());
        let grads = output.sum().backward();
        let grad = sharded.blocks[0]
            .bias
            .as_ref()
            .unwrap()
            .base()
            .grad(&grads)
            .expect("trained")
            .into_data();
        let rows: Vec<f32> = grad.try_to_vec().unwrap();
        assert!(
            rows.iter().all(|row| *row == 4.0),
            "the frozen clone adds nothing: {rows:?}"
        );
        Ok(())
    })
    .unwrap();
}

#[test]
fn a_weight_may_leave_its_unit_as_an_output() {
    let model = net(&Device::flex());
    launch(Launch::threads(2), |world| {
        let device = world.device().clone().autodiff();
        let plain = on_device(&model, &device);
        let always = config().with_reshard_after_forward(ReshardAfterForward::Always);
        let sharded = fully_shard(plain.clone(), &mesh(world)?, always)?;
        let kept = unit(&sharded.blocks[0], (), |block, ()| {
            block.weight.val().inner()
        });
        world.ledger().reset();
        let view = unit(&sharded.blocks[1], (), |block, ()| {
            block.weight.val().transpose()
        });
        let loss = (view.clone() * view).sum() + kept.clone().sum();
        assert_eq!(
            world.ledger().calls(Op::AllGather),
            1,
            "reading the output gathers nothing"
        );
        let grads = loss.backward();
        let grad = sharded.blocks[1]
            .weight
            .base()
            .grad(&grads)
            .expect("trained");
        assert_eq!(
            grad.into_data(),
            (sharded.blocks[1].weight.base().inner() * 2.0).into_data()
        );
        assert_eq!(kept.into_data(), plain.blocks[0].weight.val().into_data());
        Ok(())
    })
    .unwrap();
}

/// A copy: it neither waits for what the unit gathers for backward nor keeps it.
#[test]
fn a_frozen_weight_may_leave_its_unit_as_an_output() {
    let model = net(&Device::flex());
    launch(Launch::threads(2), |world| {
        let device = world.device().clone().autodiff();
        let always = config().with_reshard_after_forward(ReshardAfterForward::Always);
        let sharded = fully_shard(on_device(&model, &device), &mesh(world)?, always)?;
        let frozen = sharded.blocks[0].clone().no_grad();
        world.ledger().reset();
        let x = tensor(1, [3, WIDTH], &device).require_grad();
        let (y, weight) = unit(&frozen, x.clone(), |block, x| {
            (block.forward(x), block.weight.val())
        });
        assert!(!weight.is_tracked() && weight.is_autodiff());
        assert_eq!(weight.into_data(), model.blocks[0].weight.val().into_data());
        assert_eq!(
            world.ledger().calls(Op::AllGather),
            1,
            "reading it gathers nothing"
        );
        assert!(x.grad(&y.sum().backward()).is_some());
        assert_eq!(world.ledger().calls(Op::AllGather), 2);
        Ok(())
    })
    .unwrap();
}

/// Also of weights in no slot, which only the forward under way has.
#[test]
fn a_backward_inside_its_units_own_forward() {
    let model = LinearConfig::new(WIDTH, WIDTH).init(&Device::flex());
    launch(Launch::threads(2), |world| {
        for (placement, checkpointing) in
            iproduct!([Placement::Shard(0), Placement::Replicate], [false, true])
        {
            let device = world.device().clone().autodiff();
            let device = if checkpointing {
                device.gradient_checkpointing()
            } else {
                device
            };
            let plain = on_device(&model, &device);
            let always = FullyShard::new().with_reshard_after_forward(ReshardAfterForward::Always);
            let sharded = fully_shard(
                plain.clone(),
                &mesh(world)?,
                always.with_shard_placement_fn(move |_| Some(placement)),
            )?;
            let grads = |model: &Linear| {
                let x = tensor(1, [3, WIDTH], &device).require_grad();
                let mut grads = None;
                unit(model, x.clone(), |linear, x| {
                    let y = linear.forward(linear.forward(x).tanh());
                    grads = Some(y.square().mean().backward());
                });
                let mut grads = grads.expect("just made");
                let own = x.grad_remove(&mut grads).expect("tracked").into_data();
                (own, GradientsParams::from_grads(grads, model))
            };
            let ((found, mut shards), (expected, full)) = (grads(&sharded), grads(&plain));
            found.assert_approx_eq::<f32>(&expected, Tolerance::default());
            let found = values(&full_model(&sharded.map(&mut Holder(&mut shards)))?, None);
            assert!(
                max_diff(&found, &values(&plain, Some(&full))) < 1e-6,
                "{placement} {checkpointing}"
            );
        }
        Ok(())
    })
    .unwrap();
}

/// Tied to the graph wherever they are: the unit before is gathered again, and both are reduced.
#[test]
fn tensors_in_a_result_a_box_and_next_to_text_are_inputs_and_outputs() {
    fn forward(net: &Net, x: Tensor<2>, _: usize) -> Tensor<2> {
        unit(net, x, |net, x| {
            let x = unit(
                &net.blocks[0],
                (Box::new(x), "tanh", String::new()),
                |block, (x, name, _)| match name {
                    "tanh" => Ok(Box::new(block.forward(*x).tanh())),
                    other => Err(format!("no activation {other}")),
                },
            );
            net.first.forward(*x.expect("it is known")) * net.scale.val().unsqueeze()
        })
    }
    compare(
        2,
        |net| net,
        config().with_reshard_after_forward(ReshardAfterForward::Always),
        forward,
    );
}

#[test]
fn every_container_hands_out_the_floats_inside() {
    let device = Device::flex();
    let (float, index) = (
        || tensor(1, [2, 3], &device),
        || Tensor::<1, Int>::zeros([2], &device),
    );
    fn count<T: TensorTree>(container: T) -> usize {
        let mut count = 0;
        let _ = container.map_floats(&mut |tensor| {
            count += 1;
            tensor
        });
        count
    }
    assert_eq!(count(float()), 1);
    assert_eq!([count(Some(float())), count(None::<Tensor<2>>)], [1, 0]);
    assert_eq!(
        [
            count(Ok::<_, String>(float())),
            count(Err::<Tensor<2>, _>("none"))
        ],
        [1, 0]
    );
    assert_eq!(
        [
            count(Box::new(float())),
            count([float(), float()]),
            count(vec![float(); 3])
        ],
        [1, 2, 3]
    );
    assert_eq!(
        [
            count((float(), index(), "text", 3usize)),
            count((float(), (float(), Some(float()))))
        ],
        [1, 3]
    );
}
