//! The public API, from outside.

mod comm;
mod dtensor;
mod failure;
mod golden;
