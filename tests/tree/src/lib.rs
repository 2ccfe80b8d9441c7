//! Checks of the project's files as text. They need neither burn nor the crate, so they are built in seconds.
//!
//! - [`layers`]: modules of the crate use only modules of lower layers, and no files use each other in a cycle.
//! - [`parity`]: every row of `docs/parity.md` names tests that exist in the command that the README gives.
//! - [`planted`]: every planted error names a test that exists.

#![cfg(test)]

mod layers;
mod parity;
mod planted;
mod programs;

use std::path::{Path, PathBuf};

/// The root of the repository.
fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}
