//! The public API, from outside.

mod collective_numerics;
mod comm;
mod dtensor;
mod failure;
mod fsdp;
mod golden;
mod models;
mod nn;
mod parallel;
mod prover;
mod rules;
mod testing;
