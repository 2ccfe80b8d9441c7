//! Batches without elements on one rank: rows of features compute, and what burn would read out of
//! bounds is an error.

use burn::module::Module;
use burn::nn::{BatchNorm, BatchNormConfig, Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn::optim::GradientsParams;
use burn::tensor::{Bool, Device, Int, Tensor};
use burn_dtensor::comm::LaunchError;
use burn_dtensor::fsdp::{ParamError, checkpoint_activations};
use burn_dtensor::prelude::*;
use burn_dtensor::testing::MeshTest;

use super::support::{max_diff, on_device, values};
use crate::parallel::support::full_grads;

#[derive(Module, Debug)]
struct Net {
    tokens: Embedding,
    norm: BatchNorm,
    layer: Linear,
}

const SHAPE: [usize; 3] = [2, 4, 8];

/// Runs `forward` with so many rows on rank 1.
fn fails(rows: usize, forward: impl Fn(&Net, usize, &Device) -> Tensor<1> + Sync) -> LaunchError {
    MeshTest::new([2], ["shard"]).run_failing(|mesh| {
        let device = mesh.device().clone().autodiff();
        let net = Net {
            tokens: EmbeddingConfig::new(5, SHAPE[2]).init(&device),
            norm: BatchNormConfig::new(SHAPE[2]).init(&device),
            layer: LinearConfig::new(SHAPE[2], 3).init(&device),
        };
        let net = fully_shard(
            net,
            mesh,
            FullyShard::new().with_units(["tokens", "norm", "layer"]),
        )?;
        forward(
            &net,
            if mesh.rank() == 1 { rows } else { SHAPE[0] },
            &device,
        )
        .backward();
        Ok(())
    })
}

#[test]
fn a_batch_without_elements_is_an_error_that_names_the_unit() {
    type Forward = fn(&Net, usize, &Device) -> Tensor<1>;
    let layer: Forward = |net, rows, device| {
        let x = Tensor::<3>::ones([rows, SHAPE[1], SHAPE[2]], device);
        unit(&net.layer, x, |layer, x| layer.forward(x)).sum()
    };
    let checkpointed: Forward = |net, rows, device| {
        let x = Tensor::<3>::ones([rows, SHAPE[1], SHAPE[2]], device);
        checkpoint_activations(&net.layer, x, |layer, x| layer.forward(x)).sum()
    };
    let tokens: Forward = |net, rows, device| {
        let tokens = Tensor::<2, Int>::zeros([rows, SHAPE[1]], device);
        unit(&net.tokens, tokens, |table, tokens| table.forward(tokens)).sum()
    };
    let masked: Forward = |net, rows, device| {
        let mask = Tensor::<2, Bool>::full([rows, SHAPE[1]], true, device);
        let x = |mask: Tensor<2, Bool>| mask.float().unsqueeze_dim::<3>(2).repeat_dim(2, SHAPE[2]);
        unit(&net.layer, mask, |layer, mask| layer.forward(x(mask))).sum()
    };
    let normed: Forward = |net, rows, device| {
        let x = Tensor::<2>::ones([rows, SHAPE[2]], device);
        unit(&net.norm, x, |norm, x| norm.forward(x)).sum()
    };
    for (unit_name, forward, empty) in [
        ("layer", layer, vec![0, SHAPE[1], SHAPE[2]]),
        ("layer", checkpointed, vec![0, SHAPE[1], SHAPE[2]]),
        ("tokens", tokens, vec![0, SHAPE[1]]),
        ("layer", masked, vec![0, SHAPE[1]]),
        ("norm", normed, vec![0, SHAPE[2]]),
    ] {
        let error = fails(0, forward);
        let Error::Param(ParamError::EmptyInput { unit, shape, .. }) = &error.cause else {
            panic!("{error}")
        };
        assert_eq!((unit.as_str(), shape), (unit_name, &empty), "{error}");
        assert!(error.to_string().contains("at least one row"), "{error}");
    }
}

/// Experts without tokens compute with such rows.
#[test]
fn rows_of_features_may_be_none() {
    let layer: Linear = LinearConfig::new(4, 3).init(&Device::flex());
    let _ = values(&layer, None);
    let batch = |rows: usize, device: &Device| Tensor::<2>::ones([rows, 4], device);
    let expected = {
        let device = Device::flex().autodiff();
        let layer = on_device(&layer, &device);
        let loss = layer.forward(batch(3, &device)).square().sum() / 2.0;
        values(
            &layer,
            Some(&GradientsParams::from_grads(loss.backward(), &layer)),
        )
    };
    MeshTest::new([2], ["shard"]).run(|mesh| {
        let device = mesh.device().clone().autodiff();
        let layer = fully_shard(on_device(&layer, &device), mesh, FullyShard::new())?;
        let rows = [3, 0][mesh.rank()];
        // With the experts to which they are routed.
        let routed = Tensor::<2, Int>::zeros([rows, 2], &device);
        let (output, _) = unit(
            &layer,
            (batch(rows, &device), routed),
            |layer, (x, routed)| (layer.forward(x), routed),
        );
        assert_eq!(output.dims(), [rows, 3]);
        let grads = GradientsParams::from_grads(output.square().sum().backward(), &layer);
        let diff = max_diff(&full_grads(&layer, &grads)?, &expected);
        assert!(diff < 1e-6, "gradients are off by {diff}");
        Ok(())
    });
}

/// The local tensor of a DTensor is often empty, and its operators handle that.
#[test]
fn dtensors_may_have_empty_local_tensors() {
    MeshTest::new([3], ["tp"]).run(|mesh| {
        let device = mesh.device().clone().autodiff();
        let layer: Linear = parallelize(LinearConfig::new(4, 3).init(&device), mesh, Plan::new())?;
        let x = DTensor::<3>::ones([2, 2, 4], mesh, &[Placement::Shard(0)], &device)?;
        let y = unit(&layer, x, |layer, x| layer.forward_dtensor(x));
        assert_eq!(y.full_tensor()?.dims(), [2, 2, 3]);
        Ok(())
    });
}
