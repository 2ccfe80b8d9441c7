//! `fully_shard`, against the unsharded model.

mod backward;
mod buffers;
mod by_read;
mod clip;
mod collectives;
mod failure;
mod forward;
mod gathering;
mod going_on;
mod groups;
mod lora;
mod mismatch;
mod misuse;
mod modules;
mod net;
pub mod optimizers;
mod order;
mod parity;
mod ragged;
mod records;
mod replaced;
mod scope;
mod sharding;
pub mod support;
mod training;
mod views;
mod whole;
