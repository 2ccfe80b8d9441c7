//! HSDP: shards over one mesh dimension, replicas over another.

use burn::tensor::{Device, Tensor};
use burn_dtensor::comm::{Call, Launch, ReduceOp, launch};
use burn_dtensor::fsdp::FsdpModule;
use burn_dtensor::mesh::DeviceMesh;

use super::collective_counts::{check_counts, stack};
use super::custom_collectives::{sharded, step};
use super::net;
use crate::launched;

/// Replicas that a hook averages are those of HSDP, to the bit.
#[test]
fn a_hook_that_reduces_over_replicas_makes_hsdp() {
    let model = stack(&Device::flex());
    let all = launch(Launch::threads(4), |world| {
        let mesh = DeviceMesh::new(world, [2, 2], ["replicate", "shard"])?;
        let expected = step(&sharded(&model, world, &mesh)?, world)?;
        let one_dim = sharded(&model, world, &mesh.slice("shard")?)?;
        assert_ne!(step(&one_dim, world)?, expected);
        let replicas = mesh.communicator(0)?.duplicate("hook");
        FsdpModule::of(&one_dim)?.set_all_reduce_hook(move |grads| {
            assert_eq!(grads.params.len(), grads.shards.len());
            let shards = grads
                .shards
                .into_iter()
                .map(Tensor::into_dispatch)
                .collect();
            let averages = replicas
                .all_reduce(Call::new(grads.unit), shards, ReduceOp::Avg)
                .wait()?;
            Ok(averages.into_iter().map(Tensor::from_dispatch).collect())
        });
        let grads = step(&one_dim, world)?;
        FsdpModule::of(&one_dim)?.remove_all_reduce_hook();
        Ok((grads, expected))
    });
    for (grads, expected) in launched::values(all.unwrap()) {
        assert_eq!(grads, expected);
    }
}

#[test]
fn gradients_are_the_mean_over_shards_and_replicas() {
    for [replicas, shards] in [[2, 1], [1, 2], [2, 2], [3, 2], [2, 3]] {
        net::compare_with_replicas(replicas, shards, net::config(), net::with_units);
    }
}

#[test]
fn one_all_reduce_over_replicas_a_unit() {
    check_counts(true, &[false]);
}
