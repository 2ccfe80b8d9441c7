//! Collectives of a group of ranks.

mod cases;
mod collectives;
mod groups;
mod ledger;
mod memory;
mod plain;
mod works;
