//! The placement room.

mod error;

pub use error::PlacementError;
