#[path = "../../../../src/comm/backend/failure.rs"]
mod failure;

pub use failure::Failure;
