//! Ranks that hold alike what they must, however they differ: nobody is told anything. What they
//! must agree on.

use burn::module::Module;
use burn::optim::{AdamWConfig, GradientsAccumulator, GradientsParams};
use burn::tensor::{Device, Tensor};
use burn_dtensor::comm::CommError;
use burn_dtensor::fsdp::{ReshardAfterForward, fully_shard, unit};
use burn_dtensor::mesh::DeviceMesh;
use burn_dtensor::{Error, Result, mesh_test};

use super::{mesh_of, replicated};
use crate::fsdp::net::{Net, WIDTH, net, with_units};
use crate::fsdp::support::{on_device, tensor};

/// Every other rank uses `spare`, all enter it; its bias is read outside.
fn forward(net: &Net, x: Tensor<2>, rank: usize) -> Tensor<2> {
    let y = with_units(net, x.clone(), rank) + with_units(net, x.tanh(), rank);
    let y = unit(&net.spare, y, |spare, y| {
        if rank.is_multiple_of(2) {
            spare.forward(y)
        } else {
            y
        }
    });
    y + net
        .spare
        .bias
        .as_ref()
        .expect("it has one")
        .val()
        .unsqueeze()
}

/// Steps of two backwards, each of two passes of the same units over other batches of other sizes;
/// between them forwards that nothing follows.
fn steps(
    mesh: &DeviceMesh,
    verify_every: u64,
    reshard: ReshardAfterForward,
    nan_from: usize,
) -> Result<()> {
    let device = mesh.device().clone().autodiff();
    let mut model = on_device(&net(&Device::flex()), &device);
    model.blocks[0] = model.blocks[0].clone().no_grad();
    let config = replicated()
        .with_replica_check_every(verify_every)
        .with_reshard_after_forward(reshard);
    let mut model = fully_shard(model, mesh, config)?;
    let mut optim = AdamWConfig::new().init();
    let count = if crate::effort::is_long() { 8 } else { 4 };
    for step in 0..count {
        let mut sum = GradientsAccumulator::new();
        for part in 0..2 {
            let seed = 100 * step + 10 * part + mesh.rank();
            let mut x = tensor(seed as u64, [1 + mesh.rank(), WIDTH], &device);
            if step >= nan_from && mesh.rank() == 1 {
                x = x * f32::NAN;
            }
            let loss = (forward(&model, x.clone(), mesh.rank()) - 1.0)
                .square()
                .mean();
            sum.accumulate(&model, GradientsParams::from_grads(loss.backward(), &model));
            drop(forward(&model, x, mesh.rank()));
        }
        model = optim.step(1e-2, model, sum.grads());
    }
    Ok(())
}

const NEVER: usize = usize::MAX;

#[test]
fn ranks_that_differ_in_all_they_may_are_told_nothing() {
    let shapes = [[2, 2], [3, 1], [1, 3], [2, 3], [1, 4]];
    for shape in shapes
        .into_iter()
        .take(if crate::effort::is_long() { 5 } else { 2 })
    {
        for reshard in [
            ReshardAfterForward::Auto,
            ReshardAfterForward::Always,
            ReshardAfterForward::Never,
        ] {
            mesh_of(shape).run(|mesh| steps(mesh, 1, reshard, NEVER));
        }
        mesh_of(shape).run(|mesh| steps(mesh, 3, ReshardAfterForward::Auto, NEVER));
    }
}

mesh_test!(
    processes_that_differ_in_all_they_may_are_told_nothing,
    [2, 2],
    ["replicate", "shard"],
    |mesh| { steps(mesh, 1, ReshardAfterForward::Always, NEVER) }
);

/// That is no fault of a host's.
#[test]
fn nan_is_the_same_on_all_ranks() {
    for shape in [[2, 2], [3, 1], [1, 3]] {
        mesh_of(shape).run(|mesh| steps(mesh, 1, ReshardAfterForward::Auto, 2));
    }
}

#[test]
fn ranks_that_compare_in_other_steps_are_told() {
    for (of_rank_1, differs) in [(2, "weights of step 1"), (0, "weights of step 1")] {
        let error = mesh_of([2, 1]).run_failing(|mesh| {
            let every = if mesh.rank() == 1 { of_rank_1 } else { 1 };
            steps(mesh, every, ReshardAfterForward::Auto, NEVER)
        });
        let Error::Comm(CommError::Mismatch { differs: found, .. }) = &error.cause else {
            panic!("{error}")
        };
        assert!(
            found.contains("values to compare")
                && found.contains(differs)
                && found.contains("none"),
            "{found}"
        );
    }
}
