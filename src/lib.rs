//! DTensor-first tensor-parallel training on burn.
#![warn(missing_docs)]

mod autodiff;
pub mod comm;
pub mod dtensor;
mod error;
pub mod fsdp;
pub mod mesh;
pub mod placement;
#[cfg(feature = "testing")]
pub mod testing;

pub use error::{Error, Result};
