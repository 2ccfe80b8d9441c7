//! The fsdp room.

mod error;

pub use error::FsdpError;
