//! The public API, from outside.

mod collective_numerics;
mod comm;
mod dtensor;
mod failure;
mod golden;
mod testing;
