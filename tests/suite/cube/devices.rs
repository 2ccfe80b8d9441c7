//! A rank's device, and tensors on others.

use std::sync::LazyLock;

use burn::nn::{Linear, LinearConfig};
use burn::optim::GradientsParams;
use burn::tensor::{Device, Tensor};
use burn_dtensor::comm::{Launch, ReduceOp, launch};
use burn_dtensor::fsdp::{FullyShard, fully_shard, unit};
use burn_dtensor::mesh::DeviceMesh;
use burn_dtensor::testing::{MeshTest, gpu};

use super::{backend, rounding};
use crate::fsdp::support::{furthest, on_device, values};
use crate::launched;

#[test]
fn a_tensor_on_another_device_is_an_error_that_names_both() {
    let failure = MeshTest::new([2], ["shard"]).run_failing(|mesh| {
        let elsewhere = mesh.world().rank() == 1;
        let device = if elsewhere {
            gpu()
        } else {
            mesh.device().clone()
        };
        mesh.all_reduce(Tensor::<1>::ones([3], &device), ReduceOp::Sum)
    });
    let text = failure.to_string();
    assert!(
        [
            "rank 1",
            "tensor 0",
            "Flex",
            backend(),
            "Launch::with_devices"
        ]
        .iter()
        .all(|word| text.contains(word)),
        "{text}"
    );
}

#[test]
fn each_rank_may_have_a_device_of_its_own() {
    let devices = [Device::flex(), gpu(), gpu()];
    let config = Launch::threads(3).with_devices(devices.clone());
    let sums = launch(config, |world| {
        assert_eq!(*world.device(), devices[world.rank()]);
        let mesh = DeviceMesh::new(world, [3], ["shard"])?;
        let own = Tensor::<1>::from_data([1.0, world.rank() as f32], world.device());
        let sum = mesh.all_reduce(own, ReduceOp::Sum)?;
        assert_eq!(sum.device(), *world.device());
        Ok(sum.into_data().try_to_vec::<f32>().unwrap())
    });
    assert_eq!(launched::values(sums.unwrap()), [[3.0, 3.0]; 3]);
}

/// What one rank brings in a form that another device cannot read still meets.
#[test]
fn a_model_may_be_sharded_over_devices_of_two_backends() {
    let gradients = |devices: [Device; 3]| {
        let ranks = launch(Launch::threads(3).with_devices(devices), |world| {
            let mesh = DeviceMesh::new(world, [3], ["shard"])?;
            let device = world.device().clone().autodiff();
            let model = fully_shard(on_device(&*LAYER, &device), &mesh, FullyShard::new())?;
            let x = Tensor::<2>::ones([2, 5], &device) * (world.rank() + 1) as f32;
            let loss = unit(&model, x, |model, x| model.forward(x)).square().sum();
            let grads = GradientsParams::from_grads(loss.backward(), &model);
            Ok(values(&model, Some(&grads))
                .into_values()
                .flatten()
                .collect::<Vec<f32>>())
        });
        launched::values(ranks.unwrap())
    };
    let expected = gradients([Device::flex(), Device::flex(), Device::flex()]);
    let found = gradients([gpu(), Device::flex(), gpu()]);
    for (found, expected) in found.iter().zip(&expected) {
        assert!(
            furthest(found, expected) < rounding(1e-4),
            "{found:?} {expected:?}"
        );
    }
}

/// Drawn once: ranks that draw at once share the state of the generator.
static LAYER: LazyLock<Linear> = LazyLock::new(|| {
    let layer = LinearConfig::new(5, 4).init(&Device::flex());
    let _ = values(&layer, None);
    layer
});

#[test]
#[should_panic(expected = "2 devices for 3 ranks. Pass one device per rank")]
fn devices_are_one_for_each_rank() {
    let _ = Launch::threads(3).with_devices([Device::flex(), gpu()]);
}
