//! Checks of the project's files as text. They need neither burn nor the crate, so they are built
//! in seconds.
//!
//! - [`book`]: the module `book` of the library has the pages of the book.
//! - `collective`: public functions say whether they are collective.
//! - `data_planes`: in `comm`, only the data planes know the backends.
//! - [`layers`]: modules of the crate use only modules of lower layers, and no files use each other
//!   in a cycle.
//! - `inner_types`: which folders use inner types of burn and cubecl, and why.
//! - [`lines`]: the sizes of folders, for the program of this package.
//! - `names`: a type's name stands for one type, and names and words that were replaced do not come
//!   back.
//! - `pages`: every page of the book is in its summary, and links lead to files and headings.
//! - `parity`: every row of `docs/parity.md` names tests that exist, and says which features they
//!   need.
//! - `planted`: every planted error names a test that exists.
//! - `prose`: doc comments begin with a noun phrase or a verb, and prose avoids words that say
//!   little.
//! - `reading_order`: closures and `let`s read from top to bottom.
//! - `stations`: the architecture page names functions that exist, and pages name sources that exist.
//! - [`programs`]: the tests of each test program. The program of this package prints them for the
//!   scripts of `.ci`.

pub mod book;
#[cfg(test)]
mod collective;
#[cfg(test)]
mod data_planes;
#[cfg(test)]
mod inner_types;
pub mod layers;
pub mod lines;
#[cfg(test)]
mod names;
#[cfg(test)]
mod pages;
#[cfg(test)]
mod parity;
#[cfg(test)]
mod planted;
pub mod programs;
#[cfg(test)]
mod prose;
#[cfg(test)]
mod reading_order;
#[cfg(test)]
mod stations;

use std::path::{Path, PathBuf};

/// Returns the root of the repository.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}
