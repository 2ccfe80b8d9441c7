//! Parameters that some ranks, or all, leave unused.

use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::Device;
use burn::tensor::activation::relu;
use burn_dtensor::comm::{Launch, launch};
use burn_dtensor::fsdp::{FullyShard, full_model, fully_shard, unit};
use burn_dtensor::mesh::DeviceMesh;

use super::net::{Net, WIDTH, compare, config, net};
use super::params_outside_unit;
use super::support::{on_device, tensor, values};

#[test]
fn parameters_unused_on_some_ranks_get_zeros() {
    compare(
        3,
        |net| net,
        config(),
        |net, x, rank| {
            unit(net, x, |net, x| {
                let x = net.first.forward(x);
                let x = unit(&net.blocks[0], x, |block, x| match rank {
                    0 => x,
                    _ => block.forward(x).tanh(),
                });
                match rank {
                    1 => x,
                    _ => x * net.scale.val().unsqueeze(),
                }
            })
        },
    );
}

#[test]
fn an_input_the_unit_does_not_use_gets_zeros() {
    compare(
        2,
        |net| net,
        config(),
        |net, x, _| {
            unit(net, x, |net, x| {
                let x = net.first.forward(x);
                let (kept, dropped) = (x.clone(), x * 3.0);
                unit(&net.blocks[0], (kept, dropped), |block, (kept, _)| block.forward(kept))
            })
        },
    );
}

/// As without sharding, and as in PyTorch.
#[test]
fn a_parameter_that_no_rank_uses_stays_where_it_is() {
    let model = params_outside_unit::net(&Device::flex());
    for size in [[1, 2], [2, 1], [2, 2]] {
        launch(Launch::threads(size[0] * size[1]), |world| {
            let device = world.device().clone().autodiff();
            let mesh = DeviceMesh::new(world, size, ["replicate", "shard"])?;
            // Steps alternate between two layers; the third is never used, but by the second rank at last.
            let train = |mut model: params_outside_unit::Net, one: bool| {
                let mut optim = AdamWConfig::new().with_weight_decay(0.1).init();
                for step in 0..6 {
                    let loss = unit(&model, tensor(step, [3, params_outside_unit::WIDTH], &device), |net, x| {
                        let x = if step % 2 == 0 { net.first.forward(x) } else { net.blocks[0].forward(x) };
                        if one && step == 5 && world.rank() > 0 { net.blocks[1].forward(x) } else { x }
                    });
                    let grads = GradientsParams::from_grads(loss.square().mean().backward(), &model);
                    model = optim.step(1e-2, model, grads);
                }
                model
            };
            let plain = on_device(&model, &device);
            let start = values(&plain, None);
            let sharded = fully_shard(plain.clone(), &mesh, FullyShard::new())?;
            let trained = values(&full_model(&train(sharded.clone(), false))?, None);
            let expected = values(&train(plain, false), None);
            for (path, values) in &trained {
                let close = values.iter().zip(&expected[path]).all(|(a, b)| (a - b).abs() < 1e-5);
                assert!(close, "{size:?} {path}: {values:?} for {:?}", expected[path]);
            }
            assert_eq!(trained["blocks.1.weight"], start["blocks.1.weight"]);
            let trained = values(&full_model(&train(sharded, true))?, None);
            assert_ne!(trained["blocks.1.weight"], start["blocks.1.weight"], "one rank has used it");
            Ok(())
        })
        .unwrap();
    }
}

/// A unit that leaves an input unused is given zeros for it. A parameter elsewhere whose gradient is zero, because its layer
/// is saturated, is stepped all the same; one that reaches only the unused input is not.
#[test]
fn a_used_parameter_whose_gradient_is_zero_is_stepped() {
    let model = net(&Device::flex());
    launch(Launch::threads(2), |world| {
        let device = world.device().clone().autodiff();
        let mesh = DeviceMesh::new(world, [2], ["shard"])?;
        let train = |mut model: Net| {
            let mut optim = AdamWConfig::new().with_weight_decay(0.1).init();
            for step in 0..3 {
                let loss = unit(&model, tensor(step, [4, WIDTH], &device), |net, x| {
                    let x = net.first.forward(x);
                    let x = unit(&net.blocks[1], x, |block, x| relu(block.forward(x.clone()) - 1e6) + x);
                    let unused = unit(&net.blocks[2], x.clone(), |block, x| block.forward(x));
                    unit(&net.blocks[0], (x, unused), |block, (x, _)| block.forward(x))
                });
                let grads = GradientsParams::from_grads(loss.square().mean().backward(), &model);
                model = optim.step(1e-2, model, grads);
            }
            model
        };
        let plain = on_device(&model, &device);
        let start = values(&plain, None);
        let sharded = fully_shard(plain.clone(), &mesh, config())?;
        let trained = values(&full_model(&train(sharded))?, None);
        let expected = values(&train(plain), None);
        assert_ne!(expected["blocks.1.weight"], start["blocks.1.weight"], "its gradient is zero, but it decays");
        assert_eq!(expected["blocks.2.weight"], start["blocks.2.weight"]);
        for (path, values) in &trained {
            let close = values.iter().zip(&expected[path]).all(|(a, b)| (a - b).abs() < 1e-5);
            assert!(close, "{path}: {values:?} for {:?}", expected[path]);
        }
        Ok(())
    })
    .unwrap();
}
