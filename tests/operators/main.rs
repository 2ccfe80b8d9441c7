//! Operators on DTensors, from outside: each alone in all layouts, several in random programs, and
//! what they send.

#[path = "../suite/effort.rs"]
mod effort;
#[path = "../suite/launched.rs"]
mod launched;
#[path = "../suite/layouts.rs"]
mod layouts;
#[path = "../suite/own_process.rs"]
mod own_process;

mod dtensor;
mod prover;
mod random_programs;
mod rules;
