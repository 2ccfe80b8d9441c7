//! The public API, from outside.

mod comm;
mod failure;
