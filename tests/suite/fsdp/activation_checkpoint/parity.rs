//! Ten steps of AdamW with dropout, beside the unsharded model that keeps its activations.

use std::collections::BTreeMap;

use burn::module::Module;
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::Device;
use burn_dtensor::dtensor::ops::random;
use burn_dtensor::fsdp::FsdpModule;
use burn_dtensor::prelude::*;
use burn_dtensor::testing::MeshTest;

use super::super::ddp_fsdp_hsdp_parity::AllReduce;
use super::super::support::{max_diff, on_device, values};
use super::{Drops, How, KEPT, Tower, WAYS, batch, config};

const STEPS: u64 = 10;

fn device(mesh: &DeviceMesh, checkpointing: bool) -> Device {
    let device = mesh.device().clone().autodiff();
    if checkpointing {
        device.gradient_checkpointing()
    } else {
        device
    }
}

/// The weights after all steps. Without a configuration the model is unsharded, and gradients are
/// averaged by hand.
fn train(
    mesh: &DeviceMesh,
    device: &Device,
    how: How,
    config: Option<FullyShard>,
) -> Result<BTreeMap<String, Vec<f32>>> {
    let sharded = config.is_some();
    let mut model = on_device(&Tower::new(&Device::flex()), device);
    if let Some(config) = config {
        model = fully_shard(model, mesh, config)?;
        // The weights of a block that computes again are gathered all the same.
        FsdpModule::of(&model)?
            .matching(["blocks.*", "blocks.*.feed"])?
            .set_unshard_in_backward(!how.checkpointed);
    }
    let mut optim = AdamWConfig::new().with_epsilon(1e-5).init();
    random::seed(7);
    for step in 0..STEPS {
        let x = batch(100 * (step + 1) + mesh.rank() as u64, device);
        let loss = (model.forward(x, how) - 0.3).square().mean();
        let mut grads = GradientsParams::from_grads(loss.backward(), &model);
        if !sharded {
            let mut reduce = AllReduce {
                world: mesh.world(),
                grads,
            };
            model = model.map(&mut reduce);
            grads = reduce.grads;
        }
        model = optim.step(1e-2, model, grads);
    }
    Ok(values(&full_model(&model)?, None))
}

fn compare(mesh: &DeviceMesh, checkpointing: bool) -> Result<()> {
    let device = device(mesh, checkpointing);
    let expected = train(mesh, &device, KEPT.drops(Drops::Own), None)?;
    assert!(
        max_diff(&expected, &values(&Tower::new(&device), None)) > 1e-2,
        "it has learned"
    );
    let ways = if mesh.size() == 2 {
        &WAYS[..]
    } else {
        &WAYS[2..]
    };
    for how in ways.iter().map(|how| how.drops(Drops::Own)) {
        for reshard in [ReshardAfterForward::Always, ReshardAfterForward::Never] {
            let trained = train(
                mesh,
                &device,
                how,
                Some(config().with_reshard_after_forward(reshard)),
            )?;
            let context =
                format!("{mesh}, {how:?}, {reshard:?}, gradient checkpointing {checkpointing}");
            match mesh.size() {
                // Averages over three are added up in another order.
                3 => assert!(max_diff(&trained, &expected) < 1e-5, "{context}"),
                _ => assert_eq!(trained, expected, "{context}"),
            }
        }
    }
    let alone = train(mesh, &device, WAYS[2].drops(Drops::Own), None)?;
    assert_eq!(
        alone, expected,
        "unsharded, {mesh}, gradient checkpointing {checkpointing}"
    );
    Ok(())
}

#[test]
fn ten_steps_are_those_of_the_unsharded_model_that_keeps_activations() {
    for ranks in [1, 2, 3, 4, 8] {
        MeshTest::new([ranks], ["shard"]).run(|mesh| compare(mesh, ranks % 2 == 1));
    }
    MeshTest::new([2, 2], ["replicate", "shard"]).run(|mesh| compare(mesh, false));
}

#[cfg(feature = "mpi")]
#[test]
fn ten_steps_in_two_processes() {
    MeshTest::new([2], ["shard"])
        .with_processes(2)
        .run(|mesh| compare(mesh, false));
}

#[cfg(feature = "mpi")]
#[test]
fn ten_steps_in_three_processes() {
    MeshTest::new([3], ["shard"])
        .with_processes(3)
        .run(|mesh| compare(mesh, false));
}
