//! A rank's device, and tensors on others.

use burn::tensor::{Device, Tensor};
use burn_dtensor::comm::{Launch, ReduceOp, launch};
use burn_dtensor::mesh::DeviceMesh;
use burn_dtensor::testing::MeshTest;

use super::wgpu;

#[test]
fn a_tensor_on_another_device_is_an_error_that_names_both() {
    let failure = MeshTest::new([2], ["shard"]).device(wgpu()).run_failing(|mesh| {
        let elsewhere = mesh.world().rank() == 1;
        let device = if elsewhere { Device::flex() } else { mesh.device().clone() };
        mesh.all_reduce(Tensor::<1>::ones([3], &device), ReduceOp::Sum)
    });
    let text = failure.to_string();
    assert!(["rank 1", "tensor 0", "Flex", "Wgpu", "Launch::devices"].iter().all(|word| text.contains(word)), "{text}");
}

#[test]
fn each_rank_may_have_a_device_of_its_own() {
    let devices = [Device::flex(), wgpu(), wgpu()];
    let config = Launch::threads(3).devices(devices.clone());
    let sums = launch(config, |world| {
        assert_eq!(*world.device(), devices[world.rank()]);
        let mesh = DeviceMesh::new(world, [3], ["shard"])?;
        let own = Tensor::<1>::from_data([1.0, world.rank() as f32], world.device());
        let sum = mesh.all_reduce(own, ReduceOp::Sum)?;
        assert_eq!(sum.device(), *world.device());
        Ok(sum.into_data().try_to_vec::<f32>().unwrap())
    });
    assert_eq!(sums.unwrap(), [[3.0, 3.0]; 3]);
}

#[test]
#[should_panic(expected = "2 devices for 3 ranks: give each rank one")]
fn devices_are_one_for_each_rank() {
    let _ = Launch::threads(3).devices([Device::flex(), wgpu()]);
}
