//! The public API, from outside.

mod collective_numerics;
mod comm;
mod dtensor;
mod failure;
mod fsdp;
mod golden;
mod models;
mod rules;
mod parallel;
mod testing;
