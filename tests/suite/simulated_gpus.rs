//! Programs on simulated GPUs, whose ranks exchange tensors by NCCL's data plane: losses against those
//! of threads on the CPU, which are those of the unsharded model (`parallel::training`).

use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::Device;
use burn_dtensor::comm::{Launch, NcclReductions, launch};
use burn_dtensor::prelude::*;
use burn_dtensor::testing::SimulatedGpus;

use crate::fsdp::support::on_device;
use crate::parallel::support::{Net, data_rank, distribute, plan};

/// Trains a copy of `model` that is sharded and parallelized by the names of the mesh's dimensions.
/// Returns the losses of each rank.
fn losses(model: &Net, launched: Launch, shape: &[usize], names: &[&str]) -> Vec<Vec<f32>> {
    let ranks = launch(launched, |world| {
        let mesh = DeviceMesh::new(world, shape, names)?;
        let (rank, _) = data_rank(&mesh);
        let device = Device::flex().autodiff();
        let model = on_device(model, &device);
        let mut model = match names.contains(&"tp") {
            true => distribute(model, &mesh, plan(), ReshardAfterForward::Always)?,
            false => fully_shard(model, &mesh, FullyShard::new().with_units(["blocks.*"]))?,
        };
        let mut optim = AdamWConfig::new().with_epsilon(1e-5).init();
        let mut losses = Vec::new();
        for step in 0..3 {
            let loss = model.loss_on(step, rank, &device);
            losses.push(loss.clone().into_scalar::<f32>());
            let grads = GradientsParams::from_grads(loss.backward(), &model);
            model = optim.step(1e-2, model, grads);
        }
        Ok(losses)
    });
    let ranks = ranks.unwrap_or_else(|error| panic!("{error}"));
    ranks.into_iter().map(|(_, losses)| losses).collect()
}

#[test]
fn sharded_and_parallel_training_has_the_same_losses() {
    let meshes: [(&[usize], &[&str]); 5] = [
        (&[4], &["shard"]),
        (&[2, 2], &["replicate", "shard"]),
        (&[2], &["tp"]),
        (&[2, 2], &["shard", "tp"]),
        (&[2, 2, 2], &["replicate", "shard", "tp"]),
    ];
    // Once, because other tests draw from the same generator.
    let model = Net::new(&Device::flex());
    for (shape, names) in meshes {
        let ranks = shape.iter().product();
        let expected = losses(&model, Launch::threads(ranks), shape, names);
        for reductions in [NcclReductions::FixedTree, NcclReductions::Native] {
            let gpus = SimulatedGpus::new();
            let found = losses(&model, gpus.threads(ranks, reductions), shape, names);
            match reductions {
                NcclReductions::FixedTree => assert_eq!(found, expected, "{names:?}"),
                NcclReductions::Native => {
                    let pairs = found.iter().flatten().zip(expected.iter().flatten());
                    for (found, expected) in pairs {
                        assert!(
                            (found - expected).abs() <= 1e-6,
                            "{names:?}: {found} {expected}"
                        );
                    }
                }
            }
            assert_eq!(gpus.violations(), Vec::<String>::new(), "{names:?}");
        }
    }
}
