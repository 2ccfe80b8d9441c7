//! The mesh room.

mod error;

pub use error::MeshError;
