//! The crate's own sources, except for those that use more of it.

#![allow(dead_code, unused_imports)]

#[path = "../../../../src/checkpoint/manifest/mod.rs"]
pub mod manifest;
#[path = "../../../../src/checkpoint/region.rs"]
pub mod region;
pub mod safetensors_file;
