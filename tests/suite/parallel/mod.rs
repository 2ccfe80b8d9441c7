//! `parallelize` and its composition with `fully_shard`, against the model on one rank. Tests name
//! the invariants of `burn_dtensor::parallel` they guard.

mod compute;
mod distribute_module;
mod empty_shards;
mod experts;
mod gradients;
mod mesh_dims;
mod misuse;
mod nested;
mod norms;
mod order;
mod placing;
pub mod support;
mod training;
