#[path = "../../../../src/comm/engine/failure.rs"]
mod failure;

pub use failure::Failure;
