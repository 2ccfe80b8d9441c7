#[path = "../../../../src/checkpoint/safetensors_file/header.rs"]
pub mod header;
