//! `fully_shard`, against the unsharded model.

mod backward;
mod clip;
mod collectives;
mod failure;
mod forward;
mod gathering;
mod groups;
mod mismatch;
mod misuse;
mod modules;
mod net;
mod order;
mod parity;
mod ragged;
mod scope;
mod sharding;
pub mod support;
mod views;
mod whole;
