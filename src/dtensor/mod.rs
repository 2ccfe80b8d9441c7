//! The dtensor room.

mod error;

pub use error::DTensorError;
