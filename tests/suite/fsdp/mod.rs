//! `fully_shard`, against the unsharded model.

mod backward;
mod behaviour;
mod clip;
mod collectives;
mod failure;
mod groups;
mod modules;
mod order;
mod parity;
mod ragged;
pub mod support;
mod views;
