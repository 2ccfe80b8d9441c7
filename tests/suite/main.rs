//! The public API, from outside.

mod burn_limits;
mod checkpoint;
mod collective_numerics;
mod comm;
mod compiler;
#[cfg(feature = "cube")]
mod cube;
mod data;
mod debug;
mod dtensor;
mod ends;
mod engines;
mod errors;
mod failure;
mod faults;
mod fsdp;
mod golden;
mod launched;
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
mod prover;
mod random_programs;
mod random_trees;
mod rules;
mod testing;
mod worlds;

/// The sizes of worlds that collectives are held to brute force on.
const CONFORMING: [usize; 3] = [2, 3, 8];

/// Whether everything is tried, as `.ci/long` has time for: of what is much the same many times over, `cargo test` tries some.
fn is_long() -> bool {
    std::env::var_os("LONG_TESTS").is_some()
}

/// Returns true if a sample is enough, as for `.ci/quick smoke` between two edits.
fn is_smoke() -> bool {
    std::env::var_os("SMOKE_TESTS").is_some()
}
