//! Ranks that share a GPU write to tensors in place while others read them.

use burn::nn::LinearConfig;
use burn::tensor::Tensor;
use burn_dtensor::checkpoint::StateDict;
use burn_dtensor::comm::ReduceOp;
use burn_dtensor::mesh::DeviceMesh;
use burn_dtensor::testing::gpu;

use super::run;

/// A read of another rank's tensor waits in a queue when the other writes to that tensor.
#[test]
fn a_later_write_in_place_does_not_change_what_others_have_read() {
    for round in 0..4 {
        let found = run(2, &gpu(), |world| {
            let mut x = Tensor::<1>::full([1 << 12], world.rank() as f64 + 1.0, world.device());
            let sums = world
                .all()
                .all_reduce("sum".into(), vec![x.clone().into_dispatch()], ReduceOp::Sum)
                .wait()?;
            // Both have their results, of which nobody has read anything.
            world.barrier("both")?;
            if world.rank() == round % 2 {
                x = x * 100.0;
                assert_eq!(
                    x.into_data().iter::<f32>().next(),
                    Some((world.rank() as f32 + 1.0) * 100.0)
                );
            }
            world.barrier("written")?;
            let sum = Tensor::<1>::from_dispatch(sums.into_iter().next().expect("one tensor"));
            Ok(sum.into_data().iter::<f32>().collect::<Vec<_>>())
        });
        assert!(
            found.iter().flatten().all(|sum| *sum == 3.0),
            "{:?}",
            found.iter().map(|sums| sums[0]).collect::<Vec<_>>()
        );
    }
}

/// A message that was received, too, although the device has not read it yet.
#[test]
fn a_later_write_in_place_does_not_change_a_received_message() {
    let found = run(2, &gpu(), |world| {
        let mut x = Tensor::<1>::full([1 << 12], 3.0, world.device());
        let received = match world.rank() {
            0 => world
                .all()
                .send("x".into(), vec![x.clone().into_dispatch()], 1, 0)
                .wait()
                .map(|()| None)?,
            _ => Some(world.all().receive("x".into(), None, 0, 0).wait()?.tensors),
        };
        world.barrier("received")?;
        if world.rank() == 0 {
            x = x * 100.0;
            assert_eq!(x.into_data().iter::<f32>().next(), Some(300.0));
        }
        world.barrier("written")?;
        let tensor = received.into_iter().flatten().next();
        Ok(tensor.map(|tensor| {
            Tensor::<1>::from_dispatch(tensor)
                .into_data()
                .iter::<f32>()
                .collect::<Vec<_>>()
        }))
    });
    assert!(found.iter().flatten().flatten().all(|value| *value == 3.0));
    assert_eq!(found.iter().flatten().count(), 1);
}

/// The values of a state dict are those of the moment, although the model is written to in place
/// later.
#[test]
fn full_values_are_those_before_a_later_write() {
    run(1, &gpu(), |world| {
        let mesh = DeviceMesh::new(world, [1], ["shard"])?;
        let model = LinearConfig::new(64, 32)
            .with_bias(false)
            .init(world.device());
        let before = model
            .weight
            .val()
            .into_data()
            .iter::<f32>()
            .collect::<Vec<_>>();
        let full = StateDict::of_model(&model, &mesh)?.full()?;
        let written = model.weight.into_value() * 100.0;
        assert_ne!(
            written.into_data().iter::<f32>().collect::<Vec<_>>(),
            before
        );
        assert_eq!(full["weight"].iter::<f32>().collect::<Vec<_>>(), before);
        Ok(())
    });
}
