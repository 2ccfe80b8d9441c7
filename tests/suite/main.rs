//! The public API, from outside. Operators on DTensors are tested in `tests/operators`.

mod backends;
mod burn_limits;
mod checkpoint;
mod collective_numerics;
mod comm;
mod compiler;
#[cfg(feature = "cube")]
mod cube;
mod data;
mod debug;
mod effort;
mod ends;
mod errors;
mod failure;
mod faults;
mod fsdp;
mod golden;
mod launched;
mod layouts;
mod logged;
mod loopback;
mod mesh;
mod models;
mod nn;
mod optim;
mod own_process;
mod parallel;
mod pretrained;
#[cfg(feature = "mpi")]
mod processes;
mod random_trees;
mod replicate;
mod simulated_gpus;
mod testing;
mod worlds;

/// The sizes of worlds that collectives are held to brute force on.
const CONFORMING: [usize; 3] = [2, 3, 8];
