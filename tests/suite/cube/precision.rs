//! Units in mixed precision.

use burn::module::Param;
use burn::nn::Linear;
use burn::tensor::{DType, Device, Tensor, TensorData};
use burn_dtensor::comm::Op;
use burn_dtensor::fsdp::FsdpError;
use burn_dtensor::prelude::*;
use burn_dtensor::testing::gpu;

use super::run;

fn layer(device: &Device) -> Linear {
    let values = |count: usize| {
        (0..count)
            .map(|i| ((i * 37 % 23) as f32 - 11.0) / 23.0)
            .collect::<Vec<_>>()
    };
    let weight = Param::from_data(TensorData::new(values(35), [7, 5]), device);
    Linear {
        weight,
        bias: Some(Param::from_data(TensorData::new(values(5), [5]), device)),
    }
}

fn config(param: DType) -> FullyShard {
    let policy = MixedPrecisionPolicy::new()
        .with_param_dtype(param)
        .with_reduce_dtype(DType::F32)
        .with_output_dtype(DType::F32);
    FullyShard::new()
        .with_reshard_after_forward(ReshardAfterForward::Always)
        .with_mixed_precision(policy)
}

/// The output, the gradient of the whole weight, and what was launched for how many collectives.
fn step(param: DType, device: &Device) -> Vec<(Vec<f32>, Vec<f32>, u64, u64)> {
    run(2, device, |world| {
        let mesh = DeviceMesh::new(world, [2], ["shard"])?;
        let device = world.device().clone().autodiff();
        let layer = fully_shard(layer(&device), &mesh, config(param))?;
        world.ledger().reset();
        let x = Tensor::<2>::from_data([[0.5, -1.0, 2.0, 0.25, 1.5, -0.75, 1.0]; 2], &device);
        let output = unit(&layer, x, |layer, x| layer.forward(x));
        let grads = output.clone().square().sum().backward();
        let ledger = world.ledger();
        let collectives = ledger.calls(Op::AllGather) + ledger.calls(Op::ReduceScatter);
        let launches = ledger.copied().launches;
        let grad = layer.weight.full_grad(&grads)?.expect("a gradient");
        let floats = |x: Tensor<2>| x.into_data().iter::<f32>().collect::<Vec<_>>();
        Ok((floats(output), floats(grad), launches, collectives))
    })
}

/// Where the device has no such type, that is an error, before anything is placed.
#[test]
fn units_compute_in_the_types_that_the_device_has() {
    let mut computed = 0;
    for param in [DType::F32, DType::F16, DType::BF16, DType::F64] {
        if !gpu().supports_dtype(param) {
            run(2, &gpu(), |world| {
                let mesh = DeviceMesh::new(world, [2], ["shard"])?;
                let refused = fully_shard(layer(world.device()), &mesh, config(param)).map(|_| ());
                assert!(matches!(
                    refused,
                    Err(Error::Fsdp(FsdpError::DeviceElementType {
                        what: "param_dtype",
                        ..
                    }))
                ));
                Ok(())
            });
            continue;
        }
        computed += 1;
        for (found, expected) in step(param, &gpu())
            .into_iter()
            .zip(step(param, &Device::flex()))
        {
            let of = [(found.0, expected.0), (found.1, expected.1)];
            for (found, expected) in of
                .into_iter()
                .flat_map(|(found, expected)| found.into_iter().zip(expected))
            {
                let bound = 2e-2 * expected.abs().max(1.0);
                assert!(
                    (found - expected).abs() <= bound,
                    "{param:?}: {found} {expected}"
                );
            }
            // Two gathers, of which what backward gathers is read where it is, and a reduction.
            assert_eq!((found.2, found.3), (5, 3), "{param:?}");
        }
    }
    assert!(computed > 0);
}
